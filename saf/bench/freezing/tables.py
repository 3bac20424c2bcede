"""Tables of what an intervention takes, beside the paper's: `saf bench calibration`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from saf.bench.accuracy.tables import error
from saf.bench.harness.measured import Record
from saf.records import paper
from saf.records.paper import Quoted, footnotes
from saf.records.quantities import MISSING, gibibytes, number, seconds
from saf.records.table import Cell, Notes, Part, Table

STAGES = {"statistics": "statistics", "fit": "fit"}
"""Stages that the paper tells too, by our name; its statistics include the capture."""
WARM = "Warm times are medians over repeated interventions on one model; the first use is told apart."
_FITS = "Fit of all heads and its KL"
_DENSE = "Dense collection of the same queries and keys, in float32, as the baseline"


def intervention_tables(record: Record) -> list[Part]:
    """Return a table of stages for each intervention, one of fits, one of dense collections."""
    quoted: list[Quoted | None] = []
    parts: list[Part] = [WARM]
    for row in record["rows"]:
        if row["part"] == "intervention":
            parts.append(replace(_stages(row, quoted), title=_title(row), notes=(_conditions(row),)))
    fits, dense = (_rows(record, part) for part in ("fit", "dense"))
    if fits:
        parts.append(_fits(fits).titled(_FITS))
        quoted.append(Quoted("", paper.COSTS))
    if dense:
        parts.append(_dense(dense).titled(_DENSE))
    return [*parts, Notes(list(_notes(fits, quoted)))]


def overview(records: Sequence[tuple[Cell, Record]]) -> list[Part]:
    """Return one row an intervention with the warm time of each stage, one a fit, one a dense collection."""
    quoted: list[Quoted | None] = []
    parts: list[Part] = []
    kinds = (("intervention", "", lambda rows: _wholes(rows, quoted)), ("fit", _FITS, _fits), ("dense", _DENSE, _dense))
    for part, title, table in kinds:
        found = [(cell, table(rows)) for cell, record in records if (rows := _rows(record, part))]
        parts += [Table.stacked(title, found)] * bool(found)
    fits = [row for _, record in records for row in _rows(record, "fit")]
    return [*parts, Notes(list(_notes(fits, [*quoted, *([Quoted("", paper.COSTS)] if fits else [])])))]


def _rows(record: Record, part: str) -> list[Record]:
    return [row for row in record["rows"] if row["part"] == part]


def _wholes(rows: list[Record], quoted: list[Quoted | None]) -> Table:
    """Return the table of interventions: median seconds of each stage and of the whole, beside the paper's."""
    head = ["intervention", *rows[0]["stages"], "whole", "range", "first use", "paper"]
    cells = []
    for row in rows:
        stages = _stages(row, quoted).rows
        *medians, whole = (stage[1] for stage in stages)
        cells.append(
            [_title(row), *medians, whole, _range(row["spread"]), seconds(row["first_seconds"]), stages[-1][-1]]
        )
    return Table.of("", head, cells)


def row_line(row: Record) -> str:
    """Return one row as a line for people, in the cells of its table."""
    if row["part"] == "intervention":
        stages = ", ".join(f"{stage} {median}" for stage, median, *_ in _stages(row, []).rows)
        return f"{_title(row)}: {stages}; {_conditions(row)}"
    what, table = ("fit", _fits([row])) if row["part"] == "fit" else ("dense collection", _dense([row]))
    return f"{what}: " + "; ".join(f"{name} {cell}" for name, cell in zip(table.columns, table.rows[0], strict=True))


def _title(row: Record) -> str:
    place = f"{Path(row['model']).name}, {row['point']['length']}x{row['point']['batch_size']}"
    return f"{place}, {100 * row['rate']:g}% of heads"


def _conditions(row: Record) -> str:
    """Return the sentence that says under which conditions an intervention was timed and whether it kept its bar."""
    words = [f"{row['heads']} frozen"]
    if row["rejected"]:
        words.append(f"{row['rejected']} fits rejected")
    words += [f"{row['repeats']} warm interventions", f"{row['precision']}", row["weights"], row["text"]]
    words.append(f"peak memory {gibibytes(row['peak_bytes'])} ({row['peak_kind']})")
    words.append(f"{row['passes']} pass{'es' * (row['passes'] > 1)} over the sequences")
    if row["bar_seconds"] is not None:
        words.append(f"{_verdict(row['seconds'], row['bar_seconds'])} the {row['bar_seconds']:g} s that it may take")
    if not row["same_each_time"]:
        words.append("the repeated interventions did not agree")
    return "; ".join(words) + "."


