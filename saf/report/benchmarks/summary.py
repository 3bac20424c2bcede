"""The written parts of a page about benchmarks: headline, key figures, warnings."""

from collections.abc import Sequence

from saf.bench.harness.arms import PRUNED
from saf.bench.harness.measured import Group, Measured, Record, baseline_name, shape_in_words
from saf.bench.harness.speed_tables import caveats, ways
from saf.bench.kinds import SPEED_KINDS
from saf.records.quantities import gibibytes, number, signed
from saf.report.page import bars, key_figure, shares_of, text, whiskers

_MOST_RATES = 2  # of a headline, so that it stays one line


def leading(groups: Sequence[Group]) -> list[Group]:
    """Return the groups that the headline is about: one way of running, against the first baseline.

    Of operators that is the whole layer, forward and backward, when it was measured.
    """
    panels = list(ways(groups).values())
    layer = [panel for panel in panels if panel[0].subject == "whole layer" and panel[0].variant.startswith("both")]
    chosen = (layer or panels or [[]])[0]
    return [group for group in chosen if group.baseline == chosen[0].baseline]


def by_rate(groups: Sequence[Group]) -> dict[float, list[Measured]]:
    """Return the accepted measurements of frozen heads by rate, on the first backend that has any."""
    frozen = (arm for group in groups for arm in group.arms if arm.row["backend"] and not arm.pruned)
    arms = [arm for arm in frozen if arm.ratio is not None]
    first = arms[0].row["backend"] if arms else None
    found: dict[float, list[Measured]] = {}
    for arm in arms:
        if arm.row["backend"] == first:
            found.setdefault(arm.row["rate"], []).append(arm)
    return found


def headline(groups: Sequence[Group], records: Sequence[Record]) -> str:
    """Return the main finding as one sentence of HTML."""
    rates = by_rate(leading(groups))
    if rates:
        shares = [f"{100 * rate:g}% of heads" for rate in rates]
        (first, *others), kind = rates, leading(groups)[0].kind
        more = "".join(f", {100 * rate:g}% <em>{_range(rates[rate])}</em>" for rate in others[: _MOST_RATES - 1])
        return f"Freezing {shares[0]} made {SPEED_KINDS[kind].subject} <em>{_range(rates[first])} as fast</em>{more}"
    if groups:
        return "No speed can be told: <em>every measurement of frozen heads is refused or missing</em>"
    changes = [entry for record in records for entry in record["memory"] if entry["backend"] not in (None, PRUNED)]
    if changes and changes[0]["change_percent"] is not None:
        changed = [f"{100 * entry['rate']:g}% by <em>{signed(entry['change_percent'], 1)}</em>" for entry in changes]
        return f"Freezing heads changed peak memory: {', '.join(changed[:_MOST_RATES])}"
    return "Nothing was measured"


def dek(groups: Sequence[Group], records: Sequence[Record]) -> str:
    """Return the paragraph under the headline: conditions, bound and control."""
    devices = " and ".join(dict.fromkeys(str(record["provenance"]["device"]) for record in records))
    chosen = leading(groups)
    if not chosen:
        return f"Peak memory of each arm in a process of its own, on {text(devices)}."
    points = list(dict.fromkeys(shape_in_words(group.point) for group in chosen))
    where = points[0] if len(points) == 1 else f"{len(points)} shapes"
    counts = sorted({arm.row["pairs"] for group in chosen for arm in group.arms}) or [0]
    pairs = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    sentences = [
        f"Against {text(baseline_name(chosen[0].baseline))}, {where}, on {text(devices)}: "
        f"medians of {pairs} alternating pairs."
    ]
    bounds = {rate: [arm for arm in arms if arm.bound is not None] for rate, arms in by_rate(chosen).items()}
    speedups = [
        f"{_span([arm.bound for arm in arms if arm.bound])} at {100 * rate:g}%" for rate, arms in bounds.items() if arms
    ]
    if speedups:
        sentences.append(f"If mixing in frozen heads cost nothing, it would be {' and '.join(speedups[:_MOST_RATES])}.")
    return " ".join(sentences)


def key_figures(groups: Sequence[Group], records: Sequence[Record]) -> list[str]:
    """Return up to four key figures; those without a measurement are left out."""
    chosen = leading(groups)
    rates = by_rate(chosen)
    parts = [_speed_figure(rate, arms) for rate, arms in list(rates.items())[:_MOST_RATES]]
    shares = [arm.share_of_bound for arms in rates.values() for arm in arms if arm.share_of_bound is not None]
    if shares:
        value = f"{100 * min(shares):.0f}%" if len(shares) == 1 else f"{100 * min(shares):.0f}–{100 * max(shares):.0f}%"
        note = "of the time that would be saved were mixing in frozen heads free"
        drawing = shares_of([(max(0.0, min(1.0, min(shares))), "frozen")], "the smallest of them")
        parts.append(key_figure("Of the free bound", value, note, drawing))
    controls = [group.control["ratio"] for group in chosen if group.control is not None]
    if controls and rates:
        worst = max(controls, key=lambda ratio: abs(ratio - 1))
        note = "a second ordinary model against the first" + (", the worst of all shapes" * (len(controls) > 1))
        parts.append(key_figure("Control", f"{worst:.4f}×", note))
    for record in records:
        parts += _memory_figures(record)
    return parts[:4]


def _speed_figure(rate: float, arms: Sequence[Measured]) -> str:
    """Return the key figure of one rate: its ratio, or the range of ratios over several shapes."""
    name = f"{100 * rate:g}% of heads frozen"
    if len(arms) > 1:
        return key_figure(name, _range(arms), f"over {len(arms)} shapes")
    row = arms[0].row
    note = f"{number(row['arm_ms'])} ms instead of {number(row['baseline_ms'])}; middle half of {row['pairs']} pairs "
    note += f"{row['q25']:.3f} to {row['q75']:.3f}"
    drawing = whiskers([(row["ratio"], row["q25"], row["q75"], "frozen")], start=1.0, label=note)
    return key_figure(name, _range(arms), note, drawing)


def _memory_figures(record: Record) -> list[str]:
    """Return a key figure for each arm whose memory was measured beside the ordinary arm's at the same point."""
    ordinary = next((entry for entry in record["memory"] if entry["backend"] is None), None)
    parts = []
    for entry in record["memory"]:
        if ordinary is not None and entry["backend"] and entry["point"] == ordinary["point"]:
            pair = ordinary["bytes"], entry["bytes"]
            what = "pruned" if entry["backend"] == PRUNED else "frozen"
            name = f"Peak memory, {100 * entry['rate']:g}% {what}"
            note = f"{gibibytes(pair[0])} → {gibibytes(pair[1])} during an update"
            parts.append(
                key_figure(
                    name, signed(entry["change_percent"], 1), note, bars([(pair[0], "ordinary"), (pair[1], "frozen")])
                )
            )
    return parts


def warning(groups: Sequence[Sequence[Group]], records: Sequence[Record]) -> str:
    """Return a box about refusals, unfinished files and wrong kernels; else nothing."""
    lines = [line for record, own in zip(records, groups, strict=True) for line in caveats(record, own)]
    items = "".join(f"<li>{text(line)}</li>" for line in lines)
    return f'<div class="warning" role="note"><strong>Read with care</strong><ul>{items}</ul></div>' if lines else ""


def _range(arms: Sequence[Measured]) -> str:
    return _span([arm.ratio for arm in arms if arm.ratio is not None])


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.3f}×" if len(values) == 1 else f"{low:.2f}× to {high:.2f}×"
