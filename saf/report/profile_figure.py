"""Attention profiles by layer, selected heads against unselected ones of the same layers."""

from collections.abc import Mapping
from typing import Any

from saf.records.quantities import number
from saf.report.panel import Panel, Scale, legend, style
from saf.report.svg import document, label

_NAMES = {
    "entropy": "Normalised entropy",
    "local_mass": "Weight of the last 64 keys",
    "largest": "Largest weight",
    "first_token": "Weight of the first token",
}


def profiles(record: Mapping[str, Any]) -> str:
    """Return a panel for each quantity: every head by layer, and the two matched means as lines."""
    selected = {tuple(head) for head in record["selected"]}
    title = f"How heads spread their attention: {record['windows']} windows of {number(record['length'])} tokens"
    parts = [label(0, 22, title, css="title")]
    names = (
        [("dot-frozen", "selected"), ("dot-live light", "unselected")] if selected else [("dot-live light", "heads")]
    )
    parts += legend(0, 50, names)
    for place, (name, words) in enumerate(_NAMES.items()):
        x, y = 46 + (place % 2) * 490, 122 + (place // 2) * 256
        parts += _panel(record, name, words, selected, x, y)
    return document("".join(parts), width=980, height=606, title=title, style=style)


def _panel(
    record: Mapping[str, Any], name: str, words: str, selected: set[tuple[int, ...]], x: float, y: float
) -> list[str]:
    values = record["profiles"][name]
    known = [value for row in [*values, record["matched"].get(name) or ()] for value in row if value is not None]
    kind = "log" if name == "first_token" else "linear"
    across = Scale(-0.6, len(values) - 0.4)
    panel = Panel(x, y, 420, 160, across, Scale.of(known, kind))
    layers = [float(layer) for layer in range(0, len(values), max(1, len(values) // 6))]
    parts = [label(x, y - 30, words, css="name"), *panel.frame("", across="layer", ticks=(False, True))]
    for layer in layers:
        at = panel.at((layer, panel.upward.low))
        parts.append(label(at[0], y + 176, f"{layer:.0f}", css="small", anchor="middle"))
    for chosen, css in ((False, "dot-live light"), (True, "dot-frozen")):
        points = [
            # Heads of a layer stand beside one another, in their order.
            (layer + 0.6 * ((head + 0.5) / len(row) - 0.5), value)
            for layer, row in enumerate(values)
            for head, value in enumerate(row)
            if value is not None and ((layer, head) in selected) == chosen
        ]
        parts += panel.dots(points, css, radius=2.6)
    if matched := record["matched"].get(name):
        for value, css in zip(matched, ("frozen", "live"), strict=True):
            parts.append(panel.line([(across.low, value), (across.high, value)], f"{css} thin"))
        told = f"means {number(matched[0], 3)} selected, {number(matched[1], 3)} in the same layers"
        parts.append(label(x, y - 12, told, css="small"))
    return parts
