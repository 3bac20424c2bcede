"""The whole recipe on any supported model: calibrate, score, select, make and fit patterns, install."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from saf.adapters import adapter_for
from saf.calibration import calibrate, collection_bytes
from saf.calibration.capture import Batch, read_batches
from saf.calibration.collect import COLLECT_BYTES
from saf.calibration.needed import collect_for_score, gather
from saf.errors import InputError, SelectionError
from saf.fit import FITTERS, fit_compact, fit_kl
from saf.freeze_report import FreezeReport
from saf.heads import Head, HeadSet
from saf.heldout import HeldOutFit, check_heldout, fit_heldout
from saf.pattern import CompactPattern, DensePattern
from saf.patterns import PATTERNS, Storage, check_options, collect_for, dense_pattern, target
from saf.scores import SCORES, Score, needed_by, score, score_name
from saf.selection import Chooser, budget, chooser, select
from saf.statistics import AttentionStatistics
from saf.stopwatch import Stopwatch
from saf.surgery import install_

Pattern = CompactPattern | DensePattern


@dataclass(frozen=True, kw_only=True)
class FreezeConfig:
    """Settings of one freezing event; raises InputError for a value that cannot be used."""

    rate: float = 0.25
    """Share of all heads of the original model to freeze: k = round(rate * layers * heads).

    Heads that are frozen already do not count: on such a model k more heads are frozen.
    """
    score: str | Score = "variance"
    """Heads with the lowest score are frozen first; a name, or a function of the statistics."""
    pattern: str = "mean"
    """What a frozen head's attention is replaced by."""
    storage: Storage = "compact"
    """How patterns are kept and executed: fitted key and distance logits, or entry by entry in bfloat16."""
    fitter: str = "proportional"
    """How the compact pattern is fitted."""
    max_fit_kl: float = 0.2
    """Largest row-averaged KL from the pattern to its compact fit, in nats; other heads are skipped."""
    strict: bool = False
    """Refuse when one of the k lowest heads does not fit, instead of taking the next one."""
    heads: tuple[tuple[int, int], ...] | None = None
    """Exactly these heads `(layer, head)`, whatever rate and score say; refused when one does not fit."""
    exclude: tuple[tuple[int, int], ...] = ()
    """Heads `(layer, head)` that stay live."""
    max_per_layer: int | None = None
    """Most heads to freeze in a layer."""
    match: str | None = None
    """Freeze as many heads in each layer as this score would choose: with score="random", the paper's control."""
    whole_groups: bool = False
    """Choose whole KV groups, so that keys go too."""
    seed: int = 0
    """Of random scores and sampled patterns."""
    backend: str = "auto"
    """Which backend executes the frozen heads."""
    trainable: bool = False
    """Train key and distance logits on with the model, from their fit."""
    heldout_kl: bool = False
    """Also fit the frozen heads on one half of the calibration sequences, and report their KL to the other half."""
    fitter_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the fitter."""
    pattern_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the pattern."""

    def __post_init__(self):
        """Check names and ranges."""
        budget(self.rate, 1)
        for name in ("heads", "exclude"):
            if (pairs := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple((int(layer), int(head)) for layer, head in pairs))
        for name, known in (
            ("score", SCORES),
            ("match", SCORES),
            ("pattern", PATTERNS),
            ("storage", get_args(Storage)),
            ("fitter", FITTERS),
        ):
            value = getattr(self, name)
            if value is not None and not callable(value) and value not in known:
                raise InputError(f"unknown {name} {value!r}; expected one of {sorted(known)}")
        check_options(self.pattern, self.pattern_options)
        if self.trainable and self.storage != "compact":
            raise InputError("trainable patterns have key and distance logits: use storage='compact'")
        if self.heldout_kl:
            check_heldout(self.pattern, self.storage)
        if not self.max_fit_kl > 0:
            raise InputError(f"max_fit_kl is in nats and positive; got {self.max_fit_kl}")
        if self.match is not None and (self.heads is not None or self.max_per_layer is not None):
            raise InputError("match sets the number of heads of each layer; leave heads and max_per_layer out")

    @property
    def needs(self) -> frozenset[str]:
        """What its scores read beside the statistics: `gradient`, `outputs`, `gates`."""
        return frozenset(key for name in (self.score, self.match) if name is not None for key in needed_by(name))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        pairs = {"exclude": [list(head) for head in self.exclude]}
        if self.heads is not None:
            pairs["heads"] = [list(head) for head in self.heads]
        return asdict(self) | pairs | {"score": score_name(self.score)}


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
    collect = sorted({kept for name in names for kept in collect_for_score(name, given)})
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

    def make(heads: HeadSet) -> dict[Head, tuple[Pattern, float]]:
        return make_patterns(model, ids, statistics, heads, config, watch)

    accepted, rejected = accept(choose, make, config)
    heads = HeadSet(accepted)
    halves = _judge(model, ids, heads, config, watch) if config.heldout_kl and len(heads) else None
    with watch("install"):
        if len(heads):
            patterns = [accepted[head][0] for head in heads]
            execution = {"backend": config.backend, "trainable": config.trainable}
            install_(model, heads, patterns, optimizer=optimizer, **execution)
    return FreezeReport(
        heads=heads,
        patterns=stack([accepted[head][0] for head in heads]),
        fit_kl={head: accepted[head][1] for head in heads},
        rejected=rejected,
        requested=choose.total,
        scores=scores[config.score],
        statistics=statistics,
        config=config.to_dict(),
        seconds=watch.seconds,
        heldout=halves,
    )


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
    if config.match is None:
        return chooser(
            ranked, config.rate, exclude=config.exclude, max_per_layer=config.max_per_layer, group_size=group_size
        )
    matched = select(scores[config.match], config.rate, exclude=config.exclude, group_size=group_size)
    return chooser(ranked, match=matched, exclude=config.exclude, group_size=group_size)


