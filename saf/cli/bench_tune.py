"""`saf bench tune`: choose how the Toeplitz product runs here, and keep the choice for this device model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saf.bench.tuning import TuneSettings, measure_tuning
from saf.cli.output import machine, show
from saf.records.table import Table


@dataclass(kw_only=True)
class Tune(TuneSettings):
    """Time every way to run the Toeplitz product at some shapes; later calls of these shapes use the fastest.

    Choices are kept in the user's cache directory, by device model and Triton version. Without them a written rule
    decides. Nothing is ever tuned while something else is timed.
    """

    out: Path
    """JSON file to write; a new one."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> dict[str, Any]:
        """Tune, write, show and return the record."""
        record = measure_tuning(self, out=self.out)
        show(record, *tables(record), f"written to {self.out}", as_json=self.json)
        return record


def tables(record: Mapping[str, Any]) -> Iterator[Table | str]:
    """Yield the choices with the slowest candidate beside them, and what was left out."""
    yield machine(record["provenance"])
    rows = [
        [row["shape"], row["chosen"], *(f"{pick(row['microseconds'].values()):.1f}" for pick in (min, max))]
        for row in record["rows"]
    ]
    yield Table.of("chosen configurations", ["shape", "configuration", "us", "slowest, us"], rows)
    for entry in record["left_out"]:
        yield f"left out: {entry['what']}: {entry['why']}"
