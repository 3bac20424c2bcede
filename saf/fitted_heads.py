"""`fit_heads` makes the patterns that heads are frozen into and measures their fits; `Editor` installs them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from saf.calibration import Batch, calibrate, heads_at_a_time
from saf.fit import fit_exponential_heads, fit_kl, fit_with_certificate, split_options, warn_of_missed
from saf.freeze_config import FreezeConfig
from saf.heads import Head, HeadSet
from saf.machine import Stopwatch
from saf.models.adapter import adapter_for
from saf.patterns import Pattern
from saf.statistics import AttentionStatistics
from saf.surgery import install_, prune_, uninstall_
from saf.targets import FITTED, collect_for, dense_pattern, exact_pattern, target


@dataclass(frozen=True)
class FittedHead:
    """Hold a head's pattern, on the CPU, and how its compact fit went; a pruned head has neither."""

    pattern: Pattern | None = None
    fit_kl: float = 0.0
    """Row-averaged KL from the target to the fit, nats; 0 without a fit."""
    certificate: dict[str, Any] | None = None
    """The fit's `Certificate` in plain values; None without a fit."""
    exponential: dict[str, Any] | None = None
    """With exponential storage, the numbers of `saf.fit.ExponentialFit` and the pattern's kind; None otherwise."""


def fit_heads(
    model: nn.Module,
    batches: Iterable[Batch],
    statistics: AttentionStatistics,
    heads: HeadSet,
    config: FreezeConfig,
    timer: Stopwatch,
) -> dict[Head, FittedHead]:
    """Return each head's pattern, with the KL and certificate of its compact fit.

    What the pattern needs beyond the statistics is measured for these heads, as many at a time as memory allows.
    """
    if config.operation == "prune":
        return dict.fromkeys(heads, FittedHead())
    collect = collect_for(config.pattern, config.storage)
    size = heads_at_a_time(model, collect, sequences=statistics.num_sequences, length=statistics.length)
    device, ordered = adapter_for(model).device, list(heads)
    fits: dict[Head, FittedHead] = {}
    for start in range(0, len(ordered), size):
        some = HeadSet(ordered[start : start + size])
        measured = calibrate(model, batches, collect=collect, heads=some, timer=timer) if collect else statistics
        with timer("fit"):
            fits |= zip(some, _fit(measured, some, config, device), strict=True)
    return fits


def _fit(
    statistics: AttentionStatistics, heads: HeadSet, config: FreezeConfig, device: torch.device
) -> list[FittedHead]:
    """Make the patterns of heads from statistics that have all they need; fits run on `device`."""
    options = {"seed": config.seed} | config.pattern_options
    if config.storage not in FITTED:
        dtype = torch.bfloat16 if config.storage == "dense_bfloat16" else torch.float32
        return [*map(FittedHead, dense_pattern(statistics, heads, config.pattern, dtype=dtype, **options).singles())]
    if (exact := exact_pattern(statistics, heads, config.pattern, **options)) is not None:
        return [*map(FittedHead, exact.canonical().singles())]
    # The floored, renormalised mean pattern enters by its marginals, Eq. (4), and its entropy alone.
    goal = [part.to(device) for part in target(statistics, heads, config.pattern, **options)]
    of_compact, of_exponential = split_options(config.fitter, config.fitter_options, config.storage)
    compact, certificate = fit_with_certificate(*goal[:2], fitter=config.fitter, **of_compact)
    warn_of_missed(certificate, config.fitter)
    kls, certificates = fit_kl(compact, *goal).tolist(), certificate.to_dicts()
    if config.storage == "compact":
        return [*map(FittedHead, compact.to(device="cpu").singles(), kls, certificates)]
    fits = []
    for number, fit in enumerate(fit_exponential_heads(compact, *goal[:2], **of_exponential)):
        # A head whose exponential pattern is outside the tolerance is judged by its compact one.
        kl = kls[number] if fit.pattern.kind == "compact" else kls[number] + fit.extra_kl
        pattern, kl = (fit.pattern, kl) if kl <= config.max_fit_kl else (compact[number], kls[number])
        numbers = {name: value for name, value in vars(fit).items() if name != "pattern"} | {"kind": pattern.kind}
        fits.append(FittedHead(pattern.to(device="cpu"), kl, certificates[number], numbers))
    return fits


@dataclass(frozen=True)
class Editor:
    """Freezes or prunes heads of a model as the settings of an event say, and undoes it."""

    model: nn.Module
    config: FreezeConfig
    optimizer: torch.optim.Optimizer | None
    fits: Mapping[Head, FittedHead]

    def edit_(self, heads: HeadSet) -> None:
        """Install the heads' patterns, or remove the heads."""
        if self.config.operation == "prune":
            prune_(self.model, heads, optimizer=self.optimizer)
            return
        execution = {"backend": self.config.backend, "trainable": self.config.trainable}
        patterns: Any = [self.fits[head].pattern for head in heads]
        install_(self.model, heads, patterns, optimizer=self.optimizer, **execution)

    def undo_(self, heads: HeadSet) -> None:
        """Make the heads live again, exactly as they were."""
        uninstall_(self.model, heads, optimizer=self.optimizer)
