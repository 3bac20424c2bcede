"""The table that begins the document of results: each main number once, its newest value, beside the paper's.

Of what benchmarks measured it has the points that the paper has a number of; the others stand in their sections.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saf.evaluate.side_by_side import arm_names, compare_all
from saf.records import paper
from saf.records.paper import Quoted
from saf.records.quantities import MISSING, number, percent, seconds, signed
from saf.records.run import RecordedRun
from saf.records.table import Cell, Table
from saf.records.text import natural_order
from saf.report.benchmarks.other import SYNTHETIC
from saf.report.benchmarks.speed import SPEED_KINDS, compares_arms, kernel_name, shape

Record = Mapping[str, Any]
RATES = (0.25, 0.5)
"""Shares of frozen heads that have a column: those of the paper's main tables."""
BACKEND = "toeplitz"
"""Whose speed is the summary's: the default one."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Hold one number of ours at one share of frozen heads, and the paper's, if it has one."""

    what: str
    where: str
    """The point that it was measured at, and against what."""
    rate: float
    ours: str
    quoted: Quoted | None
    date: str
    source: Cell
    """Names its file or folder."""
    note: str = ""
    """What a reader must know to set both numbers side by side: it stands below the table, once."""


def summary_table(
    trainings: Iterable[tuple[Cell, Sequence[RecordedRun]]],
    files: Iterable[tuple[Cell, Record]],
    others: Iterable[Finding] = (),
) -> Table:
    """Return one row for what was measured at one point; where runs share a point, the newest one's number stands.

    Folders of runs and records of files come with the cells that name them in the document; `others` follow the runs.
    """
    found = [*(finding for name, runs in trainings for finding in _of_runs(name, runs)), *others]
    trained = len(found)
    for name, record in files:
        if compares_arms(record):
            found += [*_of_speeds(name, record), *_of_memory(name, record)]
        elif record.get("kind") == "calibration":
            found += _of_interventions(name, record)
    quoted = {(finding.what, finding.where) for finding in found[trained:] if finding.quoted is not None}
    measured = [finding for finding in found[trained:] if (finding.what, finding.where) in quoted]
    elsewhere = len({(finding.what, finding.where) for finding in found[trained:]}) - len(quoted)
    found = [*found[:trained], *measured]
    newest: dict[tuple[str, str], dict[float, Finding]] = {}
    for finding in sorted((each for each in found if each.rate in RATES), key=lambda each: each.date):
        newest.setdefault((finding.what, finding.where), {})[finding.rate] = finding
    # What is measured stands in the order of the document, its points by their numbers.
    place = {what: number for number, what in enumerate(dict.fromkeys(finding.what for finding in found))}
    order = sorted(newest, key=lambda key: (place[key[0]], natural_order(key[1])))
    head = ["what", "where"]
    for rate in RATES:
        head += [f"{percent(rate)} frozen", f"paper, {percent(rate)}"]
    notes = [f"Points that the paper has no number of, {elsewhere} more, stand in the sections."] if elsewhere else []
    notes += dict.fromkeys(finding.note for finding in found if finding.note)
    return Table.of("", [*head, "in"], [_row(*key, newest[key]) for key in order], notes)


def _row(what: str, where: str, by_rate: Mapping[float, Finding]) -> list[str | Cell]:
    """Return the row of one measured thing: ours and the paper's at each rate, and the newest file."""
    cells: list[str | Cell] = []
    for rate in RATES:
        finding = by_rate.get(rate)
        quoted = finding.quoted.text if finding is not None and finding.quoted is not None else MISSING
        cells += [MISSING if finding is None else finding.ours, quoted]
    # One that another file has newer at one rate alone is found in the section's table.
    return [what, where, *cells, max(by_rate.values(), key=lambda finding: finding.date).source]


def _of_runs(source: Cell, runs: Sequence[RecordedRun]) -> Iterator[Finding]:
    """Yield the change of perplexity of each arm that froze heads and was compared with the folder's ordinary one."""
    for comparison in compare_all(runs, arm_names(runs)):
        run, record = comparison.frozen, comparison.record
        if record is None or not run.num_heads or run.pruned_heads:
            continue
        settings, train = run.config.get("settings") or {}, run.config.get("train") or {}
        model, length, rate = settings.get("model"), train.get("length"), len(run.frozen_heads) / run.num_heads
        yield Finding(
            what="perplexity, matched tokens",
            where=f"{model}, {number(length)} tokens, {number((run.result or {}).get('updates'))} updates",
            rate=rate,
            ours=signed(record["delta_ppl_percent"]),
            quoted=paper.perplexity(model, length, rate),
            date=str(((run.result or {}).get("provenance") or {}).get("date")),
            source=source,
        )


def _of_speeds(source: Cell, record: Record) -> Iterator[Finding]:
    """Yield the speedups of the default backend, one a point and rate."""
    for group in SPEED_KINDS[record["kind"]].main_groups(record):
        baseline = kernel_name(group.baseline.removeprefix("ordinary "))
        for arm in group.arms:
            if arm.row["backend"] != BACKEND or arm.row["rate"] not in RATES:
                continue
            yield Finding(
                what=f"{SPEED_KINDS[record['kind']].gains} speedup: {group.way}",
                where=", ".join(filter(None, [shape(group.point), f"against {baseline}", arm.apart])),
                rate=arm.row["rate"],
                ours="refused" if arm.ratio is None else f"{arm.ratio:.3f}×",
                quoted=arm.paper,
                date=_date(record),
                source=source,
            )


def _of_memory(source: Cell, record: Record) -> Iterator[Finding]:
    """Yield the changes of peak memory by the default backend, one a point and rate."""
    for entry in record["memory"]:
        if entry["backend"] == BACKEND and entry["change_percent"] is not None and entry["rate"] in RATES:
            yield Finding(
                what=f"peak memory of {record['kind']}: {SPEED_KINDS[record['kind']].memory_of(record)}",
                where=shape(entry["point"]),
                rate=entry["rate"],
                ours=signed(entry["change_percent"]),
                quoted=SPEED_KINDS[record["kind"]].quoted_memory(record, entry),
                date=_date(record),
                source=source,
            )


def _of_interventions(source: Cell, record: Record) -> Iterator[Finding]:
    """Yield the seconds of every warm intervention, beside the paper's."""
    for row in record["rows"]:
        if row["part"] != "intervention":
            continue
        model, point = row["model"], row["point"]
        untrained = ", weights not trained" if row.get("weights") == SYNTHETIC else ""
        yield Finding(
            what=f"freezing, warm{untrained}: {Path(model).name}",
            where=f"{point['length']}x{point['batch_size']}",
            rate=row["rate"],
            ours=seconds(row["seconds"]),
            quoted=paper.intervention(model, point["length"], row["rate"], sequences=point["batch_size"]),
            date=_date(record),
            source=source,
        )


def _date(record: Record) -> str:
    return str((record.get("provenance") or {}).get("date"))
