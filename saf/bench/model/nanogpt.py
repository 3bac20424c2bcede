"""The table of this project's update beside nanoGPT's: `tools/compare_nanogpt.py`."""

from saf.bench.harness.kind import Kind
from saf.bench.harness.measured import Record, shape
from saf.bench.harness.recorder import unmeasured
from saf.bench.harness.speed_tables import REFUSED, compiled
from saf.records.quantities import MISSING, number
from saf.records.table import Part, Table

_HEAD = ("model", "point", "nanoGPT, ms", "ours, ms", "speedup", "middle half of pairs", "pairs", "control")
_HEAD += ("nanoGPT, tokens/s", "ours, tokens/s")


def nanogpt_tables(record: Record) -> list[Part]:
    """Return how it was measured, and one row a point: times, within-pair ratio and its spread, control, tokens/s."""
    tolerance, model = 100 * record["settings"]["tolerance"], str(record["nanogpt_model_sha256"])[:12]
    protocol = (
        f"Baseline: nanoGPT's own update, its `model.py` of sha256 {model}; ours: ordinary attention in every head. "
        f"Both {compiled(record)}, in the same process; alternating pairs (ABBA). Control: a second nanoGPT against "
        f"the first; measurements whose control is further than {tolerance:g}% from 1 are refused."
    )
    rows = [_cells(row) for row in record["rows"] if not row["control"]]
    return [protocol, Table.of("", _HEAD, rows)] if rows else [protocol]


def _cells(row: Record) -> tuple[str, ...]:
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
        """Return how it was measured, and a row a point."""
        return [*nanogpt_tables(record), *unmeasured(record)]
