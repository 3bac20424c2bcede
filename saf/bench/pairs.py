"""Alternating pairs in ABBA order, and what their ratios say."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Pair = tuple[float, float]
FEWEST = 2
"""Pairs below which a measurement is left out."""


def measure_pair(baseline: Callable[[], float], arm: Callable[[], float], number: int) -> Pair:
    """Time one block of each, baseline first in even pairs and last in odd ones: AB BA AB BA."""
    if number % 2 == 0:
        first = baseline()
        return first, arm()
    second = arm()
    return baseline(), second


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return median times (ms) and the within-pair ratios baseline / arm: median, quartiles, range."""
    ratios = sorted(baseline / arm for baseline, arm in pairs)
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "baseline_ms": statistics.median(baseline for baseline, _ in pairs),
        "arm_ms": statistics.median(arm for _, arm in pairs),
        "ratio": statistics.median(ratios),
        "q25": quartiles[0],
        "q75": quartiles[2],
        "min": ratios[0],
        "max": ratios[-1],
        "pairs": len(pairs),
        "pair_ms": [list(pair) for pair in pairs],
    }


def refused(control_ratio: float | None, tolerance: float) -> bool:
    """Whether a measurement is refused: its control is missing or further than `tolerance` from 1."""
    return control_ratio is None or abs(control_ratio - 1) > tolerance


def control_words(row: Mapping[str, Any], ratio: float) -> str:
    """Say what a row's control compared, and by how much its two sides differ at the control's `ratio`."""
    equal = "two ordinary models" if row.get("model") else "two times the same ordinary heads"
    return f"{equal} differ by {100 * abs(ratio - 1):.2f}%"
