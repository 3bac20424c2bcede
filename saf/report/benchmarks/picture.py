"""Bars of speedup as a static picture for documents, an SVG with a scale for each model and way of running."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from saf.bench.harness.measured import Group, by_point
from saf.bench.harness.speed_tables import ways
from saf.bench.kinds import groups_of
from saf.errors import InputError
from saf.records.files import write_atomically
from saf.records.text import html
from saf.report.benchmarks.bars import (
    COLOURS,
    Bar,
    bars_of,
    beyond,
    heading,
    panel_title,
    scale_of,
    tick_css,
    ticks_of,
)
from saf.report.plot import WIDTH, Panel, Scale, colour, document, label

# Pixels of a figure: names end and ratios begin at these, and a row of an arm with its bar is so high.
_LEFT, _RIGHT = 256, 820
_ROW = 30
_HEADING = 26
_GROUP = _HEADING + 8
"""Height of a group without its rows: its heading, and room below the last row."""
_BAR = 14
_ARMS = ("ordinary", *COLOURS.values(), "live")


def write_bars(records: Sequence[Any], out: Path) -> Path:
    """Write the speedups of benchmarks as one SVG; raise InputError when they timed nothing or `out` is no .svg."""
    if out.suffix != ".svg":
        raise InputError(f"the picture is an SVG; expected a name ending in .svg, got {out.name}")
    drawn = bars_picture(records)
    if drawn is None:
        raise InputError("the picture shows speedups; these records timed nothing")
    return write_atomically(out, drawn.encode())


def bars_picture(records: Iterable[Any]) -> str | None:
    """Return the SVG, one panel for each model (or part of a layer) and way of running; None without rows."""
    groups = by_point(group for record in records for group in groups_of(record) if group.arms)
    if not groups:
        return None
    title = "Speedup over ordinary attention"
    parts, top = [label(0, 22, title, css="title"), *_legend(46)], 84.0
    for chosen in ways(groups).values():
        drawn, top = _panel(chosen, top)
        parts += drawn
    return document("".join(parts), width=WIDTH, height=top + 30, title=title, style=_style)


def _style(scheme: int) -> str:
    """Return the CSS rules of the SVG picture in one colour scheme."""
    rules = [f".f-{arm}{{fill:{colour(arm, scheme)}}}.l-{arm}{{stroke:{colour(arm, scheme)}}}" for arm in _ARMS]
    ink, soft, faint = (colour(name, scheme) for name in ("ink", "soft", "faint"))
    more = f".one{{stroke:{soft}}}.grid{{stroke:{faint}}}.half,.pair{{stroke:{ink}}}"
    more += ".half{stroke-width:2}.pair{opacity:.4}"
    more += f".refused{{fill:none;stroke:{soft};stroke-dasharray:1 4}}.soft{{fill:{soft}}}"
    more += f".over{{paint-order:stroke;stroke:{colour('paper', scheme)};stroke-width:5px}}"
    left = ".left{fill:none;stroke-dasharray:3 3}.value{font-weight:600;font-variant-numeric:tabular-nums}"
    return f"{''.join(rules)}{more}{left}.bound{{fill:{colour('paper', scheme)};stroke-width:1.8}}"


def _legend(y: float) -> list[str]:
    """Return one line that names the marks by drawing them."""
    parts = [f'<rect class="f-frozen" x="0" y="{y - 10}" width="26" height="10" rx="2"/>']
    parts += [f'<line class="half" x1="14" x2="34" y1="{y - 5}" y2="{y - 5}"/>']
    parts.append(label(42, y, "median of the pairs, and their middle half", css="small"))
    parts += [f'<line class="pair" x1="{x}" x2="{x}" y1="{y - 8}" y2="{y - 2}"/>' for x in (306, 310, 313, 319)]
    parts.append(label(328, y, "each pair", css="small"))
    parts.append(_diamond(404, y - 5, "frozen"))
    parts.append(label(416, y, "free bound: were frozen heads free", css="small"))
    return parts


def _panel(groups: Sequence[Group], top: float) -> tuple[list[str], float]:
    """Return the SVG parts of one panel whose title stands at `top`, and where the next may begin, in pixels."""
    height = 8.0 + sum(_GROUP + _ROW * len(bars_of(group)) for group in groups)
    panel = Panel(_LEFT, top + 14, _RIGHT - _LEFT, height, scale_of(groups), upward=Scale(0, 1))
    ticks = ticks_of(panel.across)
    parts = [label(0, top, panel_title(groups[0]), css="name")]
    parts += [panel.upright(tick, tick_css(tick)) for tick in ticks]
    parts += panel.foot(list(ticks), list(ticks.values()))
    y = panel.y + 8
    for group in groups:
        point, against = heading(group)
        words = f'{html(point)}, <tspan class="small soft">{html(against)}</tspan>'
        parts.append(f'<text class="name over" x="0" y="{y + 14:.1f}">{words}</text>')
        for above, bar in enumerate(bars_of(group)):
            parts += _row(bar, panel, y + _HEADING + _ROW * above)
        y += _GROUP + _ROW * len(bars_of(group))
    return parts, panel.y + height + 52


def _row(bar: Bar, panel: Panel, y: float) -> list[str]:
    """Return the SVG parts of one bar whose row begins at height `y`."""
    middle = y + _BAR / 2 + 2
    parts = [label(_LEFT - 12, middle + 4, bar.name, css="small" if bar.control else "", anchor="end")]
    parts.append(label(_RIGHT + 14, middle + 4, bar.value, css="small" if bar.control else "name value"))
    parts.append(label(_RIGHT + 78, middle + 4, bar.detail, css="small"))
    if bar.ratio is None:
        one = panel.right(1.0)
        parts.append(_box(one, _RIGHT, y, "refused"))
        return [*parts, label(one + 8, middle + 4, bar.refusal or "", css="small")]
    one, end = panel.right(1.0), panel.right(bar.ratio)
    if bar.bound is not None and bar.bound > bar.ratio:
        bound = panel.right(bar.bound)
        parts.append(_box(max(one, end), bound, y, f"left l-{bar.colour}"))
    if not bar.control:
        parts.append(_box(min(one, end), max(one, end), y, f"f-{bar.colour}"))
    low, high = (panel.right(value) for value in bar.half)
    parts.append(f'<line class="half" x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>')
    if bar.control:
        parts.append(f'<circle class="f-live" cx="{end:.1f}" cy="{middle:.1f}" r="3.5"/>')
    foot = y + _BAR + 4
    for pair in bar.pairs:
        if outside := beyond(panel.across, pair):
            left = pair < panel.across.low
            parts.append(
                label(_LEFT if left else _RIGHT, foot + 8, outside, css="small", anchor="start" if left else "end")
            )
            continue
        x = panel.right(pair)
        parts.append(f'<line class="pair" x1="{x:.1f}" x2="{x:.1f}" y1="{foot:.1f}" y2="{foot + 5:.1f}"/>')
    if bar.bound is not None:
        parts.append(_diamond(panel.right(bar.bound), middle, bar.colour))
    return parts


def _box(left: float, right: float, y: float, css: str) -> str:
    return f'<rect class="{css}" x="{left:.1f}" y="{y + 2:.1f}" width="{right - left:.1f}" height="{_BAR}" rx="2"/>'


def _diamond(x: float, y: float, arm: str) -> str:
    return f'<path class="bound l-{arm}" d="M{x - 5:.1f} {y:.1f}l5 -6 5 6 -5 6z"/>'
