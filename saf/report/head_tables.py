"""Tables of analyses of single heads and head sets: their cost, and which scores foretell it."""

from collections.abc import Mapping
from typing import Any

from saf.records import paper
from saf.records.quantities import MISSING, correlation, percent, signed
from saf.records.table import Table
from saf.report.cells import Analysis

Record = Mapping[str, Any]


def one_head(record: Record) -> Analysis:
    """Return what freezing each head alone costs, by score."""
    rates = list(next(iter(record["quality"].values()))["mean_cost"])
    head = ["score", "Spearman", "paper"]
    for rate in rates:
        head += [f"mean cost, lowest {percent(rate)}", f"paper, {percent(rate)}"]
    rows = []
    for name, each in sorted(record["quality"].items(), key=lambda item: -(item[1]["spearman"] or -2)):
        told = paper.SELECTOR_DIAGNOSTIC.get(name)
        row = [name.replace("_", " "), correlation(each["spearman"]), told[0] if told else MISSING]
        for rate in rates:
            quoted = told[{"0.25": 1, "0.5": 2}[rate]] if told and rate in ("0.25", "0.5") else MISSING
            row += [signed(each["mean_cost"][rate], 4), quoted]
        rows.append(row)
    measured = sum(value is not None for row in record["nll_change"] for value in row)
    conditions = (
        f"{record['windows']} held-out windows of {record['length']:,} tokens; "
        f"{len(record['eligible'])} of {measured} heads fit"
    )
    title = "Immediate cost of single heads, and which scores foretell it"
    tables = {"": Table.of("", head, rows).used(keep=["paper"])}
    if "fit_difference" in record:
        after = record["structured"]["alpha_constant_after"]
        tables[f"Mean loss change, thousandths of a nat; structured: alpha constant from key {after} on"] = _two_fits(
            record
        )
    return Analysis(title, conditions, tables, paper.SELECTORS)


def _two_fits(record: Record) -> Table:
    rows = []
    for name, each in record["fit_difference"].items():
        heads = "all accepted" if name == "all" else f"lowest {percent(name)} by variance"
        low, high = (signed(1e3 * end, 3, "") for end in each["ci95"])
        values = [signed(1e3 * each[key], 3, "") for key in ("first", "second", "difference")]
        rows.append([heads, f"{each['heads']}", *values, f"{low} to {high}"])
    return Table.of("", ["heads", "fits", "free", "structured", "difference", "95% interval"], rows).used()


def joint_cost(record: Record) -> Analysis:
    """Return what two head sets cost as wholes."""
    first, second = (len(heads) for heads in record["heads"])
    rows = []
    for name, size in (("first", f"{first}"), ("second", f"{second}"), ("difference", MISSING)):
        low, high = record[name]["ci95"]
        rows.append(
            [name, size, signed(record[name]["delta_ppl_percent"], 3), f"{signed(low, 3)} to {signed(high, 3)}"]
        )
    told = paper.JOINT_COST
    conditions = (
        f"{record['overlap']} heads in common, windows of {record['length']:,} tokens. Paper: sets by residual cosine "
        f"{told['residual_cosine']}, by variance {told['variance']}, {told['overlap']} in common"
    )
    head = ["set", "heads", "perplexity", "95% interval"]
    return Analysis(
        "Immediate cost of two head sets", conditions, {"": Table.of("", head, rows).used()}, paper.SELECTION_TEXT
    )


def partial_spearman(record: Record) -> Analysis:
    """Return rank correlations beyond layer and entropy."""
    names = {"spearman": "Spearman", "layer": "beyond layer", "layer_entropy": "beyond layer and entropy"}
    names["with_entropy"] = "with entropy"
    rows = []
    for name, each in record["correlations"].items():
        told = paper.PARTIAL if name == "variance" else {}
        cells = [
            correlation(each.get(key)) + (f" (paper {told[key]})" if key in told and key in each else "")
            for key in names
        ]
        rows.append([name.replace("_", " "), *cells])
    table = {"": Table.of("", ["score", *names.values()], rows).used()}
    title = "Scores and the cost of single heads, layer and entropy held"
    return Analysis(title, f"{record['heads']} heads", table, paper.SELECTION_TEXT)
