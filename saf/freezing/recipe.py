"""The whole recipe on any supported model: calibrate, score, select, make and fit patterns, install; or prune."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from saf.adapters import adapter_for, rows_of
from saf.calibration import (
    Batch,
    Sequences,
    calibrate,
    calibrate_together,
    heads_at_a_time,
    read_batches,
    read_sequences,
)
from saf.errors import InputError, LossError, SafWarning
from saf.fit import fit_exponential_heads, fit_kl, fit_with_certificate, warn_of_missed
from saf.freezing.choice import (
    Judged,
    Made,
    accept,
    check_below,
    check_heads_of,
    check_ranks,
    choose_by,
    gather,
    scores_collect,
)
from saf.freezing.config import FreezeConfig
from saf.freezing.heldout import HeldOutFit, fit_heldout
from saf.freezing.loss import MAX_RISE, heldout_loss, perplexity_rise
from saf.freezing.report import FreezeReport
from saf.heads import EDITED, Head, HeadSet
from saf.machine.processes import agreed, done_once
from saf.machine.stopwatch import Stopwatch
from saf.ops import choose_backend
from saf.patterns import CompactPattern, Pattern, pattern_for_each_head
from saf.scores import score
from saf.statistics import AttentionStatistics
from saf.surgery import check_editable, install_, prune_, uninstall_
from saf.surgery.edit import value_dtypes
from saf.targets import FITTED, collect_for, dense_pattern, exact_pattern, target


def freeze_(
    model: nn.Module,
    batches: Iterable[Batch],
    config: FreezeConfig | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    heldout: Iterable[Batch] | None = None,
    accept_loss: bool | None = None,
    needed: Mapping[str, Any] | None = None,
    first: int | None = None,
    may_be_none: bool = False,
    capture_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FreezeReport:
    """Freeze the heads whose attention depends least on the input, changing the model in place.

    In a `torch.distributed` group every process calls it with the same weights. All measure the first one's batches,
    each some of the heads. The first one decides, and all of them install that, or none where one of them fails. Wrap
    for data parallelism again afterwards.

    With `FreezeConfig(operation="prune")` the heads chosen are removed by `prune_` instead, and nothing is fitted.

    Args:
        model: The project's `GPT` or another supported causal language model.
        batches: Calibration sequences: LongTensors `[B, T]` or mappings with `input_ids`. Patterns cover T
            positions, so longer inputs are refused afterwards; a T below the model's own limit warns. A score that
            reads gates takes its loss at the mappings' `targets` `[B, T]` where they have them (-100 is none), at
            every next token otherwise.
        config: Settings; the paper's recipe at 25% by default.
        optimizer: The optimiser that trains the model: its state follows the retained rows, and it takes on the
            logits of trainable patterns.
        heldout: Further sequences of the same length. Their loss before and after is reported, and output-aware scores
            read them.
        accept_loss: Whether to keep a model whose perplexity on `heldout` rises by more than 5%. By default that is
            refused without an `optimizer`; with one, training follows.
        needed: What the score reads beside the statistics, by name; `gradient` may be the `QKGradient` itself, and
            `outputs` the held-out sequences.
        first: Freeze only so many of the heads chosen, those of lowest score; the report's `deferred` names the others,
            for `FreezeConfig(only=...)` later.
        may_be_none: Freeze no head where none scores below the settings' `below`, in place of raising.
        capture_bytes: Most memory for queries and keys kept at once; see `calibrate`.
        progress: Called with (layers measured, layers).

    Returns:
        What was measured, chosen, fitted and rejected, and the seconds of each part. It prints as a table.

    Raises:
        InputError: Batches or settings that cannot be used, a score that lacks what it needs or is the same for all
            heads, heads that do not exist or are frozen, more heads than are live, an optimiser that does not hold the
            model's weights.
        UnsupportedError: A backend that cannot run the model's frozen heads; heads named in a layer that stays
            ordinary.
        LossError: A rise of held-out perplexity that is not accepted. The model is as it was.
        SelectionError: With `strict`, a head among the k lowest whose fit exceeds `max_fit_kl`, or fewer than k
            live heads; no head that scores less than `below`. The model is unchanged.
    """
    config = FreezeConfig() if config is None else config
    check_editable(model, optimizer)  # now, not after the whole measurement
    adapter = adapter_for(model)
    watch = Stopwatch(adapter.device)
    text = heldout if heldout is None or isinstance(heldout, Tensor | Mapping) else list(heldout)
    kept = done_once(lambda: _checked(model, batches, config, adapter.max_length, text))

    def loss() -> float:
        """Measure the loss of the held-out text."""
        with watch("loss"):
            return done_once(lambda: heldout_loss(model, text or ()))

    before = None if text is None else loss()
    given = needed or {}
    options = {"collect": scores_collect(config, given), "capture_bytes": capture_bytes, "progress": progress}
    statistics = calibrate_together(model, kept, timer=watch, **options)
    asked = {"first": first, "may_be_none": may_be_none}
    report = done_once(lambda: _decide(model, kept, statistics, config, text, given, watch, **asked))
    with watch("prune" if config.operation == "prune" else "install"), _in_all_or_none(model, report.heads, optimizer):
        _edit_(model, report, config, report.heads, optimizer)
    if before is not None:
        try:
            report = replace(report, loss_before=before, loss_after=loss())
        except Exception:
            uninstall_(model, report.heads, optimizer=optimizer)
            raise
        accepted = optimizer is not None if accept_loss is None else accept_loss
        # Not "rise > MAX_RISE": a loss that is NaN is never within it.
        if not (accepted or report.perplexity_rise <= MAX_RISE):
            uninstall_(model, report.heads, optimizer=optimizer)
            raise done_once(lambda: _refusal(model, report, config, text or (), optimizer))
    if len(report.heads):
        adapter.remember(report.known())
    return replace(report, seconds=report.seconds | watch.seconds)


def _edit_(
    model: nn.Module,
    report: FreezeReport,
    config: FreezeConfig,
    heads: HeadSet,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Freeze or prune some of the heads that the report chose."""
    if config.operation == "prune":
        prune_(model, heads, optimizer=optimizer)
    elif report.patterns is not None:
        every = dict(zip(report.heads, pattern_for_each_head(report.patterns), strict=True))
        patterns = [every[head] for head in heads]
        execution = {"backend": config.backend, "trainable": config.trainable}
        install_(model, heads, patterns, optimizer=optimizer, **execution)


