"""Bars of speedup as one static SVG for documents."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from saf.errors import InputError
from saf.records.files import write_atomically
from saf.report.bars import Axis, Bar, bars_of, heading, panel_title
from saf.report.measured import Group, groups_of, is_speeds
from saf.report.plot import colour, document, label
from saf.report.speeds import ways

_WIDTH = 980
_LEFT, _RIGHT = 256, 820
_ROW = 30
_BAR = 14
_ARMS = ("ordinary", "frozen", "frozen-2", "frozen-3", "live")


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
    groups = [group for record in records if is_speeds(record) for group in groups_of(record)]
    if not groups:
        return None
    title = "Speedup over ordinary attention"
    parts, top = [label(0, 22, title, css="title"), *_legend(46)], 84.0
    for chosen in ways(groups).values():
        drawn, top = _panel(chosen, top)
        parts += drawn
    return document("".join(parts), width=_WIDTH, height=top + 30, title=title, style=_style)


def _style(scheme: int) -> str:
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
    axis = Axis.of(groups)
    begin = top + 14
    parts, y = [label(0, top, panel_title(groups[0]), css="name")], begin + 8
    rows: list[str] = []
    for group in groups:
        point, against = heading(group)
        words = f'{escape(point)}, <tspan class="small soft">{escape(against)}</tspan>'
        rows.append(f'<text class="name over" x="0" y="{y + 14:.1f}">{words}</text>')
        y += 26
        for bar in bars_of(group):
            rows += _row(bar, axis, y)
            y += _ROW
        y += 8
    for tick in axis.ticks():
        x, css = _at(axis, tick), "one" if abs(tick - 1) < 1e-9 else "grid"
        parts.append(f'<line class="{css}" x1="{x:.1f}" x2="{x:.1f}" y1="{begin}" y2="{y}"/>')
        parts.append(label(x, y + 16, axis.tick_name(tick), css="small", anchor="middle"))
    return [*parts, *rows], y + 52


def _row(bar: Bar, axis: Axis, y: float) -> list[str]:
    middle = y + _BAR / 2 + 2
    parts = [label(_LEFT - 12, middle + 4, bar.name, css="small" if bar.control else "", anchor="end")]
    parts.append(label(_RIGHT + 14, middle + 4, bar.value, css="small" if bar.control else "name value"))
    parts.append(label(_RIGHT + 78, middle + 4, bar.detail, css="small"))
    if bar.ratio is None:
        one = _at(axis, 1.0)
        parts.append(_box(one, _RIGHT, y, "refused"))
        return [*parts, label(one + 8, middle + 4, bar.refusal or "", css="small")]
    one, end = _at(axis, 1.0), _at(axis, bar.ratio)
    if bar.bound is not None and bar.bound > bar.ratio:
        bound = _at(axis, bar.bound)
        parts.append(_box(max(one, end), bound, y, f"left l-{bar.colour}"))
    if not bar.control:
        parts.append(_box(min(one, end), max(one, end), y, f"f-{bar.colour}"))
    low, high = (_at(axis, value) for value in bar.half)
    parts.append(f'<line class="half" x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>')
    if bar.control:
        parts.append(f'<circle class="f-live" cx="{end:.1f}" cy="{middle:.1f}" r="3.5"/>')
    foot = y + _BAR + 4
    for pair in bar.pairs:
        if told := axis.beyond(pair):
            left = pair < axis.low
            parts.append(
                label(_LEFT if left else _RIGHT, foot + 8, told, css="small", anchor="start" if left else "end")
            )
            continue
        x = _at(axis, pair)
        parts.append(f'<line class="pair" x1="{x:.1f}" x2="{x:.1f}" y1="{foot:.1f}" y2="{foot + 5:.1f}"/>')
    if bar.bound is not None:
        parts.append(_diamond(_at(axis, bar.bound), middle, bar.colour))
    return parts


def _at(axis: Axis, value: float) -> float:
    return _LEFT + axis.at(value) * (_RIGHT - _LEFT)


def _box(left: float, right: float, y: float, css: str) -> str:
    return f'<rect class="{css}" x="{left:.1f}" y="{y + 2:.1f}" width="{right - left:.1f}" height="{_BAR}" rx="2"/>'


def _diamond(x: float, y: float, arm: str) -> str:
    return f'<path class="bound l-{arm}" d="M{x - 5:.1f} {y:.1f}l5 -6 5 6 -5 6z"/>'
