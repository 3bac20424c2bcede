"""What freezing replaces heads' attention by: each head's pattern, made as configured and fitted."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saf.adapters import adapter_for
from saf.calibration import calibrate, heads_at_a_time
from saf.estimates import collect_for, dense_pattern, exact_pattern, target
from saf.fit import fit_kl, fit_with_certificate, warn_of_missed
from saf.freezing.config import FreezeConfig
from saf.heads import Head, HeadSet
from saf.machine.stopwatch import Stopwatch
from saf.patterns import CompactPattern, DensePattern
from saf.statistics import AttentionStatistics

Pattern = CompactPattern | DensePattern


class Made(NamedTuple):
    """One head's pattern, on the CPU, and how its compact fit went."""

    pattern: Pattern
    fit_kl: float = 0.0
    """Row-averaged KL from what was fitted to the fit, nats; 0 without a fit."""
    certificate: dict[str, Any] | None = None
    """The fit's `Certificate` in plain values; None without a fit."""


def make_patterns(
    model: nn.Module,
    ids: list[Tensor],
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
        found = calibrate(model, ids, collect=names, heads=some, watch=watch) if names else statistics
        with watch("fit"):
            made |= _make(found, some, config, adapter_for(model).device)
    return made


def _chunks(heads: HeadSet, size: int) -> Iterator[HeadSet]:
    ordered = list(heads)
    for first in range(0, len(ordered), size):
        yield HeadSet(ordered[first : first + size])


def _make(
    statistics: AttentionStatistics, heads: HeadSet, config: FreezeConfig, device: torch.device
) -> dict[Head, Made]:
    options = {"seed": config.seed} | config.pattern_options
    if config.storage == "dense":
        patterns = dense_pattern(statistics, heads, config.pattern, dtype=torch.bfloat16, **options)
        return {head: Made(patterns[number]) for number, head in enumerate(heads)}
    if (exact := exact_pattern(statistics, heads, config.pattern, **options)) is not None:
        exact = exact.canonical()
        return {head: Made(exact[number]) for number, head in enumerate(heads)}
    goal = [part.to(device) for part in target(statistics, heads, config.pattern, **options)]
    fitted, certificate = fit_with_certificate(*goal[:2], fitter=config.fitter, **config.fitter_options)
    warn_of_missed(certificate, config.fitter)
    kls, certificates = fit_kl(fitted, *goal).tolist(), certificate.to_dicts()
    fitted = fitted.to(device="cpu")
    return {head: Made(fitted[number], kls[number], certificates[number]) for number, head in enumerate(heads)}


def stack(patterns: Sequence[Pattern]) -> Pattern | None:
    """Join patterns of one kind over `[F]`; None when there are none."""
    if not patterns:
        return None
    kind: Any = type(patterns[0])
    return kind.stack(patterns)
