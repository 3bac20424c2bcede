"""Bars of speedup as HTML: they take the width there is, and need no script."""

from collections.abc import Iterable, Sequence

from saf.records.paper import Quoted, footnotes
from saf.records.quantities import signed
from saf.report.bars import Axis, Bar, bars_of, heading, panel_title
from saf.report.measured import Group, Record
from saf.report.page import text
from saf.report.speeds import bound_notes, memory_arm, memory_quoted, memory_table, speed_table, ways

_MOST_OPEN = 2
"""Panels whose tables stand open; more are closed at first, so that the figures stay together."""
LEGEND = (
    '<ul class="marks speed-marks" aria-hidden="true">'
    '<li><span class="speed-mark bar"></span>median of the pairs</li>'
    '<li><span class="speed-mark half"></span>their middle half</li>'
    '<li><span class="speed-mark pair"></span>each pair</li>'
    '<li><span class="speed-mark bound"></span>free bound; dashed: what is left to gain</li>'
    '<li><span class="speed-mark one"></span>as fast as ordinary attention</li></ul>'
)


def speed_panels(groups: Sequence[Group]) -> str:
    """Return a figure and its table for each model (or part of a layer) and way of running."""
    panels = ways(groups)
    state = " open" if len(panels) <= _MOST_OPEN else ""
    return LEGEND + "".join(_panel(chosen, state) for chosen in panels.values())


def _panel(groups: Sequence[Group], state: str) -> str:
    axis = Axis.of(groups)
    title = panel_title(groups[0])
    content = "".join(_group(group, axis) for group in groups)
    name = f"<figcaption><h3>{text(title)}</h3></figcaption>"
    rows = speed_table(groups).titled(f"{title}: times, TFLOP/s, floors, ratios within pairs, control, bound").html()
    rows += small(bound_notes(groups))
    rows += paper_notes(arm.paper for group in groups for arm in group.arms)
    return f'<figure class="speeds">{name}{content}{_foot(axis)}</figure>{_details(rows, state)}'


def _details(rows: str, state: str) -> str:
    return f'<details class="numbers"{state}><summary>The same as a table</summary>{rows}</details>'


def _group(group: Group, axis: Axis) -> str:
    point, against = heading(group)
    rows = "".join(_row(bar, axis) for bar in bars_of(group))
    return f'<p class="speed-point">{text(point)}, <small>{text(against)}</small></p><ul class="speed-rows">{rows}</ul>'


def _row(bar: Bar, axis: Axis) -> str:
    kind = "control" if bar.control else "refused" if bar.ratio is None else "timed"
    note = f" <small>{text(bar.note)}</small>" if bar.note else ""
    name = f'<span class="speed-name">{text(bar.name)}{note}</span>'
    track = f'<span class="speed-track" aria-hidden="true">{_ticks(axis)}{_marks(bar, axis)}</span>'
    detail = bar.refusal or bar.detail
    value = f'<span class="speed-value"><b>{text(bar.value)}</b> <small>{text(detail)}</small></span>'
    return f'<li class="speed {kind}" style="--c:var(--{bar.colour})">{name}{track}{value}</li>'


def _ticks(axis: Axis) -> str:
    return "".join(
        f'<i class="{"one" if abs(tick - 1) < 1e-9 else "grid"}" style="left:{_percent(axis.at(tick))}"></i>'
        for tick in axis.ticks()
    )


def _marks(bar: Bar, axis: Axis) -> str:
    if bar.ratio is None:
        return ""
    parts = []
    if bar.bound is not None and bar.bound > bar.ratio:
        parts.append(_span("left", axis, max(1.0, bar.ratio), bar.bound))
    if not bar.control:
        parts.append(_span("bar", axis, *sorted((1.0, bar.ratio))))
    parts.append(_span("half", axis, *bar.half))
    parts += [_pair(pair, axis) for pair in bar.pairs]
    if bar.control:
        parts.append(f'<i class="point" style="left:{_percent(axis.at(bar.ratio))}"></i>')
    if bar.bound is not None:
        parts.append(f'<i class="bound" style="left:{_percent(axis.at(bar.bound))}"></i>')
    return "".join(parts)


def _pair(pair: float, axis: Axis) -> str:
    """Return the mark of one pair; of one beyond the axis a mark at its edge, with the number to point at."""
    told = axis.beyond(pair)
    title = f' title="{told}"' if told else ""
    return f'<i class="pair" style="left:{_percent(min(max(axis.at(pair), 0.0), 1.0))}"{title}></i>'


def _span(name: str, axis: Axis, low: float, high: float) -> str:
    left, right = axis.at(low), axis.at(high)
    return f'<i class="{name}" style="left:{_percent(left)};width:{_percent(right - left)}"></i>'


def _foot(axis: Axis) -> str:
    ticks = "".join(f'<i style="left:{_percent(axis.at(tick))}">{axis.tick_name(tick)}</i>' for tick in axis.ticks())
    return f'<div class="speed axis" aria-hidden="true"><span></span><span class="speed-track">{ticks}</span></div>'


def memory_panel(record: Record) -> str:
    """Return bars of each arm's peak memory against the ordinary one's, and their table."""
    largest = max(entry["bytes"] for entry in record["memory"])
    rows = []
    for entry in record["memory"]:
        kind = "ordinary" if entry["backend"] is None else "frozen"
        change = entry["change_percent"]
        told = signed(change) if change is not None and entry["backend"] else ""
        name = f'<span class="speed-name">{text(memory_arm(record, entry))}</span>'
        bar = f'<i class="bar" style="left:0;width:{_percent(entry["bytes"] / largest)}"></i>'
        track = f'<span class="speed-track" aria-hidden="true">{bar}</span>'
        value = f'<span class="speed-value"><b>{entry["bytes"] / 2**30:.2f} GiB</b> <small>{told}</small></span>'
        rows.append(f'<li class="speed memory" style="--c:var(--{kind})">{name}{track}{value}</li>')
    numbers = memory_table(record).titled("Peak memory since the warm-up, one arm a process").html()
    numbers += paper_notes(memory_quoted(record, entry) for entry in record["memory"])
    return f'<figure class="speeds"><ul class="speed-rows">{"".join(rows)}</ul></figure>{_details(numbers, " open")}'


def paper_notes(quoted: Iterable[Quoted | None]) -> str:
    """Return the conditions of the paper's numbers, a line for each of its tables."""
    return small(f"Paper, {line.replace('`', '')}" for line in footnotes(quoted))


def small(lines: Iterable[str]) -> str:
    """Return notes below a table, a line each."""
    return "".join(f'<p class="small">{text(line)}</p>' for line in lines)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"
