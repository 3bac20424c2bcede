"""The whole recipe on any supported model: calibrate, score, select, make and fit patterns, install."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saf.adapters import adapter_for
from saf.calibration import calibrate
from saf.calibration.capture import Batch, read_batches
from saf.calibration.needed import collect_for_score, gather
from saf.errors import SelectionError
from saf.freeze_config import FreezeConfig
from saf.freeze_patterns import Made, make_patterns, stack
from saf.freeze_report import FreezeReport
from saf.heads import Head, HeadSet
from saf.heldout import HeldOutFit, fit_heldout
from saf.scores import Score, score, score_name
from saf.selection import Chooser, chooser, select
from saf.stopwatch import Stopwatch
from saf.surgery import install_


def freeze_(
    model: nn.Module,
    batches: Iterable[Batch],
    config: FreezeConfig | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    heldout: Iterable[Batch] | None = None,
    needed: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    capture_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FreezeReport:
    """Freeze the heads whose attention depends least on the input, changing the model in place.

    Args:
        model: The project's `GPT` or another supported causal language model.
        batches: Calibration sequences: LongTensors `[B, T]` or mappings with `input_ids`. Patterns cover T
            positions, so longer inputs are refused afterwards; a T below the model's own limit warns.
        config: Settings; the paper's recipe at 25% by default.
        optimizer: The optimiser that trains the model: its state follows the retained rows, and it takes on the
            logits of trainable patterns.
        heldout: Further sequences of the same length, for output-aware scores.
        needed: What the score reads beside the statistics, by name; `gradient` may be the `QKGradient` itself.
        folder: Where to keep each layer's calibration once it is finished, to go on from there; see `calibrate`.
        capture_bytes: Most memory for queries and keys kept at once; see `calibrate`.
        progress: Called with (layers measured, layers).

    Returns:
        What was measured, chosen, fitted and rejected, and the seconds of each part. It prints as a table.

    Raises:
        InputError: Batches or settings that cannot be used, a score that lacks what it needs.
        SelectionError: With `strict`, a head among the k lowest whose fit exceeds `max_fit_kl`, or fewer than k
            live heads. The model is unchanged.
    """
    config = config or FreezeConfig()
    ids = read_batches(batches)
    adapter = adapter_for(model)
    _warn_if_shorter(ids[0].shape[-1], adapter.max_length)
    first = adapter.sites()[0]
    device = first.projections()["query"][0].device
    watch = Stopwatch(device)
    given = needed or {}
    names = {name for name in (config.score, config.match) if name is not None}
    collect = scores_collect(config, given)
    options = {"folder": folder, "capture_bytes": capture_bytes}
    statistics = calibrate(model, ids, collect=collect, **options, progress=progress, watch=watch)
    with watch("score"):
        scores = {
            name: score(statistics, name, **gather(model, ids, statistics, name, given=given, heldout=heldout))
            if name != "random"
            else score(statistics, name, seed=config.seed)
            for name in names
        }
    with watch("select"):
        choose = choose_by(scores, config, group_size=first.layout.num_heads // first.layout.num_kv_heads)

    def make(heads: HeadSet) -> dict[Head, Made]:
        return make_patterns(model, ids, statistics, heads, config, watch)

    accepted, rejected = accept(choose, make, config)
    heads = HeadSet(accepted)
    halves = _judge(model, ids, heads, config, watch) if config.heldout_kl and len(heads) else None
    with watch("install"):
        if len(heads):
            patterns = [accepted[head].pattern for head in heads]
            execution = {"backend": config.backend, "trainable": config.trainable}
            install_(model, heads, patterns, optimizer=optimizer, **execution)
    return FreezeReport(
        heads=heads,
        patterns=stack([accepted[head].pattern for head in heads]),
        fit_kl={head: accepted[head].fit_kl for head in heads},
        rejected={head: made.fit_kl for head, made in rejected.items()},
        certificates={
            head: made.certificate for head, made in (accepted | rejected).items() if made.certificate is not None
        },
        requested=choose.total,
        scores=scores[config.score],
        statistics=statistics,
        config=config.to_dict(),
        seconds=watch.seconds,
        heldout=halves,
    )


def scores_collect(config: FreezeConfig, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what the first calibration keeps beside the statistics, for scores that read more than `given` brings."""
    names = {name for name in (config.score, config.match) if name is not None}
    return tuple(sorted({kept for name in names for kept in collect_for_score(name, given)}))


