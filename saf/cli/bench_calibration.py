"""`saf bench calibration`: what an intervention takes, stage by stage, beside a dense collection of the same inputs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saf.bench.calibration import measure_calibration
from saf.bench.calibration_settings import CalibrationSettings
from saf.cli.command import Command
from saf.cli.output import machine, show
from saf.errors import UnsupportedError
from saf.records.table import Table


@dataclass(kw_only=True)
class Calibration(Command, CalibrationSettings):
    """The whole intervention, warm and at first use: calibration, scoring, selection, fitting, installation.

    Beside it a dense collection of the same queries and keys, whose statistics must agree, and the fit of all heads.
    """

    out: Path
    """JSON file to write; a new one."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> dict[str, Any]:
        """Measure, write, show and return the record."""
        record = measure_calibration(self, out=self.out)
        show(record, *tables(record), f"written to {self.out}", as_json=self.json)
        if not record["rows"]:
            raise UnsupportedError(f"nothing could be measured; {self.out} says why")
        return record


def tables(record: Mapping[str, Any]) -> Iterator[Table | str]:
    """Yield a table of each part, and lines on weights, text and what was left out."""
    yield machine(record["provenance"])
    parts = {part: [row for row in record["rows"] if row["part"] == part] for part in ("intervention", "fit", "dense")}
    if rows := parts["intervention"]:
        yield _interventions(rows)
    if rows := parts["fit"]:
        yield Table.of("fits of all heads, warm medians in seconds", FIT, [_fit(row) for row in rows])
    if rows := parts["dense"]:
        yield Table.of("dense collection in float32, seconds", DENSE, [_dense(row) for row in rows])
    yield from dict.fromkeys(f"{row['weights']}; {row['text']}" for row in record["rows"] if "weights" in row)
    for entry in record["left_out"]:
        yield f"left out: {entry['what']}: {entry['why']}"


FIT = ["of", "heads", "T", "total", "first use", "sweeps", "excess KL", "not converged"]
DENSE = ["point", "layers", "all layers", "ratio", "intervention", "ratio", "difference"]


def _interventions(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Stages below one another, a column for each intervention."""
    names = list(dict.fromkeys(name for row in rows for name in row["stages"]))
    cells = [["total", *(f"{row['seconds']:.3f}" + _against(row["seconds"], row["bar_seconds"]) for row in rows)]]
    for name in names:
        cells.append(
            [name, *(f"{row['stages'][name]['median']:.3f}" if name in row["stages"] else "–" for row in rows)]
        )
    cells.append(["first use", *(f"{row['first_use_seconds']:+.2f}" for row in rows)])
    cells.append(["heads frozen", *(str(row["heads"]) for row in rows)])
    cells.append(["peak GiB, " + rows[0]["peak_kind"], *(f"{row['peak_bytes'] / 2**30:.2f}" for row in rows)])
    head = ["", *(f"{_place(row)}, {100 * row['rate']:g}%" for row in rows)]
    return Table.of("interventions, warm medians in seconds", head, cells)


def _fit(row: Mapping[str, Any]) -> list[str]:
    excess = row["excess_kl"]
    return [
        Path(row["of"]).name,
        str(row["heads"]),
        str(row["length"]),
        f"{row['seconds']:.3f}" + _against(row["seconds"], row["bar_seconds"]),
        f"{row['first_use_seconds']:+.2f}",
        f"{row['sweeps']['mean']:.1f} (most {row['sweeps']['max']})",
        "–" if excess is None else f"{excess:.1e}" + _against(excess, row["bar_excess_kl"]),
        str(row["not_converged"]),
    ]


def _dense(row: Mapping[str, Any]) -> list[str]:
    layers = f"{row['layers']} of {row['of_layers']}"
    ratios = ["refused"] * 2 if row["refused"] else [f"{row[name]:.1f}x" for name in ("ratio", "intervention_ratio")]
    worst = max(row["difference"].values())
    return [
        _place(row),
        layers + (", extrapolated" if row["extrapolated"] else ""),
        f"{row['seconds']:.3f}",
        ratios[0],
        f"{row['intervention_seconds']:.3f}",
        ratios[1],
        f"{worst:.1e}" + _against(worst, row["bar_difference"]),
    ]


def _against(value: float, bar: float | None) -> str:
    return "" if bar is None else f" ({'within' if value <= bar else 'ABOVE'} {bar:g})"


def _place(row: Mapping[str, Any]) -> str:
    return f"{Path(row['model']).name} {row['point']['length']}x{row['point']['batch_size']}"
