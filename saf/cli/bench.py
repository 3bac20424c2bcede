"""`saf bench`: speed and memory, each number beside its baseline, its bound and its control."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saf.bench import OpSettings, PrefillSettings, UpdateSettings, measure
from saf.bench.pairs import control_words
from saf.cli.bench_calibration import Calibration
from saf.cli.bench_errors import Errors
from saf.cli.command import Command
from saf.cli.output import machine, show
from saf.errors import UnsupportedError
from saf.records.table import Table

HEAD = ["arm", "ms", "baseline", "ratio", "range", "TFLOP/s", "floor, ms"]


@dataclass(kw_only=True)
class _Output(Command):
    out: Path
    """JSON file to write; a new one."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> dict[str, Any]:
        """Measure, write, show and return the record."""
        assert isinstance(self, OpSettings | PrefillSettings | UpdateSettings)
        record = measure(self, out=self.out)
        show(record, *tables(record), f"written to {self.out}", as_json=self.json)
        if not record["rows"] and not record["memory"]:
            raise UnsupportedError(f"nothing could be measured; {self.out} says why, arm by arm")
        return record


@dataclass(kw_only=True)
class Op(_Output, OpSettings):
    """One layer's attention without projections: frozen heads alone, and the mixed layer.

    Ratios are the baseline's time over the arm's: above 1 the arm is faster.
    """


@dataclass(kw_only=True)
class Update(_Output, UpdateSettings):
    """Whole optimiser updates of a model: accumulation, backward, clipping, AdamW, gradient reset.

    Data loading is left out. Ratios are the baseline's time over the arm's: above 1 the arm is faster.
    """


@dataclass(kw_only=True)
class Prefill(_Output, PrefillSettings):
    """Forward passes over whole prompts, with the output layer on the last token alone.

    Ratios are the baseline's time over the arm's: above 1 the arm is faster.
    """


def tables(record: Mapping[str, Any]) -> Iterator[Table | str]:
    """Yield a table for each point, one for peak memory, and lines on what was left out."""
    yield machine(record["provenance"])
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in record["rows"]:
        groups.setdefault(title_of(row), []).append(row)
    for title, rows in groups.items():
        yield Table.of(title, HEAD, [_cells(row) for row in rows])
        yield from (f"refused ({row['arm']}): {_reason(row)}" for row in rows if row["refused"])
    if record["memory"]:
        rows = [[_place(m["point"]), m["arm"], f"{m['bytes'] / 2**30:.3f}", _percent(m)] for m in record["memory"]]
        kind = record["memory"][0]["kind"]
        yield Table.of(f"peak memory ({kind}), one arm a process", ["point", "arm", "GiB", "against ordinary"], rows)
    for seen in record["kernels"]:
        if seen["kernel_seen"] is False:
            yield f"warning: {_place(seen['point'])}: {seen['arm']} did not run the kernel it was told to"
    for entry in record["left_out"]:
        yield f"left out: {entry['what']}: {entry['why']}"


def title_of(row: Mapping[str, Any]) -> str:
    """Return what a table of rows is about."""
    alone = row.get("alone")
    part = f"{alone} {'head' if alone == 1 else 'heads'} alone" if alone else row.get("part")
    parts = [row.get("model"), part, _place(row["point"]), row["variant"]]
    return ", ".join(part for part in parts if part) + f", against {row['baseline']}; times in ms"


def _cells(row: Mapping[str, Any]) -> list[Any]:
    bound = row["arm_floor_ms"]
    return [
        row["arm"],
        f"{row['arm_ms']:.4g}",
        f"{row['baseline_ms']:.4g}",
        "refused" if row["refused"] else f"{row['ratio']:.3f}x",
        f"{row['min']:.3f}–{row['max']:.3f}",
        f"{row['arm_tflops']:.3g}",
        None if bound is None else f"{bound:.4g}",
    ]


def _reason(row: Mapping[str, Any]) -> str:
    control = row["control_ratio"]
    if control is None:
        return "its control could not be measured"
    return (
        f"{control_words(row, control)}: the machine is not quiet enough; end other work on it, measure more --pairs, "
        "or accept more with --tolerance"
    )


def _place(point: Mapping[str, Any]) -> str:
    shape = "x".join(str(point[key]) for key in ("length", "batch_size", "accumulation") if key in point)
    return f"{shape} {point['precision']}" if "precision" in point else shape


def _percent(entry: Mapping[str, Any]) -> str | None:
    change = entry["change_percent"]
    return None if change is None else f"{change:+.2f}%"


COMMANDS = {"op": Op, "update": Update, "prefill": Prefill, "errors": Errors, "calibration": Calibration}
