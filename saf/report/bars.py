"""What figures of speedups draw: rows of bars on one axis, whatever they are drawn with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from saf.records.quantities import number
from saf.report.measured import Group, Measured, baseline_name, shape_in_words

KINDS = {"update": "Optimiser update", "prefill": "Prefill", "op": "One layer's attention"}
_TICKS = 6
_COLOURS = {"toeplitz": "frozen", "fused": "frozen-2", "reference": "frozen-3"}


@dataclass(frozen=True)
class Axis:
    """A linear axis of speedups that holds 1 and everything drawn but single pairs far from all else."""

    low: float
    high: float

    @classmethod
    def of(cls, groups: Sequence[Group]) -> "Axis":
        """Return the axis that all rows of the groups fit on.

        A pair further out than half of what medians, middle halves and bounds span stays beyond it: one hiccup of a
        machine would press all bars together.
        """
        bars = [bar for group in groups for bar in bars_of(group) if bar.ratio is not None]
        values = [1.0, *(value for bar in bars for value in (bar.ratio, bar.bound, *bar.half) if value is not None)]
        low, high = min(values), max(values)
        reach = ((high - low) or 0.1) / 2
        near = [pair for bar in bars for pair in bar.pairs if low - reach <= pair <= high + reach]
        low, high = min([low, *near]), max([high, *near])
        margin = 0.04 * ((high - low) or 0.1)
        return cls(low - margin, high + margin)

    def at(self, value: float) -> float:
        """Return where a value stands, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)

    def beyond(self, value: float) -> str:
        """Return how a value that the axis does not hold is written at its edge; nothing for others."""
        if self.low <= value <= self.high:
            return ""
        return f"‹ {value:.2f}×" if value < self.low else f"{value:.2f}× ›"

    def ticks(self) -> list[float]:
        """Return round values, 1 among them."""
        rough = (self.high - self.low) / _TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
        first, last = math.ceil((self.low - 1) / step), math.floor((self.high - 1) / step)
        return [1 + number * step for number in range(first, last + 1)]

    def tick_name(self, tick: float) -> str:
        """Return a tick's label, with as many decimals as its neighbours need."""
        ticks = self.ticks()
        step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
        return f"{tick:.{max(2, math.ceil(-math.log10(step) - 1e-9))}f}×"


@dataclass(frozen=True)
class Bar:
    """One row: `ratio` is None when the measurement is refused, and nothing of it is drawn."""

    name: str
    note: str
    colour: str
    """A colour of the page's style sheet; "live" for the control."""
    ratio: float | None
    refusal: str | None
    half: tuple[float, float]
    """The middle half of the pairs."""
    pairs: tuple[float, ...]
    bound: float | None
    value: str
    detail: str

    @property
    def control(self) -> bool:
        """Whether this is the second ordinary model, which has no bar."""
        return self.colour == "live"


def bars_of(group: Group) -> list[Bar]:
    """Return the rows of a group: every arm, then the control."""
    rows = [_arm(arm, group.reason) for arm in group.arms]
    if group.control is not None:
        rows.append(
            Bar(
                name="control",
                note="a second ordinary model",
                colour="live",
                ratio=group.control["ratio"],
                refusal=None,
                half=(group.control["q25"], group.control["q75"]),
                pairs=_ratios(group.control["pair_ms"]),
                bound=None,
                value=f"{group.control['ratio']:.3f}×",
                detail="",
            )
        )
    return rows


def _arm(arm: Measured, reason: str | None) -> Bar:
    row = arm.row
    heads = f"{row['heads']} heads" if row.get("heads") else ""
    return Bar(
        name=arm.name,
        note=heads,
        colour="ordinary" if row["backend"] is None else _COLOURS.get(row["backend"], "frozen"),
        ratio=arm.ratio,
        refusal=reason if arm.ratio is None else None,
        half=(row["q25"], row["q75"]),
        pairs=() if arm.ratio is None else _ratios(row["pair_ms"]),
        bound=None if arm.ratio is None else arm.bound,
        value="refused" if arm.ratio is None else f"{arm.ratio:.3f}×",
        detail=f"{number(row['arm_ms'])} ms",
    )


def _ratios(pairs: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(baseline / arm for baseline, arm in pairs)


def heading(group: Group) -> tuple[str, str]:
    """Return what a group is about: its point, and the baseline with its median time."""
    times = [row["baseline_ms"] for row in (group.control, *(arm.row for arm in group.arms)) if row is not None]
    told = f"against {baseline_name(group.baseline)}, {number(median(times))} ms"
    return shape_in_words(group.point), f"{told}; {group.file}" if group.file else told


def panel_title(group: Group) -> str:
    """Return what the groups of one axis measure."""
    return f"{KINDS[group.kind]}: {group.way}"
