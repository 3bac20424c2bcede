"""A static picture of a comparison, the head map beside the training curves, as one SVG for documents."""

import re
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from textwrap import wrap
from typing import Any

from saf.errors import InputError
from saf.evaluate.side_by_side import arm_colours, arm_names, compare_all
from saf.records.events import beside_earlier
from saf.records.files import write_atomically
from saf.records.quantities import number
from saf.records.run import RecordedRun
from saf.report.plot import SHADES, WIDTH, Panel, Scale, arm_rules, cell, document, label, shades, style
from saf.report.runs.page_data import arm_data, freeze_data, gap_data
from saf.report.runs.summary import headline

# Pixels: the picture's height, the map's place and size, and where the curves beside it begin and end.
_HEIGHT = 486
_MAP_TOP, _MAP_SIZE = 112, 330
_CHART_LEFT, _CHART_RIGHT = 506, 940
_TITLE, _LINE = 78, 26
"""Letters of a line of the title and pixels from line to line. So many fill the width in DejaVu Serif, which stands for
a serif face where there is none of those named and is the widest of the usual ones: 11.9 pixels a letter."""


def write_picture(runs: Sequence[Path | str], out: Path | str) -> Path:
    """Write the head map and the training curves of the runs as one SVG that follows the reader's colour scheme.

    Raises:
        InputError: No run among them froze heads, or `out` is not an .svg file.
    """
    out = Path(out)
    if out.suffix != ".svg":
        raise InputError(f"the picture is an SVG; expected a name ending in .svg, got {out.name}")
    return write_atomically(out, picture([RecordedRun.open(folder) for folder in runs]).encode())


def picture(runs: Sequence[RecordedRun]) -> str:
    """Return the SVG; raise InputError when no run froze heads."""
    names = arm_names(runs)
    comparisons = compare_all(runs, names)
    frozen = [(run, name) for run, name in zip(runs, names, strict=True) if run.freeze is not None]
    if not frozen:
        raise InputError("the picture shows which heads froze or were pruned; none of these runs has any")
    colours = dict(zip(names, arm_colours(runs), strict=True))
    run, name = frozen[0]
    freeze = freeze_data(run, name, colours[name]) or {}
    arms = [arm_data(run, name, colours[name]) for run, name in zip(runs, names, strict=True)]
    paired = [c for c in comparisons if c.record and not c.record["differences"]]
    gaps = [gap_data(c.ordinary, c.frozen, c.name, colours[c.name]) for c in paired]
    title = unescape(re.sub("<.*?>", "", headline(runs, comparisons)))
    lines = wrap(title, _TITLE)
    above = _LINE * (len(lines) - 1)
    parts = [label(0, 26 + _LINE * place, line, css="title") for place, line in enumerate(lines)]
    parts.append(f'<g transform="translate(0 {above})">{_map(freeze, name if len(frozen) > 1 else "")}')
    parts.append(_curves("Training loss, nats per token", arms, top=112, height=150, start=0.1))
    if gaps and gaps[0]:
        kinds = " or ".join(sorted({gap["kind"] for gap in gaps if gap}))
        parts.append(
            _curves(f"{kinds.capitalize()} minus ordinary, the same batches", gaps, top=318, height=104, zero=True)
        )
    further = sorted({name for name in colours.values() if name.startswith("pruned")})

    def rules(scheme: int) -> str:
        return arm_rules(further, scheme) + _rules(scheme)

    return document("".join([*parts, "</g>"]), width=WIDTH, height=_HEIGHT + above, title=title, style=rules)


def _rules(scheme: int) -> str:
    """Return the rules of head cells and of their marks."""
    # A mark on a cell is black or white, whichever is further from the cell's own colour.
    marks = [
        f".m{i}{{stroke:{'#fff' if _luminance(rgb) < 0.5 else '#08222f'}}}" for i, rgb in enumerate(shades(scheme))
    ]
    return style(scheme) + "".join(marks)


def _luminance(rgb: Sequence[int]) -> float:
    return (0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2]) / 255