def _stages(row: Record, quoted: list[Quoted | None]) -> Table:
    """Return the table of one intervention's stages, and append what is quoted from the paper to `quoted`."""
    model, length, sequences = row["model"], row["point"]["length"], row["point"]["batch_size"]

    def in_short(part: str | None) -> str:
        found = paper.intervention(model, length, row["rate"], part, sequences=sequences) if part else None
        quoted.append(found)
        return MISSING if found is None else found.text + " with capture" * (part == "statistics")

    first = row["first_stages"]
    rows = [
        [name, seconds(stage["median"]), _range(stage), seconds(first.get(name)), in_short(STAGES.get(name))]
        for name, stage in row["stages"].items()
    ]
    whole = row["spread"]
    rows.append(["whole", seconds(whole["median"]), _range(whole), seconds(row["first_seconds"]), in_short("total")])
    return Table.of("", ["stage", "warm median", "warm range", "first use", "paper"], rows).used(keep=["paper"])


def _range(stage: Record) -> str:
    return f"{seconds(stage['min'])} to {seconds(stage['max'])}"


def _fits(rows: list[Record]) -> Table:
    """Return the table of timed fits: heads, tokens, seconds, sweeps, and how far from the reference they end."""
    head = ["of", "heads", "tokens", "warm median", "first use", "sweeps, mean and most", "worst KL"]
    head += ["KL over the reference, at most", "not converged"]
    cells = [
        [
            Path(row["of"]).name,
            number(row["heads"]),
            number(row["length"]),
            seconds(row["seconds"]) + _limit(row["seconds"], row["bar_seconds"], " s"),
            seconds(row["seconds"] + row["first_use_seconds"]),
            f"{row['sweeps']['mean']:.1f}, {row['sweeps']['max']}",
            f"{row['worst_kl']:.4f} nats",
            MISSING
            if row["excess_kl"] is None
            else f"{error(row['excess_kl'])} nats" + _limit(row["excess_kl"], row["bar_excess_kl"], " nats"),
            number(row["not_converged"]),
        ]
        for row in rows
    ]
    return Table.of("", head, cells).used()


def _dense(rows: list[Record]) -> Table:
    """Return the table that compares the statistics with their collection from whole matrices."""
    head = ["point", "layers measured", "dense, all layers", "ours", "ratio", "intervention with it", "ratio of wholes"]
    head += ["ours from float64, relative"]
    cells = []
    for row in rows:
        ratios = ["refused"] * 2 if row["refused"] else [f"{row[key]:.1f}×" for key in ("ratio", "intervention_ratio")]
        layers = f"{row['layers']} of {row['of_layers']}" + (", extrapolated" if row["extrapolated"] else "")
        place = f"{Path(row['model']).name} {row['point']['length']}x{row['point']['batch_size']}"
        largest = max(row["difference"].values())
        worst = error(largest) + _limit(largest, row["bar_difference"])
        times = [seconds(row["seconds"]), seconds(row["statistics_seconds"])]
        cells.append([place, layers, *times, ratios[0], seconds(row["intervention_seconds"]), ratios[1], worst])
    return Table.of("", head, cells).used()


def _limit(value: float, limit: float | None, unit: str = "") -> str:
    """Return behind a number whether it is within its limit; nothing where it has none."""
    return "" if limit is None else f" ({_verdict(value, limit)} {limit:g}{unit})"


def _verdict(value: float, limit: float) -> str:
    return "within" if value <= limit else "above"


def _notes(fits: list[Record], quoted: list[Quoted | None]) -> Iterator[str]:
    """Yield the notes below the tables: what the paper's fits cost, and the conditions of its quoted numbers."""
    if fits:
        cost = {rate: paper.INTERVENTION["124m", 4096, rate]["fit"] for rate in (0.25, 0.5)}
        yield f"The paper fits 36 heads in {cost[0.25]} s and 72 in {cost[0.5]} s, 400 Adam steps each (124M, 4K)."
    yield from (f"Paper, {note}" for note in footnotes(quoted))
    if not any(quoted):
        yield "The paper has no number at these shapes."
