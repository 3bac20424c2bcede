"""Tables of analyses of attention and its patterns: shape, stability, distance, fits."""

from collections.abc import Mapping
from typing import Any

from saf.records import paper
from saf.records.quantities import MISSING, correlation, percent
from saf.records.table import Table
from saf.report.cells import Analysis

Record = Mapping[str, Any]


def profiles(record: Record) -> Analysis:
    """Return how selected and other heads spread their attention."""
    rows = []
    for name, values in record["profiles"].items():
        known = [value for row in values for value in row if value is not None]
        matched = record["matched"].get(name) or (None, None)
        told = paper.PROFILES.get(name) or (None, None)
        cells = [known and sum(known) / len(known), *matched]
        row = [name.replace("_", " "), *(MISSING if value in (None, []) else f"{value:.4f}" for value in cells)]
        rows.append([*row, *(value or MISSING for value in told)])
    head = ["profile", "all heads", "selected", "unselected, layer-matched", "paper, selected", "paper, unselected"]
    conditions = f"{record['windows']} windows of {record['length']:,} tokens, {len(record['selected'])} heads selected"
    return Analysis(
        "How heads spread their attention", conditions, {"": Table.of("", head, rows).used()}, paper.SELECTION_TEXT
    )


def geometry(record: Record) -> Analysis:
    """Return how far patterns are from the mean, and how that goes with their cost."""
    distances = record["distances"]
    rates = list(next(iter(distances.values())))
    rows = []
    for rate in rates:
        for pattern in next(iter(distances.values()))[rate]:
            values = [f"{distances[name][rate][pattern]:.3e}" for name in distances]
            rows.append([f"{percent(rate)} {pattern.replace('_', ' ')}", *values])
    tables = {"": Table.of("", ["heads, pattern", *(name.replace("_", " ") for name in distances)], rows).used()}
    if found := record.get("correlations"):
        tables["Spearman of each distance with what the patterns cost (paper)"] = _correlations(found)
    title = "Distance of fixed patterns from the mean pattern"
    return Analysis(title, f"{record['length']:,} tokens", tables, paper.GEOMETRY)


def _correlations(found: Record) -> Table:
    rows: list[list[str]] = []
    columns: list[str] = []
    for name, (within, pooled) in found.items():
        told = paper.GEOMETRY_CORRELATIONS.get(name, {})
        values = {**within, "stratified": pooled}
        columns = [rate if rate == "stratified" else percent(rate) for rate in values]
        cells = [f"{correlation(value)} ({told.get(rate, MISSING)})" for rate, value in values.items()]
        rows.append([name.replace("_", " "), *cells])
    return Table.of("", ["distance", *columns], rows).used()


def stability(record: Record) -> Analysis:
    """Return how alike two selections are."""
    told, heads = paper.STABILITY, f"{record['first']} and {record['second']} heads"
    chance = f"{record['expected']:.2f} ± {record['standard_deviation']:.2f}"
    rows = [
        ["heads in both", f"{record['overlap']}", told["overlap"]],
        ["expected by chance in each layer", chance, told["expected"]],
        ["rank correlation of the scores", correlation(record["rank_correlation"]), told["rank_correlation"]],
    ]
    return Analysis(
        "Stability of the selection",
        heads,
        {"": Table.of("", ["", "ours", "paper"], rows).used()},
        paper.SELECTION_TEXT,
    )


def fits(record: Record) -> Analysis:
    """Return how fits of one half of the sequences describe the other."""
    rows = []
    for name, each in record["groups"].items():
        values = [f"{each[key]:.4f}" for key in ("free_own", "free_other", "structured_own", "structured_other")]
        rows.append([name, f"{each['heads']}", *values, f"{each['structured_closer']} of {each['heads']}"])
    head = ["heads by variance", "heads", "free: own half", "free: other", "structured: own half", "structured: other"]
    head += ["structured closer to the other"]
    first, second = record["sequences"]
    conditions = (
        f"nats per row, {first} and {second} sequences of {record['length']:,} tokens; structured: alpha constant "
        f"from key {record['alpha_constant_after']} on. The paper has no such comparison"
    )
    title = "Fits of one half of the sequences against the other half"
    return Analysis(title, conditions, {"": Table.of("", head, rows).used()}, None)


def distributions(record: Record) -> Analysis:
    """Return how far generated rows are from measured ones."""
    fitted, held = record["sequences"]
    rows = [[name, f"{value:.3f}", paper.ROW_DISTANCES.get(name, MISSING)] for name, value in record["medians"].items()]
    conditions = (
        f"median energy distance over {len(record['heads'])} heads and {len(record['positions'])} queries; fitted to "
        f"{fitted} sequences of {record['length']:,} tokens, {held} held out; concentrations times {record['scale']:g}"
    )
    table = Table.of("", ["rows drawn", "ours", "paper"], rows).used(keep=["paper"])
    return Analysis("Generated attention rows against measured ones", conditions, {"": table}, paper.DISTRIBUTIONS)
