"""What freezing replaces heads' attention by: each head's pattern, made as configured and fitted."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from saf.adapters import adapter_for
from saf.calibration import calibrate, heads_at_a_time
from saf.fit import fit_compact, fit_kl
from saf.freeze_config import FreezeConfig
from saf.heads import Head, HeadSet
from saf.pattern import CompactPattern, DensePattern
from saf.patterns import collect_for, dense_pattern, target
from saf.statistics import AttentionStatistics
from saf.stopwatch import Stopwatch

Pattern = CompactPattern | DensePattern


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
    size = heads_at_a_time(model, names, sequences=statistics.num_sequences, length=statistics.length)
    for some in _chunks(heads, size):
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
        goal = goal.canonical()
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
