"""`saf bench errors`: how far execution is from float64, its yardsticks beside it, and budgets that it must keep."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from saf.bench.errors import ErrorSettings, failures, measure_errors
from saf.cli.command import Command
from saf.cli.output import machine, show
from saf.errors import AccuracyError, UnsupportedError
from saf.records.table import Table

PARTS = {
    "layer": ("a layer of live and frozen heads", "unfrozen"),
    "operator": ("frozen heads alone, operands in the dtype", "SDPA"),
}


@dataclass(kw_only=True)
class Errors(Command, ErrorSettings):
    """Errors against float64 of a mixed layer and of frozen heads alone, outputs and every gradient.

    Ends with an error that names the rows above their budgets.
    """

    out: Path
    """JSON file to write; a new one."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> dict[str, Any]:
        """Measure, write, show and return the record; raise AccuracyError for rows above their limits."""
        record = measure_errors(self, out=self.out)
        show(record, *tables(record), f"written to {self.out}", as_json=self.json)
        if not record["rows"]:
            raise UnsupportedError(f"no backend runs here; {self.out} says why")
        if failed := failures(record):
            raise AccuracyError(f"{len(failed)} of {len(record['rows'])} rows: {'; '.join(failed)}")
        return record


def tables(record: Mapping[str, Any]) -> Iterator[Table | str]:
    """Yield a table for each part, backend and precision, and lines on what was left out."""
    yield machine(record["provenance"])
    for (part, backend, precision), group in groupby(
        record["rows"], key=lambda row: (row["part"], row["backend"], row["precision"])
    ):
        rows = list(group)
        what, beside = PARTS[part]
        head = ["tensor", "max abs", "relative L2", "limit", "", f"{beside} max abs", f"{beside} L2"]
        yield Table.of(f"{what}, {backend}, {precision}, against float64", head, [_cells(row) for row in rows])
        if eager := [[row["tensor"], *_pair(row["eager"])] for row in rows if row["eager"]]:
            title = f"the same, {backend}, {precision}, against eager attention with stored patterns, as in the paper"
            yield Table.of(title, head[:3], eager)
    for entry in record["left_out"]:
        yield f"left out: {entry['what']}: {entry['why']}"


def _cells(row: Mapping[str, Any]) -> list[str]:
    verdict = "ok" if row["within"] else "ABOVE"
    return [row["tensor"], *_pair(row), f"{row['limit']:.2e}", verdict, *_pair(row["beside"])]


def _pair(errors: Mapping[str, float]) -> list[str]:
    return [f"{errors['max_abs']:.2e}", f"{errors['relative_l2']:.2e}"]