def _refusal(
    model: nn.Module,
    report: FreezeReport,
    config: FreezeConfig,
    text: Iterable[Batch],
    optimizer: torch.optim.Optimizer | None,
) -> LossError:
    """Return the error that names the layer whose heads alone raise the loss most; the model ends as it was."""
    losses: dict[int, float] = {}
    for layer in sorted({layer for layer, _ in report.heads}):
        heads = HeadSet((layer, head) for head in report.heads.in_layer(layer))
        _edit_(model, report, config, heads, optimizer)
        try:
            losses[layer] = heldout_loss(model, text)
        finally:
            uninstall_(model, heads, optimizer=optimizer)
    worst = max(losses, key=lambda layer: (math.isnan(losses[layer]), losses[layer]))
    alone, count = perplexity_rise(report.loss_before, losses[worst]), len(report.heads.in_layer(worst))
    return LossError(
        f"held-out perplexity must rise by at most {MAX_RISE:.0%}, got {report.perplexity_rise:.1%}; layer {worst} "
        f"costs most ({count} heads, alone {alone:.1%}): freeze fewer there, or pass accept_loss=True (--accept-loss)"
    )


@contextmanager
def _in_all_or_none(model: nn.Module, heads: HeadSet, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Let an edit of `heads` succeed in every process of the group; where one fails, undo it in the others."""
    edited = False
    try:
        with agreed():
            yield
            edited = True
    except Exception:
        if edited:
            uninstall_(model, heads, optimizer=optimizer)
        raise


def _checked(
    model: nn.Module,
    batches: Iterable[Batch],
    config: FreezeConfig,
    longest: int | None,
    heldout: Iterable[Batch] | None,
) -> Sequences:
    """Return the batches, read once; raise a SafError for what cannot be measured or frozen, before anything is."""
    sequences = read_sequences(batches)
    length = sequences.length
    if config.operation != "prune":  # pruned heads have no pattern that ends anywhere
        _warn_of_length(length, longest)
    adapter = adapter_for(model)
    sites = adapter.sites()
    check_heads_of(model, config)
    if heldout is not None or "gates" in config.needs:
        adapter.check_next_token()
    if heldout is not None and config.operation == "freeze" and (most := read_sequences(heldout).length - 1) > length:
        raise InputError(f"heldout must have inputs of at most the calibration's {length} tokens, got {most}")
    config.check_calibration(sequences=sequences.num_different, length=length)
    if config.operation == "freeze":
        for device, dtypes in {(rows_of(site, "value").parameter.device, value_dtypes(site)) for site in sites}:
            kinds = {"trainable": config.trainable, "exponential": config.storage == "exponential"}
            choose_backend(config.backend, device=device, dtypes=dtypes, **kinds)
    return sequences


def _decide(
    model: nn.Module,
    kept: Sequences,
    statistics: AttentionStatistics,
    config: FreezeConfig,
    heldout: Iterable[Batch] | None,
    given: Mapping[str, Any],
    watch: Stopwatch,
    *,
    first: int | None,
    may_be_none: bool,
) -> FreezeReport:
    """Score, select and fit; the model stays as it is."""
    adapter = adapter_for(model)
    ids = read_batches(kept) if config.heldout_kl else []  # whose halves must have one length
    layouts = [site.layout for site in adapter.sites()]
    names = {name for name in (config.score, config.match) if name is not None}
    with watch("score"):
        scores = {
            name: score(statistics, name, **gather(model, kept, statistics, name, given=given, heldout=heldout))
            if name != "random"
            else score(statistics, name, seed=config.seed)
            for name in names
        }
    if config.heads is None:
        for name, values in scores.items():
            check_ranks(name, values, statistics, adapter.dtype)
    with watch("select"):
        group_size = layouts[0].num_heads // layouts[0].num_kv_heads
        choose = choose_by(scores, config, group_size=group_size)
        if not may_be_none and choose.is_empty:
            check_below(scores[config.score], config)

    def make(heads: HeadSet) -> Mapping[Head, Judged]:
        if config.operation == "prune":
            return dict.fromkeys(heads, Judged())
        return make_patterns(model, kept, statistics, heads, config, watch)

    before = len(adapter.heads(config.kind))
    accepted, rejected = accept(choose, make, config, before=before)
    ranked = sorted(accepted, key=lambda head: (float(scores[config.score][head]), head))
    heads, deferred = HeadSet(ranked[:first]), () if first is None else tuple(ranked[first:])
    frozen = {head: made for head in heads if isinstance(made := accepted[head], Made)}
    return FreezeReport(
        heads=heads,
        patterns=_together([made.pattern for made in frozen.values()]),
        fit_kl={head: made.fit_kl for head, made in frozen.items()},
        rejected={head: made.fit_kl for head, made in rejected.items()},
        deferred=deferred,
        exponential={head: made.exponential for head, made in frozen.items() if made.exponential is not None},
        certificates={
            head: made.certificate for head, made in (accepted | rejected).items() if made.certificate is not None
        },
        requested=choose.total,
        before={kind: found for kind in EDITED if (found := len(adapter.heads(kind)))},
        scores=scores[config.score],
        statistics=statistics,
        config=config.to_dict(),
        heldout=_judge(model, ids, heads, config, watch) if config.heldout_kl and len(heads) else None,
        seconds=watch.seconds,
    )


def make_patterns(
    model: nn.Module,
    batches: Iterable[Batch],
    statistics: AttentionStatistics,
    heads: HeadSet,
    config: FreezeConfig,
    watch: Stopwatch,
) -> dict[Head, Made]:
    """Return what is made of each head: its pattern, and KL and certificate of its compact fit.

    What the pattern needs beyond the statistics is measured for these heads, as many at a time as memory allows.
    """
    names = collect_for(config.pattern, config.storage)
    made: dict[Head, Made] = {}
    size = heads_at_a_time(model, names, sequences=statistics.num_sequences, length=statistics.length)
    for some in _chunks(heads, size):
        found = calibrate(model, batches, collect=names, heads=some, timer=watch) if names else statistics
        with watch("fit"):
            made |= _make(found, some, config, adapter_for(model).device)
    return made


def _chunks(heads: HeadSet, size: int) -> Iterator[HeadSet]:
    """Yield the heads in order, `size` at a time."""
    ordered = list(heads)
    for first in range(0, len(ordered), size):
        yield HeadSet(ordered[first : first + size])


def _make(
    statistics: AttentionStatistics, heads: HeadSet, config: FreezeConfig, device: torch.device
) -> dict[Head, Made]:
    """Make the patterns of heads whose statistics are all there; fits run on `device`."""
    options = {"seed": config.seed} | config.pattern_options
    if config.storage not in FITTED:
        dtype = torch.bfloat16 if config.storage == "dense_bfloat16" else torch.float32
        patterns = dense_pattern(statistics, heads, config.pattern, dtype=dtype, **options)
        return {head: Made(patterns[number]) for number, head in enumerate(heads)}
    if (exact := exact_pattern(statistics, heads, config.pattern, **options)) is not None:
        exact = exact.canonical()
        return {head: Made(exact[number]) for number, head in enumerate(heads)}
    goal = [part.to(device) for part in target(statistics, heads, config.pattern, **options)]
    fitted, certificate = fit_with_certificate(*goal[:2], fitter=config.fitter, **config.fitter_options)
    warn_of_missed(certificate, config.fitter)
    kls, certificates = fit_kl(fitted, *goal).tolist(), certificate.to_dicts()
    if config.storage == "exponential":
        return _make_exponential(fitted, goal[:2], heads, config, kls, certificates)
    fitted = fitted.to(device="cpu")
    return {
        head: Made(fitted[number], fit_kl=kls[number], certificate=certificates[number])
        for number, head in enumerate(heads)
    }


def _make_exponential(
    compact: CompactPattern,
    marginals: Sequence[Tensor],
    heads: HeadSet,
    config: FreezeConfig,
    kls: Sequence[float],
    certificates: Sequence[dict[str, Any]],
) -> dict[Head, Made]:
    """Make exponential patterns of compact fits; those of heads that they do not fit within the limits stay compact."""
    made = {}
    for number, (head, fit) in enumerate(zip(heads, fit_exponential_heads(compact, *marginals), strict=True)):
        kl = kls[number] if fit.pattern.kind == "compact" else kls[number] + fit.extra_kl
        passes = kl <= config.max_fit_kl
        pattern = fit.pattern if passes else compact[number]
        numbers = {name: value for name, value in vars(fit).items() if name != "pattern"} | {"kind": pattern.kind}
        made[head] = Made(
            pattern.to(device="cpu"),
            fit_kl=kl if passes else kls[number],
            certificate=certificates[number],
            exponential=numbers,
        )
    return made


def _together(patterns: Sequence[Pattern]) -> Pattern | list[Pattern] | None:
    """Join compact or dense patterns over `[F]`; others differ in shape and stay a list. None when there are none."""
    if not patterns or {one.kind for one in patterns} not in ({"compact"}, {"dense"}):
        return list(patterns) or None
    kind: Any = type(patterns[0])
    return kind.stack(patterns)


def _judge(model: nn.Module, ids: list[Tensor], heads: HeadSet, config: FreezeConfig, watch: Stopwatch) -> HeldOutFit:
    """Fit `heads` on one half of the calibration sequences, as configured, and measure the fits on both halves."""
    options = {"pattern": config.pattern, "fitter": config.fitter, "fits": {"fit": config.fitter_options}}
    with watch("heldout"):
        return fit_heldout(model, ids, heads, **options)["fit"]


def _warn_of_length(length: int, longest: int | None) -> None:
    """Warn that freezing will change the longest input that the model takes, or measures it beyond its context."""
    if longest is not None and length > longest:
        warnings.warn(
            f"calibration has {length} tokens, the model is made for {longest}: attention is measured beyond its "
            f"context, and patterns will cover {length} tokens; calibrate on {longest} tokens unless this is meant",
            SafWarning,
            stacklevel=6,  # as below
        )
    if longest is not None and length < longest:
        warnings.warn(
            f"calibration has {length} tokens, the model takes up to {longest}: once heads are frozen, inputs of more "
            f"than {length} tokens are refused; calibrate on {longest} tokens to keep them",
            SafWarning,
            stacklevel=6,  # past _checked and done_once, at the caller of freeze_
        )
