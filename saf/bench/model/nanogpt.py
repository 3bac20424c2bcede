"""The table of this project's update beside nanoGPT's: `tools/compare_nanogpt.py`."""

from collections.abc import Hashable, Sequence

from saf.bench.harness.kind import Kind
from saf.bench.harness.measured import Record, shape
from saf.bench.harness.recorder import unmeasured
from saf.bench.harness.speed_tables import REFUSED, compiled
from saf.records.quantities import MISSING, number
from saf.records.table import Cell, Part, Table

_HEAD = ("model", "point", "nanoGPT, ms", "ours, ms", "speedup", "middle half of pairs", "pairs", "control")
_HEAD += ("nanoGPT, tokens/s", "ours, tokens/s")


def _cells(row: Record) -> tuple[str, ...]:
    """Return the cells of one row of the comparison with nanoGPT."""
    refused = row["refused"]
    return (
        row["model"],
        shape(row["point"]),
        number(row["baseline_ms"]),
        number(row["arm_ms"]),
        REFUSED if refused else f"{row['ratio']:.3f}×",
        MISSING if refused else f"{row['q25']:.3f} to {row['q75']:.3f}",
        number(row["pairs"]),
        f"{row['control_ratio']:.4f}",
        f"{row['baseline_tokens_per_second']:,.0f}",
        f"{row['arm_tokens_per_second']:,.0f}",
    )


class NanoGPTKind(Kind):
    """Describe what `tools/compare_nanogpt.py` writes."""

    name = "nanogpt"
    title = "Updates: beside nanoGPT"

    def tables(self, record: Record, *, brief: bool = False) -> list[Part]:
        """Return how it was measured, and a row a point: times, ratio and its spread, control, tokens/s."""
        table = _table(record)
        return [self.conditions(record), *([table] if table.rows else []), *unmeasured(record)]

    def finding(self, record: Record) -> str:
        """Return how fast our updates are where that was accepted."""
        ratios = [f"{row['ratio']:.3f}×" for row in record["rows"] if not (row["control"] or row["refused"])]
        return f"Updates {' and '.join(ratios)} as fast as nanoGPT's" if ratios else self.title

    def conditions(self, record: Record) -> str:
        """Return what was compared, and how."""
        tolerance, model = 100 * record["settings"]["tolerance"], str(record["nanogpt_model_sha256"])[:12]
        return (
            f"Baseline: nanoGPT's own update, its model.py of sha256 {model}; ours: ordinary attention in every head. "
            f"Both {compiled(record)}, in the same process; alternating pairs (ABBA). Control: a second nanoGPT "
            f"against the first; measurements whose control is further than {tolerance:g}% from 1 are refused."
        )

    def measured(self, row: Record) -> Hashable | None:
        """Return model and point; None for a control."""
        return None if row["control"] else (row["model"], tuple(row["point"].items()))

    def overview(self, records: Sequence[tuple[Cell, Record]]) -> list[Part]:
        """Return a row a point."""
        return [Table.stacked("", [(cell, _table(record)) for cell, record in records])]


def _table(record: Record) -> Table:
    return Table.of("", _HEAD, [_cells(row) for row in record["rows"] if not row["control"]])
