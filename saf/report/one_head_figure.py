"""Costs of single heads: by layer and head, against every score, and under either fit."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from saf.records.quantities import number
from saf.report.panel import SHADES, Panel, Scale, cell, style
from saf.report.svg import document, label

Record = Mapping[str, Any]
_WIDTH = 980
_MAP = 330
_COLUMNS = 5


def one_head(record: Record) -> str:
    """Return a heat map of the costs, free against structured fit where measured, and a panel for each score."""
    change, accepted = record["nll_change"], {tuple(head) for head in record["eligible"]}
    measured = sum(value is not None for row in change for value in row)
    title = f"What freezing one head alone costs: {measured} heads, {record['windows']} windows"
    parts = [label(0, 22, title, css="title"), *_map(change, accepted, top=92)]
    if record.get("structured"):
        parts += _two_fits(record, accepted)
    names = list(record.get("quality") or record["scores"])
    top = 92 + _MAP + 112
    parts.append(label(0, top - 52, "Score against cost, thousandths of a nat (root scale)", css="name"))
    for place, name in enumerate(names):
        x, y = (place % _COLUMNS) * 188 + 46, top + (place // _COLUMNS) * 186
        parts += _score(record, name, accepted, x, y, first=place % _COLUMNS == 0)
    rows = -(-len(names) // _COLUMNS)
    return document("".join(parts), width=_WIDTH, height=top + rows * 186 - 10, title=title, style=style)


def _map(change: Sequence[Sequence[float | None]], accepted: set[tuple[int, ...]], top: float) -> list[str]:
    step = min(_MAP / len(change), 420 / len(change[0]))
    scale = Scale(0.0, max([value for row in change for value in row if value is not None] + [1e-12]), "root")
    parts = [label(0, top - 34, "Loss change, by layer (row) and head", css="name")]
    parts.append(
        label(0, top - 16, f"shade by its root, up to {_nats(scale.high)}; ringed: fit not accepted", css="small")
    )
    for layer, row in enumerate(change):
        for head, value in enumerate(row):
            x, y, size = head * step, top + layer * step, step - max(1.5, 0.1 * step)
            shade = "blank" if value is None else f"s{round(scale.share(max(value, 0.0)) * (SHADES - 1))}"
            parts.append(cell(x, y, size, shade))
            if value is not None and (layer, head) not in accepted:
                parts.append(cell(x, y, size, "open-ordinary"))
    return parts


def _two_fits(record: Record, accepted: set[tuple[int, ...]]) -> list[str]:
    free, other = record["nll_change"], record["structured"]["nll_change"]
    points = [(1e3 * x, 1e3 * y) for x, y in _pairs(free, other, accepted)]
    scale = Scale.of([0.0, *(value for point in points for value in point)], "root")
    panel = Panel(550, 104, 380, _MAP - 24, scale, scale)
    after = record["structured"]["alpha_constant_after"]
    parts = [label(550, 58, f"Structured fit, alpha constant from key {after} on, against free fit", css="name")]
    parts += panel.frame("", across="free fit, thousandths of a nat")
    parts.append(panel.line([(scale.low, scale.low), (scale.high, scale.high)], "live thin light"))
    parts += panel.dots(points, "dot-frozen light")
    told = (record.get("fit_difference") or {}).get("all")
    if told:
        low, high = (number(1e3 * end, 2) for end in told["ci95"])
        words = f"mean difference {number(1e3 * told['difference'], 2)}, 95% interval {low} to {high}"
        parts.append(label(550, 76, words, css="small"))
    return parts


def _score(record: Record, name: str, accepted: set[tuple[int, ...]], x: float, y: float, *, first: bool) -> list[str]:
    scores, change = record["scores"][name], record["nll_change"]
    inside, outside = (
        [(score, 1e3 * cost) for score, cost in _pairs(scores, change, accepted, others=others)]
        for others in (False, True)
    )
    across = Scale.of([point[0] for point in inside + outside], "log")
    upward = Scale.of([0.0, *(point[1] for point in inside + outside)], "root")
    panel = Panel(x, y, 140, 104, across, upward)
    quality = (record.get("quality") or {}).get(name)
    told = "so far"
    if quality is not None:
        known = quality["spearman"] is not None
        told = f"Spearman {number(quality['spearman'], 3)}" if known else "no rank correlation"
    parts = [label(x - 40, y - 26, name.replace("_", " "), css="name"), label(x - 40, y - 10, told, css="small")]
    return [
        *parts,
        *panel.frame("", ticks=(True, first)),
        *panel.dots(outside, "open-ordinary", radius=2),
        *panel.dots(inside, "dot-frozen light", radius=2.4),
    ]


def _pairs(
    one: Sequence[Sequence[float | None]],
    other: Sequence[Sequence[float | None]],
    heads: set[tuple[int, ...]],
    *,
    others: bool = False,
) -> list[tuple[float, float]]:
    """Return both values of the heads, or of all but them, that have both."""
    return [
        (x, y)
        for layer, (left, right) in enumerate(zip(one, other, strict=True))
        for head, (x, y) in enumerate(zip(left, right, strict=True))
        if x is not None and y is not None and ((layer, head) in heads) != others
    ]


def _nats(value: float) -> str:
    return f"{number(value, 2)} nats ({100 * math.expm1(value):.2g}% perplexity)"
