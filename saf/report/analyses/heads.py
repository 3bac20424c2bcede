"""Figures of analyses of heads: what freezing single heads and head sets costs, and which scores foretell it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from saf.records.quantities import highest_first, number, signed
from saf.report.plot import COLOURS, SHADES, WIDTH, Panel, Scale, cell, document, label, legend, style

Record = Mapping[str, Any]
# Pixels: the map of heads beside a panel, and how many panels 980 of them hold side by side.
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
    return document("".join(parts), width=WIDTH, height=top + rows * 186 - 10, title=title, style=style)


def _map(change: Sequence[Sequence[float | None]], accepted: set[tuple[int, ...]], top: float) -> list[str]:
    """Return the SVG parts of the map of loss changes, a square a head, ringed where the fit was not accepted."""
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
    """Return the SVG parts of the scatter of structured against free fits, a dot an accepted head."""
    free, other = record["nll_change"], record["structured"]["nll_change"]
    points = [(1e3 * x, 1e3 * y) for x, y in _pairs(free, other, accepted)]
    scale = Scale.of([0.0, *(value for point in points for value in point)], "root")
    panel = Panel(550, 104, 380, _MAP - 24, scale, scale)
    after = record["structured"]["alpha_constant_after"]
    parts = [label(550, 58, f"Structured fit, alpha constant from key {after} on, against free fit", css="name")]
    parts += panel.frame("", across="free fit, thousandths of a nat")
    parts.append(panel.line([(scale.low, scale.low), (scale.high, scale.high)], "live thin light"))
    parts += panel.dots(points, "dot-frozen light")
    difference = (record.get("fit_difference") or {}).get("all")
    if difference:
        low, high = (number(1e3 * end, 2) for end in difference["ci95"])
        words = f"mean difference {number(1e3 * difference['difference'], 2)}, 95% interval {low} to {high}"
        parts.append(label(550, 76, words, css="small"))
    return parts


def _score(record: Record, name: str, accepted: set[tuple[int, ...]], x: float, y: float, *, first: bool) -> list[str]:
    """Return the SVG parts of one score's panel: each head's loss change over its score."""
    scores, change = record["scores"][name], record["nll_change"]
    inside, outside = (
        [(score, 1e3 * cost) for score, cost in _pairs(scores, change, accepted, others=others)]
        for others in (False, True)
    )
    across = Scale.of([point[0] for point in inside + outside], "log")
    upward = Scale.of([0.0, *(point[1] for point in inside + outside)], "root")
    panel = Panel(x, y, 140, 104, across, upward)
    quality = (record.get("quality") or {}).get(name)
    rank = "so far"
    if quality is not None:
        known = quality["spearman"] is not None
        rank = f"Spearman {number(quality['spearman'], 3)}" if known else "no rank correlation"
    parts = [label(x - 40, y - 26, name.replace("_", " "), css="name"), label(x - 40, y - 10, rank, css="small")]
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


def joint_cost(record: Record) -> str:
    """Return the cost of each set and their difference, with 95% intervals."""
    title = "Immediate cost of freezing two head sets"
    names = [f"first set, {len(record['heads'][0])} heads", f"second set, {len(record['heads'][1])} heads"]
    rows = list(zip([*names, "second against first"], ("first", "second", "difference"), strict=True))
    scale = Scale.of([0.0, *(end for _, key in rows for end in record[key]["ci95"])])
    panel = Panel(180, 70, 560, 120, scale, Scale(0, 3))
    parts = [label(0, 22, title, css="title"), *panel.frame("", across="perplexity increase, %", ticks=(True, False))]
    parts.append(panel.line([(0.0, 0.0), (0.0, 3.0)], "live thin"))
    for place, (name, key) in enumerate(rows):
        height, each = 2.5 - place, record[key]
        css = "frozen" if key != "difference" else "ordinary"
        parts.append(panel.line([(each["ci95"][0], height), (each["ci95"][1], height)], css))
        parts += panel.dots([(each["delta_ppl_percent"], height)], f"dot-{css}", radius=5)
        y = panel.at((0, height))[1] + 4
        parts += [label(168, y, name, css="name", anchor="end")]
        parts += [label(752, y, signed(each["delta_ppl_percent"], 3), css="name")]
    parts.append(label(0, 262, f"{record['overlap']} heads in common; bars: 95% intervals over windows", css="small"))
    return document("".join(parts), width=WIDTH, height=310, title=title, style=style)


def partial_spearman(record: Record) -> str:
    """Return each score's rank correlation with the cost of single heads: plain, and beyond layer and entropy."""
    title = f"Scores and the cost of {record['heads']} single heads"
    found = dict(sorted(record["correlations"].items(), key=lambda item: highest_first(item[1]["spearman"])))
    names = {"spearman": "Spearman", "layer": "beyond layer", "layer_entropy": "beyond layer and entropy"}
    used = {key: COLOURS[place] for place, key in enumerate(names) if any(key in each for each in found.values())}
    parts = [label(0, 22, title, css="title"), *legend(0, 50, [(f"dot-{used[key]}", names[key]) for key in used])]
    values = [each[key] for each in found.values() for key in used]
    panel = Panel(220, 70, 700, 26 * len(found), Scale.of([0.0, 1.0, *values]), Scale(0, len(found)))
    parts += panel.frame("", ticks=(True, False))
    parts.append(panel.line([(0.0, 0.0), (0.0, float(len(found)))], "live thin"))
    for place, (name, each) in enumerate(found.items()):
        height = len(found) - place - 0.5
        parts.append(label(208, panel.at((0, height))[1] + 4, name.replace("_", " "), css="name", anchor="end"))
        for key in used:
            if each.get(key) is not None:
                parts += panel.dots([(each[key], height)], f"dot-{used[key]}", radius=5)
    return document("".join(parts), width=WIDTH, height=150 + 26 * len(found), title=title, style=style)
