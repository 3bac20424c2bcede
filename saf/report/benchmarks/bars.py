"""Bars of speedup and of memory: what is drawn, and as HTML that takes the width there is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from saf.bench.harness.arms import PRUNED
from saf.bench.harness.measured import Group, Measured, Record, baseline_name, shape_in_words
from saf.bench.harness.speed_tables import bound_notes, memory_arm, memory_table, speed_table, ways
from saf.bench.kinds import SPEED_KINDS
from saf.records.paper import Quoted, footnotes
from saf.records.quantities import number, signed
from saf.report.page import text
from saf.report.plot import Scale, decimal_names

_TICKS = 6
"""About as many on an axis; their labels then stand apart in the narrowest page."""
_MARGIN = 0.04
"""Of what an axis spans, left free on either side: room for half the diamond of a bound."""
COLOURS = {"toeplitz": "frozen", "fused": "frozen-2", "reference": "frozen-3", PRUNED: "pruned"}


def scale_of(groups: Sequence[Group]) -> Scale:
    """Return the linear scale of speedups that all rows of the groups, and 1, fit on.

    A pair further out than half of what medians, middle halves and bounds span stays beyond it: one hiccup of a
    machine would press all bars together.
    """
    bars = [bar for group in groups for bar in bars_of(group) if bar.ratio is not None]
    values = [1.0, *(value for bar in bars for value in (bar.ratio, bar.bound, *bar.half) if value is not None)]
    low, high = min(values), max(values)
    reach = ((high - low) or 0.1) / 2
    near = [pair for bar in bars for pair in bar.pairs if low - reach <= pair <= high + reach]
    return Scale.of([low, high, *near], margin=_MARGIN)


def beyond(scale: Scale, value: float) -> str:
    """Return how a value that the scale does not hold is written at its edge; nothing for others."""
    if scale.low <= value <= scale.high:
        return ""
    return f"‹ {value:.2f}×" if value < scale.low else f"{value:.2f}× ›"


def ticks_of(scale: Scale) -> dict[float, str]:
    """Return round speedups with their names, 1 among them."""
    ticks = scale.ticks(_TICKS, around=1.0)
    return {tick: f"{name}×" for tick, name in zip(ticks, decimal_names(ticks, least=2), strict=True)}


@dataclass(frozen=True)
class Bar:
    """Hold one row: `ratio` is None when the measurement is refused, and nothing of it is drawn."""

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
        """Return whether this is the second ordinary model, which has no bar."""
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
    """Return the bar of a measured arm; a refused one has the reason instead of lengths."""
    row = arm.row
    heads = f"{row['heads']} heads" if row.get("heads") else ""
    return Bar(
        name=arm.name,
        note=heads,
        colour="ordinary" if row["backend"] is None else COLOURS.get(row["backend"], "frozen"),
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
    against = f"against {baseline_name(group.baseline)}, {number(median(times))} ms"
    return shape_in_words(group.point), f"{against}; {group.file}" if group.file else against


def panel_title(group: Group) -> str:
    """Return what the groups of one axis measure."""
    return f"{SPEED_KINDS[group.kind].panel}: {group.way}"


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
    """Return the HTML of one panel: the bars of its groups on one scale, and the table of their numbers."""
    scale = scale_of(groups)
    title = panel_title(groups[0])
    content = "".join(_group(group, scale) for group in groups)
    name = f"<figcaption><h3>{text(title)}</h3></figcaption>"
    rows = speed_table(groups).titled(f"{title}: times, TFLOP/s, floors, ratios within pairs, control, bound").html()
    rows += small(bound_notes(groups))
    rows += paper_notes(arm.paper for group in groups for arm in group.arms)
    return f'<figure class="speeds">{name}{content}{_foot(scale)}</figure>{_details(rows, state)}'


def _details(rows: str, state: str) -> str:
    return f'<details class="numbers"{state}><summary>The same as a table</summary>{rows}</details>'


def _group(group: Group, scale: Scale) -> str:
    point, against = heading(group)
    rows = "".join(_row(bar, scale) for bar in bars_of(group))
    return f'<p class="speed-point">{text(point)}, <small>{text(against)}</small></p><ul class="speed-rows">{rows}</ul>'


def _row(bar: Bar, scale: Scale) -> str:
    """Return the HTML list item of one bar: name, track and value."""
    kind = "control" if bar.control else "refused" if bar.ratio is None else "timed"
    note = f" <small>{text(bar.note)}</small>" if bar.note else ""
    name = f'<span class="speed-name">{text(bar.name)}{note}</span>'
    track = f'<span class="speed-track" aria-hidden="true">{_ticks(scale)}{_marks(bar, scale)}</span>'
    detail = bar.refusal or bar.detail
    value = f'<span class="speed-value"><b>{text(bar.value)}</b> <small>{text(detail)}</small></span>'
    return f'<li class="speed {kind}" style="--c:var(--{bar.colour})">{name}{track}{value}</li>'


def _ticks(scale: Scale) -> str:
    return "".join(
        f'<i class="{tick_css(tick)}" style="left:{_percent(scale.share(tick))}"></i>' for tick in ticks_of(scale)
    )


def tick_css(tick: float) -> str:
    """Return the class of the line at a tick; as fast as the baseline, at 1, has its own."""
    return "one" if tick == 1 else "grid"


def _marks(bar: Bar, scale: Scale) -> str:
    """Return the HTML marks on a bar's track: its length, the middle half, each pair, and the bound."""
    if bar.ratio is None:
        return ""
    parts = []
    if bar.bound is not None and bar.bound > bar.ratio:
        parts.append(_span("left", scale, max(1.0, bar.ratio), bar.bound))
    if not bar.control:
        parts.append(_span("bar", scale, *sorted((1.0, bar.ratio))))
    parts.append(_span("half", scale, *bar.half))
    parts += [_pair(pair, scale) for pair in bar.pairs]
    if bar.control:
        parts.append(f'<i class="point" style="left:{_percent(scale.share(bar.ratio))}"></i>')
    if bar.bound is not None:
        parts.append(f'<i class="bound" style="left:{_percent(scale.share(bar.bound))}"></i>')
    return "".join(parts)


