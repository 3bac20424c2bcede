"""How attention varies over sequences, measured and by models: distribution functions, distances, projections."""

import math
from collections.abc import Mapping
from typing import Any

from saf.records.quantities import number
from saf.report.panel import Panel, Scale, legend, style
from saf.report.svg import document, label

Record = Mapping[str, Any]
_MEASURED, _FAMILIES = "live", {"gaussian": "ordinary", "dirichlet": "frozen"}
_WIDTH = 980
_LEAST = 1e-6
"""Probabilities below this share a place at the left end of the axis."""


def distributions(record: Record) -> str:
    """Return an entry's distribution functions for some heads, the rows' energy distances, and planes if any."""
    fitted, held = record["sequences"]
    title = f"How attention varies over sequences: models of {fitted} against {held} others"
    entries = record["entries"]
    names = [("dot-live", "measured"), ("dot-ordinary", "Gaussian"), ("dot-frozen", "Dirichlet")]
    parts = [label(0, 22, title, css="title"), *legend(0, 50, names)]
    curves = entries["curves"]
    step = (_WIDTH - 40) / max(1, len(curves))
    for place, curve in enumerate(curves):
        parts += _curves(curve, x=46 + place * step, width=step - 66, first=place == 0)
    where = f"entry of query {number(entries['query'] + 1)} and key {number(entries['key'] + 1)}"
    parts.append(label(0, 430, f"{where}; above its logit, below its probability (logarithmic)", css="small"))
    parts += _energies(record, 500)
    height = 760.0
    for place, plane in enumerate(record.get("projections") or ()):
        parts += _plane(plane, 10 + place * step, 760, step - 40)
        height = 790 + step
    return document("".join(parts), width=_WIDTH, height=height, title=title, style=style)


def _curves(curve: Record, *, x: float, width: float, first: bool) -> list[str]:
    layer, head = curve["head"]
    center, spread = curve["normal"]
    logits = Panel(x, 100, width, 120, Scale.of(curve["logits"]), Scale(0, 1))
    parts = logits.frame(f"layer {layer}, head {head}", ticks=(True, first))
    grid = [logits.across.low + (logits.across.high - logits.across.low) * i / 60 for i in range(61)]
    if spread > 0:
        normal = [(value, 0.5 * (1 + math.erf((value - center) / spread / math.sqrt(2)))) for value in grid]
        parts.append(logits.line(normal, "ordinary"))
    parts.append(logits.steps(curve["logits"], _MEASURED))
    drawn = {"measured": _MEASURED, **_FAMILIES}
    floored = {name: [max(value, _LEAST) for value in curve[name]] for name in drawn}
    scale = Scale.of([value for values in floored.values() for value in values], "log")
    below = Panel(x, 270, width, 120, scale, Scale(0, 1))
    parts += below.frame("", ticks=(True, first))
    return parts + [below.steps(floored[name], css) for name, css in drawn.items()]


def _energies(record: Record, top: float) -> list[str]:
    """Return every head's and query's normalised energy distance, a column for each way of drawing rows."""
    parts = []
    values = record["normalised"]
    known = [value for rows in values.values() for row in rows for value in row if value is not None]
    panel = Panel(46, top, 400, 180, Scale(-0.5, len(values) - 0.5), Scale.of([1.0, *known], "log"))
    parts += panel.frame("Energy distance of whole rows over that of two halves; medians", ticks=(False, True))
    for place, (name, rows) in enumerate(values.items()):
        css = f"dot-{_FAMILIES.get(name, 'live')} light"
        flat = [value for row in rows for value in row if value is not None]
        spread = [(place + 0.7 * ((index + 0.5) / len(flat) - 0.5), value) for index, value in enumerate(flat)]
        parts += panel.dots(spread, css, radius=1.8)
        median = record["medians"][name]
        told = f"{name}, {number(median, 3)}"
        parts.append(label(panel.at((place, 1.0))[0], top + 198, told, css="small", anchor="middle"))
        if median is not None:
            parts.append(panel.line([(place - 0.4, median), (place + 0.4, median)], _FAMILIES.get(name, "live")))
    distances = record["entries"]["distances"]
    steps = Panel(546, top, 390, 180, Scale(-0.5, len(distances) - 0.5), Scale(0, 1))
    parts += steps.frame("Kolmogorov-Smirnov distance of the entry", ticks=(False, True))
    words = {"logit": "logit: normal", "gaussian": "Gaussian rows", "dirichlet": "Dirichlet rows"}
    for place, (name, each) in enumerate(distances.items()):
        css = f"dot-{_FAMILIES.get(name, 'ordinary')} light"
        spread = [(place + 0.7 * ((index + 0.5) / len(each) - 0.5), value) for index, value in enumerate(each)]
        parts += steps.dots(spread, css, radius=2.4)
        parts.append(label(steps.at((place, 0))[0], top + 198, words[name], css="small", anchor="middle"))
    return parts


def _plane(plane: Record, x: float, y: float, size: float) -> list[str]:
    points = {name: [tuple(point) for point in plane[name]] for name in ("measured", "generated", "mean")}
    everything = [point for each in points.values() for point in each]
    across, upward = (Scale.of([point[axis] for point in everything]) for axis in (0, 1))
    panel = Panel(x, y, size, size, across, upward)
    layer, head = plane["head"]
    return [
        *panel.frame(f"layer {layer}, head {head}: UMAP of profiles", ticks=(False, False)),
        *panel.dots(points["measured"], "dot-live light", radius=1.8),
        *panel.dots(points["generated"], "dot-frozen light", radius=1.8),
        *panel.dots(points["mean"], "dot-ordinary", radius=5),
    ]
