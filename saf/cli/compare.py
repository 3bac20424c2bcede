"""`saf compare`: an ordinary and a frozen run of the same text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from saf.cli.command import Command
from saf.cli.output import show
from saf.evaluate.compare import compare_runs
from saf.records.quantities import change_percent, gibibytes, seconds, signed
from saf.records.table import Table
from saf.report.runs.summary import timing_is_clear


@dataclass(kw_only=True)
class Compare(Command):
    """Tell what freezing cost in perplexity, with its interval, and what it saved in time and memory.

    Refuses runs that differ in more than the freezing.
    """

    ordinary: Annotated[Path, tyro.conf.Positional]
    """Folder of the finished run without frozen heads."""
    frozen: Annotated[Path, tyro.conf.Positional]
    """Folder of the finished run with frozen heads."""
    out: Path | None = None
    """Folder for compare.json; the frozen run's if not given."""
    allow_differences: bool = False
    """Compare all the same, listing what differs; the held-out windows must still be the same."""
    resamples: int = 10_000
    """Bootstrap draws of windows."""
    seed: int = 0
    """Seed of the draws."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> dict[str, Any]:
        """Compare, write compare.json, show and return it."""
        record = compare_runs(
            self.ordinary,
            self.frozen,
            out=self.out or self.frozen,
            allow_differences=self.allow_differences,
            resamples=self.resamples,
            seed=self.seed,
        )
        show(record, *_tables(record), as_json=self.json)
        return record


def _speed(record: dict[str, Any]) -> str:
    ratio = record["update_time_ratio"]
    if not ratio:
        return "too few updates to tell"
    return f"{ratio:.3f}x as fast" + ("" if timing_is_clear(record) else ", not clear: spreads overlap")


def _tables(record: dict[str, Any]) -> list[Any]:
    low, high = record["ci95"]
    ratio = record["update_time_ratio"]
    memory = change_percent(record["peak_memory_ordinary"], record["peak_memory_frozen"])
    rows = [
        [
            "perplexity",
            f"{record['ppl_ordinary']:.4f}",
            f"{record['ppl_frozen']:.4f}",
            f"{signed(record['delta_ppl_percent'])} (95%: {signed(low)} to {signed(high)})",
        ],
        [
            "median update",
            seconds(record["update_seconds_ordinary"]),
            seconds(record["update_seconds_frozen"]),
            _speed(record),
        ],
        [
            "peak memory of an update",
            gibibytes(record["peak_memory_ordinary"]),
            gibibytes(record["peak_memory_frozen"]),
            signed(memory, 1),
        ],
    ]
    title = f"{record['heads']} of {record['num_heads']} heads frozen"
    tables: list[Any] = [Table.of(title, ["", "ordinary", "frozen", "change"], rows)]
    span = f", updates {record['timed_updates'][0]:,} to {record['timed_updates'][1]:,} timed" * bool(ratio)
    tables.append(f"{record['windows']:,} paired windows, {record['resamples']:,} resamples{span}")
    if spent := record["intervention_seconds"]:
        tables.append(f"freezing took {seconds(sum(spent.values()))}")
    tables += [f"differs: {difference}" for difference in record["differences"]]
    return tables


COMMAND = Compare