def _pair(pair: float, scale: Scale) -> str:
    """Return the mark of one pair; of one beyond the axis a mark at its edge, with the number to point at."""
    outside = beyond(scale, pair)
    title = f' title="{outside}"' if outside else ""
    return f'<i class="pair" style="left:{_percent(min(max(scale.share(pair), 0.0), 1.0))}"{title}></i>'


def _span(name: str, scale: Scale, low: float, high: float) -> str:
    left, right = scale.share(low), scale.share(high)
    return f'<i class="{name}" style="left:{_percent(left)};width:{_percent(right - left)}"></i>'


def _foot(scale: Scale) -> str:
    named = ticks_of(scale).items()
    ticks = "".join(f'<i style="left:{_percent(scale.share(tick))}">{name}</i>' for tick, name in named)
    return f'<div class="speed axis" aria-hidden="true"><span></span><span class="speed-track">{ticks}</span></div>'


def memory_panel(record: Record) -> str:
    """Return bars of each arm's peak memory against the ordinary one's, and their table."""
    largest = max(entry["bytes"] for entry in record["memory"])
    rows = []
    for entry in record["memory"]:
        kind = {None: "ordinary", PRUNED: "pruned"}.get(entry["backend"], "frozen")
        change = entry["change_percent"]
        percent = signed(change) if change is not None and entry["backend"] else ""
        name = f'<span class="speed-name">{text(memory_arm(record, entry))}</span>'
        bar = f'<i class="bar" style="left:0;width:{_percent(entry["bytes"] / largest)}"></i>'
        track = f'<span class="speed-track" aria-hidden="true">{bar}</span>'
        value = f'<span class="speed-value"><b>{entry["bytes"] / 2**30:.2f} GiB</b> <small>{percent}</small></span>'
        rows.append(f'<li class="speed memory" style="--c:var(--{kind})">{name}{track}{value}</li>')
    measured = SPEED_KINDS[record["kind"]]
    table = memory_table(record, measured.memory_of(record), measured.quoted_memory)
    numbers = table.titled("Peak memory since the warm-up, one arm a process").html()
    numbers += paper_notes(measured.quoted_memory(record, entry) for entry in record["memory"])
    return f'<figure class="speeds"><ul class="speed-rows">{"".join(rows)}</ul></figure>{_details(numbers, " open")}'


def paper_notes(quoted: Iterable[Quoted | None]) -> str:
    """Return the conditions of the paper's numbers, a line for each of its tables."""
    return small(f"Paper, {line}" for line in footnotes(quoted))


def small(lines: Iterable[str]) -> str:
    """Return notes below a table, a line each."""
    return "".join(f'<p class="small">{text(line)}</p>' for line in lines)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"
