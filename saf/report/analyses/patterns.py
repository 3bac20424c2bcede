"""Figures of analyses of attention and its patterns: profiles, stability, geometry, fits, distributions."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from saf.analysis.storage import FORMS
from saf.records.quantities import number, percent
from saf.report.plot import COLOURS, WIDTH, Panel, Scale, document, label, legend, style

Record = Mapping[str, Any]
_PROFILES = {
    "entropy": "Normalised entropy",
    "local_mass": "Weight of the last 64 keys",
    "largest": "Largest weight",
    "first_token": "Weight of the first token",
}
_DISTANCES = {
    "squared_error": "squared error",
    "kl": "KL, nats per row",
    "hellinger": "squared Hellinger",
    "total_variation": "total variation",
}
_MEASURED, _FAMILIES = "live", {"gaussian": "ordinary", "dirichlet": "frozen"}
_LEAST = 1e-6
"""Probabilities below this share a place at the left end of the axis."""


def profiles(record: Record) -> str:
    """Return a panel for each quantity: every head by layer, and the two matched means as lines."""
    selected = {tuple(head) for head in record["selected"]}
    title = f"How heads spread their attention: {record['windows']} windows of {number(record['length'])} tokens"
    parts = [label(0, 22, title, css="title")]
    names = (
        [("dot-frozen", "selected"), ("dot-live light", "unselected")] if selected else [("dot-live light", "heads")]
    )
    parts += legend(0, 50, names)
    for place, (name, words) in enumerate(_PROFILES.items()):
        x, y = 46 + (place % 2) * 490, 122 + (place // 2) * 256
        parts += _profile_panel(record, name, words, selected, x, y)
    return document("".join(parts), width=WIDTH, height=606, title=title, style=style)


def _profile_panel(
    record: Record, name: str, words: str, selected: set[tuple[int, ...]], x: float, y: float
) -> list[str]:
    """Return the SVG parts of one profile by layer, selected heads beside the others, with both means."""
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
        means = f"means {number(matched[0], 3)} selected, {number(matched[1], 3)} in the same layers"
        parts.append(label(x, y - 12, means, css="small"))
    return parts


def recovery(record: Record) -> str:
    """Return the smoothed gap of every run to the ordinary one, by the updates after its intervention.

    Runs whose intervention no update follows have none.
    """
    title = f"Training loss minus the ordinary run's, mean of {number(record['window'])} updates"
    parts = [label(0, 22, title, css="title")]
    drawn = [run for run in record["runs"] if run["updates"]]
    runs = list(zip(drawn, COLOURS * (1 + len(drawn) // len(COLOURS)), strict=False))
    parts += legend(0, 50, [(f"line {css}", f"after {percent(run['share'])}") for run, css in runs])
    later = [[update - run["update"] for update in run["updates"]] for run, _ in runs]
    every = [gap for run, _ in runs for gap in run["gap"]]
    panel = Panel(70, 96, 860, 420, Scale.of([at for line in later for at in line] or [0, 1]), Scale.of([0.0, *every]))
    parts += panel.frame("gap, nats", across="updates after the intervention")
    for (run, css), at in zip(runs, later, strict=True):
        parts.append(panel.line(list(zip(map(float, at), run["gap"], strict=True)), f"line {css}"))
    return document("".join(parts), width=WIDTH, height=600, title=title, style=style)


def storage(record: Record) -> str:
    """Return a line for each form of the patterns, as long as its bytes on a logarithmic axis."""
    title = f"Patterns of {record['heads']} frozen heads in {record['layers']} layers"
    sizes = {words: record["bytes"][name] / 1e9 for name, words in FORMS.items() if record["bytes"][name]}
    panel = Panel(70, 40, 860, 44.0 * len(sizes), Scale.of(sizes.values(), "log", margin=0.2), Scale(0, len(sizes)))
    parts = [label(0, 22, title, css="title"), *panel.frame("", across="GB", ticks=(True, False))]
    for place, (words, size) in enumerate(sizes.items()):
        height = len(sizes) - place - 0.7
        x, y = panel.at((panel.across.low, height))
        parts.append(panel.line([(panel.across.low, height), (size, height)], f"line {COLOURS[place]}"))
        parts.append(label(x + 6, y - 8, f"{words}: {number(size, 3)} GB", css="small"))
    return document("".join(parts), width=WIDTH, height=110 + 44 * len(sizes), title=title, style=style)


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
    return document("".join(parts), width=WIDTH, height=612, title=title, style=style)


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
        correlation = (record.get("correlations") or {}).get(distance)
        words = f": Spearman with cost {number(correlation[1], 3)}, stratified" if correlation else ""
        parts += panel.frame(_DISTANCES[distance] + words, across="heads, %", ticks=(False, True))
        for rate in rates:
            at = panel.at((100 * float(rate), panel.upward.low))
            parts.append(label(at[0], at[1] + 16, f"{100 * float(rate):g}", css="small", anchor="middle"))
        for name in patterns:
            points = [(100 * float(rate), by_rate[rate][name]) for rate in rates]
            parts += [panel.line(points, colours[name]), *panel.dots(points, f"dot-{colours[name]}")]
    return document("".join(parts), width=WIDTH, height=600, title=title, style=style)


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
    return document("".join(parts), width=WIDTH, height=520, title=title, style=style)


def distributions(record: Record) -> str:
    """Return an entry's distribution functions for some heads, the rows' energy distances, and planes if any."""
    fitted, held = record["sequences"]
    title = f"How attention varies over sequences: models of {fitted} against {held} others"
    entries = record["entries"]
    names = [("dot-live", "measured"), ("dot-ordinary", "Gaussian"), ("dot-frozen", "Dirichlet")]
    parts = [label(0, 22, title, css="title"), *legend(0, 50, names)]
    curves = entries["curves"]
    step = (WIDTH - 40) / max(1, len(curves))
    for place, curve in enumerate(curves):
        parts += _curves(curve, x=46 + place * step, width=step - 66, first=place == 0)
    where = f"entry of query {number(entries['query'] + 1)} and key {number(entries['key'] + 1)}"
    parts.append(label(0, 430, f"{where}; above its logit, below its probability (logarithmic)", css="small"))
    parts += _energies(record, 500)
    height = 760.0
    for place, plane in enumerate(record.get("projections") or ()):
        parts += _plane(plane, 10 + place * step, 760, step - 40)
        height = 790 + step
    return document("".join(parts), width=WIDTH, height=height, title=title, style=style)


def _curves(curve: Record, *, x: float, width: float, first: bool) -> list[str]:
    """Return the SVG parts of one head's distribution curves: logits above, probabilities by generator below."""
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
        caption = f"{name}, {number(median, 3)}"
        parts.append(label(panel.at((place, 1.0))[0], top + 198, caption, css="small", anchor="middle"))
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
    """Return the SVG parts of one head's plane: measured and generated profiles as points, and the mean."""
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
