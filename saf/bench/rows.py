"""Rows of a record: one for each comparison and variant of a point."""

from collections.abc import Callable, Mapping
from typing import Any

from saf.bench.arms import Arm, Comparison
from saf.bench.pairs import Pair, refused, summary
from saf.bench.work import Work
from saf.machine.peaks import Peak

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


def line_of(row: Mapping[str, Any]) -> str:
    """Return one row as a short line."""
    verdict = "  REFUSED" if row["refused"] else ""
    return (
        f"{row['variant']}: {row['arm']} {row['arm_ms']:.4g} ms, {row['baseline']} {row['baseline_ms']:.4g} ms, "
        f"ratio {row['ratio']:.4f} ({row['min']:.4f} to {row['max']:.4f}, {row['pairs']} pairs){verdict}"
    )