def accept(
    choose: Chooser, make: Callable[[HeadSet], dict[Head, tuple[Pattern, float]]], config: FreezeConfig
) -> tuple[dict[Head, tuple[Pattern, float]], dict[Head, float]]:
    """Make patterns of heads in score order until k pass (paper, Algorithm 1); return them and the rejected KLs.

    Candidates are taken in batches of as many as are still missing. Heads chosen together pass together.
    """
    strict = config.strict or config.heads is not None
    made: dict[Head, tuple[Pattern, float]] = {}
    rejected: dict[Head, float] = {}
    proposed = choose.propose()
    if strict and not choose.attained(available := sum(map(len, proposed))):
        raise SelectionError(f"the event asks for {choose.total} heads; {available} can be frozen")
    while proposed:
        made |= make(HeadSet(head for unit in proposed for head in unit))
        for unit in proposed:
            # Not "> max_fit_kl": a KL that is NaN never passes.
            missed = {head: made[head][1] for head in unit if not made[head][1] <= config.max_fit_kl}
            rejected |= missed
            if not missed:
                choose.accept(unit)
        if rejected and strict:
            listed = ", ".join(f"{head}: {kl:.3f}" for head, kl in sorted(rejected.items()))
            raise SelectionError(
                f"strict: {len(rejected)} of the {choose.total} lowest-{score_name(config.score)} heads do not fit "
                f"within {config.max_fit_kl} nats ({listed}); raise max_fit_kl, lower the rate, or allow substitutes"
            )
        proposed = choose.propose()
    if not choose.attained(len(choose)):
        warnings.warn(
            f"{len(choose)} of {choose.total} heads could be frozen: no further head fits within "
            f"{config.max_fit_kl} nats",
            stacklevel=3,
        )
    return {head: made[head] for head in HeadSet(choose)}, rejected


def make_patterns(
    model: nn.Module,
    ids: list[Tensor],
    statistics: AttentionStatistics,
    heads: HeadSet,
    config: FreezeConfig,
    watch: Stopwatch,
) -> dict[Head, tuple[Pattern, float]]:
    """Return the pattern of each head, on the CPU, with the row-averaged KL of its compact fit (0 without a fit).

    What the pattern needs beyond the statistics is measured for these heads, as many at a time as memory allows.
    """
    names = collect_for(config.pattern, config.storage)
    made: dict[Head, tuple[Pattern, float]] = {}
    each = collection_bytes(names, heads=1, sequences=statistics.num_sequences, length=statistics.length)
    for some in _chunks(heads, max(1, COLLECT_BYTES // max(each, 1))):
        found = calibrate(model, ids, collect=names, heads=some, watch=watch) if names else statistics
        with watch("fit"):
            made |= _make(found, some, config, adapter_for(model).sites()[0].projections()["query"][0].device)
    return made


def _chunks(heads: HeadSet, size: int) -> Iterator[HeadSet]:
    ordered = list(heads)
    for first in range(0, len(ordered), size):
        yield HeadSet(ordered[first : first + size])


def _make(
    statistics: AttentionStatistics, heads: HeadSet, config: FreezeConfig, device: torch.device
) -> dict[Head, tuple[Pattern, float]]:
    options = {"seed": config.seed} | config.pattern_options
    if config.storage == "dense":
        patterns = dense_pattern(statistics, heads, config.pattern, dtype=torch.bfloat16, **options)
        return {head: (patterns[number], 0.0) for number, head in enumerate(heads)}
    goal = target(statistics, heads, config.pattern, **options)
    if isinstance(goal, CompactPattern):
        return {head: (goal[number], 0.0) for number, head in enumerate(heads)}
    goal = [part.to(device) for part in goal]
    fitted = fit_compact(*goal[:2], fitter=config.fitter, **config.fitter_options)
    kls = fit_kl(fitted, *goal).tolist()
    fitted = fitted.to(device="cpu")
    return {head: (fitted[number], kls[number]) for number, head in enumerate(heads)}


def stack(patterns: Sequence[Pattern]) -> Pattern | None:
    """Join patterns of one kind over `[F]`; None when there are none."""
    if not patterns:
        return None
    if isinstance(patterns[0], DensePattern):
        return DensePattern(torch.stack([pattern.dense() for pattern in patterns]))
    return CompactPattern.stack([pattern for pattern in patterns if isinstance(pattern, CompactPattern)])