def _judge(model: nn.Module, ids: list[Tensor], heads: HeadSet, config: FreezeConfig, watch: Stopwatch) -> HeldOutFit:
    """Fit `heads` on one half of the calibration sequences, as configured, and measure the fits on both halves."""
    options = {"pattern": config.pattern, "fitter": config.fitter, "fits": {"fit": config.fitter_options}}
    with watch("heldout"):
        return fit_heldout(model, ids, heads, **options)["fit"]


def _warn_if_shorter(length: int, longest: int | None) -> None:
    if longest is not None and length < longest:
        warnings.warn(
            f"calibration has {length} tokens, the model takes up to {longest}: once heads are frozen, inputs of more "
            f"than {length} tokens are refused; calibrate on {longest} tokens to keep them",
            UserWarning,
            stacklevel=3,
        )


def choose_by(scores: Mapping[str | Score, Tensor], config: FreezeConfig, *, group_size: int) -> Chooser:
    """Return what proposes heads by the configured score, budget and conditions."""
    group_size = group_size if config.whole_groups else 1
    ranked = scores[config.score]
    if config.heads is not None:
        return chooser(ranked, count=len(config.heads), only=config.heads, group_size=group_size)
    conditions = {"exclude": config.exclude, "group_size": group_size}
    total = {"rate": config.rate} if config.count is None else {"count": config.count}
    if config.match is None:
        return chooser(ranked, **total, max_per_layer=config.max_per_layer, **conditions)
    return chooser(ranked, match=select(scores[config.match], **total, **conditions), **conditions)


def accept(
    choose: Chooser, make: Callable[[HeadSet], dict[Head, Made]], config: FreezeConfig
) -> tuple[dict[Head, Made], dict[Head, Made]]:
    """Make patterns of heads in score order until k pass (paper, Algorithm 1); return them and the rejected ones.

    Candidates are taken in batches of as many as are still missing. Heads chosen together pass together.
    """
    strict = config.strict or config.heads is not None
    made: dict[Head, Made] = {}
    rejected: dict[Head, Made] = {}
    proposed = choose.propose()
    if strict and not choose.attained(available := sum(map(len, proposed))):
        raise SelectionError(f"the event asks for {choose.total} heads; {available} can be frozen")
    while proposed:
        made |= make(HeadSet(head for unit in proposed for head in unit))
        for unit in proposed:
            # Not "> max_fit_kl": a KL that is NaN never passes.
            missed = {head: made[head] for head in unit if not made[head].fit_kl <= config.max_fit_kl}
            rejected |= missed
            if not missed:
                choose.accept(unit)
        if rejected and strict:
            listed = ", ".join(f"{head}: {rejected[head].fit_kl:.3f}" for head in sorted(rejected))
            raise SelectionError(
                f"strict: {len(rejected)} of the {choose.total} lowest-{score_name(config.score)} heads do not fit "
                f"within {config.max_fit_kl} nats ({listed}); raise max_fit_kl, lower the rate, or allow substitutes"
            )
        proposed = choose.propose()
    if not choose.attained(len(choose)):
        reason = f"no further head fits within {config.max_fit_kl} nats" if rejected else "no other may be frozen"
        warnings.warn(f"{len(choose)} of {choose.total} heads could be frozen: {reason}", stacklevel=3)
    return {head: made[head] for head in HeadSet(choose)}, rejected
