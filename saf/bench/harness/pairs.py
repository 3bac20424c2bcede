"""Alternating pairs in ABBA order, what their ratios say, and the rows of a record that are made of them."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from saf.bench.harness.arms import Arm, Comparison
from saf.bench.harness.work import Work
from saf.machine.peaks import Peak

Pair = tuple[float, float]
FEWEST = 2
"""Pairs below which a measurement is left out."""


def measure_pair(baseline: Callable[[], float], arm: Callable[[], float], number: int) -> Pair:
    """Take one timed block of each, baseline first in even pairs and last in odd ones: AB BA AB BA."""
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
    """Return whether a measurement is refused: its control is missing or further than `tolerance` from 1."""
    return control_ratio is None or abs(control_ratio - 1) > tolerance


def control_words(row: Mapping[str, Any], ratio: float) -> str:
    """Say what a row's control compared, and by how much its two sides differ at the control's `ratio`."""
    equal = "two ordinary models" if row.get("model") else "two times the same ordinary heads"
    return f"{equal} differ by {100 * abs(ratio - 1):.2f}%"


Taken = Mapping[tuple[Comparison, str], list[Pair]]
"""Pairs by comparison and variant."""
WorkOf = Callable[[Arm, str], Work]


def make_rows(taken: Taken, *, work: WorkOf, peak: Peak | None, tolerance: float) -> list[tuple[Arm, dict[str, Any]]]:
    """Return each arm with its row: times, ratios, the control of its baseline, work reached and its bound."""
    sums = {key: summary(pairs) for key, pairs in taken.items()}
    controls = {(c.baseline, variant): s["ratio"] for (c, variant), s in sums.items() if c.role == "control"}
    rows = []
    for (comparison, variant), numbers in sums.items():
        arm, baseline = comparison.arm, comparison.baseline
        own, base = work(arm, variant), work(baseline, variant)
        control = controls.get((baseline, variant))
        row = {
            "variant": variant,
            "role": comparison.role,
            "baseline": baseline.name,
            "arm": arm.name,
            **arm.to_dict(),
            **numbers,
            "control_ratio": control,
            "refused": refused(control, tolerance),
            "baseline_tflops": base.tflops(numbers["baseline_ms"]),
            "arm_tflops": own.tflops(numbers["arm_ms"]),
            "baseline_floor_ms": base.floor_ms(peak),
            "arm_floor_ms": own.floor_ms(peak),
        }
        rows.append((arm, row))
    return rows
