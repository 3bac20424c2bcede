"""The whole recipe on any supported model: calibrate, score, select, make and fit patterns, install."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from saf.adapters import adapter_for
from saf.calibration import calibrate
from saf.calibration.driver import Batch
from saf.errors import InputError, SelectionError
from saf.fit import FITTERS, fit_compact, fit_kl
from saf.freeze_report import FreezeReport
from saf.heads import Head, HeadSet
from saf.pattern import CompactPattern
from saf.patterns import PATTERNS, target
from saf.scores import SCORES, score
from saf.selection import budget, ranking
from saf.statistics import AttentionStatistics
from saf.stopwatch import Stopwatch
from saf.surgery import install_


@dataclass(frozen=True, kw_only=True)
class FreezeConfig:
    """Settings of one freezing event; raises InputError for a value that cannot be used."""

    rate: float = 0.25
    """Share of all heads of the original model to freeze: k = round(rate * layers * heads)."""
    score: str = "variance"
    """Heads with the lowest score are frozen first."""
    pattern: str = "mean"
    """What a frozen head's attention is replaced by."""
    fitter: str = "proportional"
    """How the compact pattern is fitted."""
    max_fit_kl: float = 0.2
    """Largest row-averaged KL from the pattern to its compact fit, in nats; other heads are skipped."""
    strict: bool = False
    """Refuse when one of the k lowest heads does not fit, instead of taking the next one."""
    exclude: tuple[tuple[int, int], ...] = ()
    """Heads `(layer, head)` that stay live."""
    backend: str = "auto"
    """Which backend executes the frozen heads."""
    fitter_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the fitter."""

    def __post_init__(self):
        """Check names and ranges."""
        budget(self.rate, 1)
        for name, known in (("score", SCORES), ("pattern", PATTERNS), ("fitter", FITTERS)):
            if getattr(self, name) not in known:
                raise InputError(f"unknown {name} {getattr(self, name)!r}; expected one of {sorted(known)}")
        if not self.max_fit_kl > 0:
            raise InputError(f"max_fit_kl is in nats and positive; got {self.max_fit_kl}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self) | {"exclude": [list(head) for head in self.exclude]}


def freeze_(
    model: nn.Module,
    batches: Iterable[Batch],
    config: FreezeConfig | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FreezeReport:
    """Freeze the heads whose attention depends least on the input, changing the model in place.

    Args:
        model: The project's `GPT` or another supported causal language model.
        batches: Calibration sequences: LongTensors `[B, T]` or mappings with `input_ids`. Patterns cover T
            positions, so longer inputs are refused afterwards.
        config: Settings; the paper's recipe at 25% by default.
        optimizer: The optimiser that trains the model: its state follows the retained rows.
        progress: Called with (layers measured, layers).

    Returns:
        What was measured, chosen, fitted and rejected, and the seconds of each part. It prints as a table.

    Raises:
        InputError: Batches or settings that cannot be used.
        SelectionError: With `strict`, a head among the k lowest whose fit exceeds `max_fit_kl`, or fewer than k
            live heads. The model is unchanged.
    """
    config = config or FreezeConfig()
    device = adapter_for(model).sites()[0].projections()["query"][0].device
    watch = Stopwatch(device)
    statistics = calibrate(model, batches, progress=progress, watch=watch)
    with watch("score"):
        scores = score(statistics, config.score)
    with watch("fit"):
        accepted, rejected = accept(statistics, scores, config, device)
    heads = HeadSet(accepted)
    with watch("install"):
        if len(heads):
            patterns = [accepted[head][0] for head in heads]
            install_(model, heads, patterns, optimizer=optimizer, backend=config.backend)
    return FreezeReport(
        heads=heads,
        patterns=CompactPattern.stack([accepted[head][0] for head in heads]) if len(heads) else None,
        fit_kl={head: accepted[head][1] for head in heads},
        rejected=rejected,
        requested=budget(config.rate, scores.numel()),
        scores=scores,
        statistics=statistics,
        config=config.to_dict(),
        seconds=watch.seconds,
    )


def accept(
    statistics: AttentionStatistics, scores: Tensor, config: FreezeConfig, device: torch.device
) -> tuple[dict[Head, tuple[CompactPattern, float]], dict[Head, float]]:
    """Fit candidates in score order until k pass (paper, Algorithm 1); return accepted fits and rejected KLs.

    Candidates are fitted in batches of as many as are still missing.
    """
    wanted = budget(config.rate, scores.numel())
    order = ranking(scores, config.exclude)
    if wanted > len(order) and config.strict:
        raise SelectionError(f"rate {config.rate} asks for {wanted} heads; {len(order)} can be frozen")
    accepted: dict[Head, tuple[CompactPattern, float]] = {}
    rejected: dict[Head, float] = {}
    position = 0
    while len(accepted) < wanted and position < len(order):
        candidates = order[position : position + wanted - len(accepted)]
        position += len(candidates)
        for head, (pattern, kl) in fit_heads(statistics, HeadSet(candidates), config, device).items():
            if kl <= config.max_fit_kl:
                accepted[head] = (pattern, kl)
            else:
                rejected[head] = kl
        if rejected and config.strict:
            listed = ", ".join(f"{head}: {kl:.3f}" for head, kl in sorted(rejected.items()))
            raise SelectionError(
                f"strict: {len(rejected)} of the {wanted} lowest-{config.score} heads do not fit within "
                f"{config.max_fit_kl} nats ({listed}); raise max_fit_kl, lower the rate, or allow substitutes"
            )
    if len(accepted) < wanted:
        warnings.warn(
            f"{len(accepted)} of {wanted} heads could be frozen: no further head fits within {config.max_fit_kl} nats",
            stacklevel=3,
        )
    return accepted, rejected


def fit_heads(
    statistics: AttentionStatistics, heads: HeadSet, config: FreezeConfig, device: torch.device
) -> dict[Head, tuple[CompactPattern, float]]:
    """Fit the pattern of each head; return it, on the CPU, with its row-averaged KL in nats."""
    goal = [part.to(device) for part in target(statistics, heads, config.pattern)]
    fitted = fit_compact(*goal[:2], fitter=config.fitter, **config.fitter_options)
    kls = fit_kl(fitted, *goal).tolist()
    fitted = fitted.to(device="cpu")
    return {head: (fitted[number], kls[number]) for number, head in enumerate(heads)}