def _map(freeze: dict[str, Any], run: str) -> str:
    """Return the head map of one freezing, named by its run where there are several."""
    layers, heads, name = freeze["layers"], freeze["heads"], freeze["score_name"]
    step = min(_MAP_SIZE / layers, 420 / heads)
    scores = freeze["scores"][name]
    known = [value for row in scores for value in row if value is not None]
    scale = Scale(min(known), max(known), "log" if min(known) > 0 else "linear")
    frozen = {tuple(head) for head in freeze["frozen"]}
    counts, earlier = freeze["counts"], freeze["earlier"]
    more, in_all = beside_earlier(counts, {kind: count + earlier[kind] for kind, count in counts.items()})
    several = min(counts.values()) > 0
    what = f"of {layers * heads} heads" + ("" if several else f" {freeze['kind']}")
    told = " ".join(filter(None, [freeze["told"] if several else str(len(frozen)), more, what]))
    chosen = "as named" if freeze["config"].get("heads") else f"those of lowest {name.replace('_', ' ')}"
    told = "; ".join(filter(None, [f"{told}, {chosen}", in_all]))
    parts = [
        label(0, 62, f"{run}: {told}" if run else told, css="name"),
        label(0, 82, "rows are layers; blue: steady, orange: changing with the text", css="small"),
    ]
    for layer, row in enumerate(scores):
        for head, value in enumerate(row):
            x, y, size = head * step, _MAP_TOP - 14 + layer * step, step - max(2.0, 0.12 * step)
            shade = None if value is None else round(scale.share(value) * (SHADES - 1))
            parts.append(cell(x, y, size, "rule" if shade is None else f"s{shade}"))
            if (layer, head) in frozen:
                mark = "name" if shade is None else f"m{shade}"
                parts += [
                    cell(x - 1, y - 1, size + 2, f"ring {freeze['colour']}"),
                    _flake(x + size / 2, y + size / 2, size / 4, mark),
                ]
    return "".join(parts)


def _curves(
    title: str,
    curves: Sequence[dict[str, Any] | None],
    *,
    top: float,
    height: float,
    start: float = 0.0,
    zero: bool = False,
) -> str:
    """Return one panel of smoothed curves over the updates, from the share `start` of the run on."""
    drawn = [curve for curve in curves if curve and curve["smooth"]["x"]]
    if not drawn:
        return ""
    first, last = min(c["smooth"]["x"][0] for c in drawn), max(c["smooth"]["x"][-1] for c in drawn)
    first += start * (last - first)
    points = [[(x, y) for x, y in zip(c["smooth"]["x"], c["smooth"]["y"], strict=True) if x >= first] for c in drawn]
    values = [y for line in points for _, y in line] + [0.0] * zero
    low, high = min(values), max(values)
    panel = Panel(_CHART_LEFT, top, _CHART_RIGHT - _CHART_LEFT, height, Scale(first, last), Scale(low, high))
    parts = [label(_CHART_LEFT - 44, top - 50 + (36 if zero else 0), title, css="name")]
    for value in {0.0, max(low, high, key=abs)} if zero else {low, high}:
        y = panel.at((first, value))[1]
        parts.append(f'<line class="rule" x1="{_CHART_LEFT}" x2="{_CHART_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(label(_CHART_LEFT - 6, y + 4, number(value, 3 if not zero else 2), css="small", anchor="end"))
    parts += _events(drawn, panel)
    for curve, line in zip(drawn, points, strict=True):
        parts.append(panel.line(line, curve["colour"]))
    ends = [f"update {update:,}" for update in drawn[0]["updates"]]
    if zero:
        parts.append(label(_CHART_LEFT, top + height + 20, ends[0], css="small"))
        parts.append(label(_CHART_RIGHT, top + height + 20, ends[1], css="small", anchor="end"))
    else:
        parts += _names(drawn, top)
    return "".join(parts)


def _events(curves: Sequence[dict[str, Any]], panel: Panel) -> list[str]:
    """Return the SVG lines of the updates at which heads changed, the first freezing with its words."""
    parts = []
    first = {c["freeze_update"] for c in curves if c.get("freeze_update") is not None}
    for update in sorted(first | {event["update"] for c in curves for event in c.get("events", ())}):
        x, top = panel.at((update, panel.upward.low))[0], panel.y
        parts.append(f'<line class="event" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + panel.height}"/>')
        if update in first:
            pruned = all(c["made"] == "pruned" for c in curves if c.get("freeze_update") == update)
            done = "pruned" if pruned else "frozen"
            parts.append(label(x + 6, top + 14, f"heads {done} at {update:,}", css="small name"))
    return parts


def _names(curves: Sequence[dict[str, Any]], top: float) -> list[str]:
    """Return the SVG legend of the curves, as many arms as there is room for."""
    parts, x = [], _CHART_LEFT - 44
    for curve in curves:
        if x + 22 + 7 * len(curve["name"]) > _CHART_RIGHT + 20 and parts:
            break  # The table beside the picture has the other arms.
        parts.append(f'<line class="line {curve["colour"]}" x1="{x}" x2="{x + 16}" y1="{top - 34}" y2="{top - 34}"/>')
        parts.append(label(x + 22, top - 30, curve["name"], css=f"small {curve['colour']}-text"))
        x += 40 + 7 * len(curve["name"])
    return parts


def _flake(x: float, y: float, reach: float, css: str) -> str:
    line = f'<line class="mark {css}" x1="{x:.1f}" x2="{x:.1f}" y1="{y - reach:.1f}" y2="{y + reach:.1f}"'
    return "".join(f'{line} transform="rotate({turn} {x:.1f} {y:.1f})"/>' for turn in (0, 60, 120))
