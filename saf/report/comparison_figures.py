"""Figures of analyses that compare: two head sets, two selections, fits, patterns, correlations."""

from collections.abc import Mapping, Sequence
from typing import Any

from saf.records.quantities import number, signed
from saf.report.panel import COLOURS, Panel, Scale, legend, style
from saf.report.svg import document, label

Record = Mapping[str, Any]
_DISTANCES = {
    "squared_error": "squared error",
    "kl": "KL, nats per row",
    "hellinger": "squared Hellinger",
    "total_variation": "total variation",
}


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
    return document("".join(parts), width=980, height=310, title=title, style=style)


def stability(record: Record) -> str:
    """Return both scores of every head, and the overlap beside that of independent sets."""
    title = f"{record['overlap']} heads in both selections, of {record['first']} and {record['second']}"
    chance = f"{number(record['expected'], 3)} ± {number(record['standard_deviation'], 2)}"
    parts = [label(0, 22, title, css="title")]
    words = f"independent sets with the same layers share {chance}; rank correlation of the scores "
    parts.append(label(0, 48, words + number(record["rank_correlation"], 3), css="small"))
    sets = [{tuple(head) for head in heads} for heads in record["heads"]]
    groups = {"in both": sets[0] & sets[1], "in one": sets[0] ^ sets[1]}
    parts += legend(0, 76, [("dot-frozen", "in both"), ("dot-ordinary", "in one"), ("dot-live light", "in neither")])
    one, other = record["scores"]
    values = [(x, y) for left, right in zip(one, other, strict=True) for x, y in zip(left, right, strict=True)]
    known = [(x, y) for x, y in values if x is not None and y is not None]
    panel = Panel(70, 118, 860, 420, Scale.of([x for x, _ in known], "log"), Scale.of([y for _, y in known], "log"))
    parts += panel.frame("score at the second selection", across="score at the first selection")
    for css, chosen in (
        ("dot-live light", None),
        ("dot-ordinary", groups["in one"]),
        ("dot-frozen", groups["in both"]),
    ):
        points = [
            (x, y)
            for number_of, (x, y) in enumerate(values)
            if x is not None and y is not None and _belongs(divmod(number_of, len(one[0])), chosen, sets)
        ]
        parts += panel.dots(points, css)
    return document("".join(parts), width=980, height=612, title=title, style=style)


def _belongs(head: tuple[int, int], chosen: set | None, sets: Sequence[set]) -> bool:
    return head in chosen if chosen is not None else head not in sets[0] | sets[1]


def geometry(record: Record) -> str:
    """Return each distance from the mean pattern by rate, one line a pattern."""
    title = "Distance of fixed patterns from the mean pattern"
    distances = record["distances"]
    rates = list(next(iter(distances.values())))
    # The mean pattern is at no distance from itself but rounding.
    patterns = [name for name in distances[next(iter(distances))][rates[0]] if name != "mean"]
    colours = dict(zip(patterns, COLOURS, strict=False))
    parts = [label(0, 22, title, css="title")]
    parts += legend(0, 50, [(f"dot-{colours[name]}", name.replace("_", " ")) for name in patterns])
    for place, (distance, by_rate) in enumerate(distances.items()):
        known = [by_rate[rate][name] for rate in rates for name in patterns]
        low, high = min(map(float, rates)), max(map(float, rates))
        across = Scale.of([100 * low, 100 * high])
        panel = Panel(56 + (place % 2) * 490, 100 + (place // 2) * 250, 410, 160, across, Scale.of(known, "log"))
        told = (record.get("correlations") or {}).get(distance)
        words = f": Spearman with cost {number(told[1], 3)}, stratified" if told else ""
        parts += panel.frame(_DISTANCES[distance] + words, across="heads, %", ticks=(False, True))
        for rate in rates:
            at = panel.at((100 * float(rate), panel.upward.low))
            parts.append(label(at[0], at[1] + 16, f"{100 * float(rate):g}", css="small", anchor="middle"))
        for name in patterns:
            points = [(100 * float(rate), by_rate[rate][name]) for rate in rates]
            parts += [panel.line(points, colours[name]), *panel.dots(points, f"dot-{colours[name]}")]
    return document("".join(parts), width=980, height=600, title=title, style=style)


def fits(record: Record) -> str:
    """Return the KL of both fits to the half they never saw, head against head, and own against other half."""
    title = "Compact fits of one half of the calibration sequences, on the other half"
    found = record["fits"]
    parts = [label(0, 22, title, css="title")]
    sizes = " and ".join(f"{size}" for size in record["sequences"])
    parts.append(label(0, 48, f"{sizes} sequences of {number(record['length'])} tokens; nats per row", css="small"))
    panels = [
        ("structured fit, other half", "free fit, other half", found["free"]["other"], found["structured"]["other"]),
        ("free fit, other half", "free fit, own half", found["free"]["own"], found["free"]["other"]),
    ]
    for place, (up, across, one, other) in enumerate(panels):
        points = [
            (x, y)
            for left, right in zip(one, other, strict=True)
            for x, y in zip(left, right, strict=True)
            if x is not None and y is not None
        ]
        scale = Scale.of([value for point in points for value in point], "log")
        panel = Panel(60 + place * 490, 100, 390, 340, scale, scale)
        parts += [*panel.frame(up, across=across), *panel.dots(points, "dot-frozen light")]
        parts.append(panel.line([(scale.low, scale.low), (scale.high, scale.high)], "live thin light"))
    return document("".join(parts), width=980, height=520, title=title, style=style)


def partial_spearman(record: Record) -> str:
    """Return each score's rank correlation with the cost of single heads: plain, and beyond layer and entropy."""
    title = f"Scores and the cost of {record['heads']} single heads"
    found = dict(sorted(record["correlations"].items(), key=lambda item: -(item[1]["spearman"] or -2)))
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
    return document("".join(parts), width=980, height=150 + 26 * len(found), title=title, style=style)
