"""How a benchmark's speeds were measured, in words."""

from collections.abc import Sequence

from saf.bench.settings import REST_MS, SETTLE_MS
from saf.records.quantities import number
from saf.report.measured import Group, Record, baseline_name, kernel_name


def protocol(record: Record, groups: Sequence[Group]) -> str:
    """Return in one paragraph how a record's speeds were measured, and against what."""
    settings = record["settings"]
    baselines = " or ".join(dict.fromkeys(baseline_name(group.baseline) for group in groups))
    process = "every block in a process of its own" if settings.get("fresh") else "in the same process"
    count = number(settings["repeats"])
    block = f"each block the median of {'up to ' * (record['kind'] != 'update')}{count} calls"
    block = "each block one call" if settings["repeats"] == 1 else block
    return (
        f"Baseline: {_same(record['kind'])} with {baselines} in every head, "
        f"{compiled(record)}, {process}; alternating pairs (ABBA), {block}{_clocks(record)}. "
        f"Control: a second ordinary model against the first; measurements whose control is further than "
        f"{100 * settings['tolerance']:g}% from 1 are refused.{_floors(record)}"
    )


def _floors(record: Record) -> str:
    """Say what floors are reckoned from; nothing where no row has one."""
    peak = record["provenance"].get("peak")
    if not peak or all(row["arm_floor_ms"] is None for row in record["rows"]):
        return ""
    rates = f"{number(peak['flops'] / 1e12)} TFLOP/s in bfloat16 and {number(peak['bandwidth'] / 1e12)} TB/s"
    return f" Floors are roofline bounds at {rates} ({peak['source']})."


def _clocks(record: Record) -> str:
    """Say what comes before each block on account of the device's clocks; older records have nothing."""
    settings, cuda = record["settings"], record["provenance"]["driver"]
    told = (
        ("settle_ms", SETTLE_MS, "after up to {:g} ms of untimed ones"),
        ("rest_ms", REST_MS, "after {:g} ms of rest"),
    )
    for name, usual, words in told:
        asked = settings.get(name, 0.0)
        if milliseconds := (usual if cuda else 0.0) if asked is None else asked:
            return " " + words.format(milliseconds)
    return ""


def compiled(record: Record) -> str:
    """Say whether a benchmark compiled its models, by default where there is a GPU, or which arms of an operator's."""
    if any("ran" in row for row in record["rows"]):
        return _compiled_arms(record["rows"])
    asked = record["settings"]["compile"]
    return "compiled" if asked == "on" or (asked == "auto" and record["provenance"]["driver"]) else "not compiled"


def _compiled_arms(rows: Sequence[Record]) -> str:
    """Say which arms ran compiled, of rows that tell it one by one; those of older records do not."""
    some = [row for row in rows if row.get("ran") == "compiled"]
    names = ["layers with frozen heads where replayed as graphs"] * any(row["backend"] for row in some)
    names += dict.fromkeys(kernel_name(row["kernel"]) for row in some if row["backend"] is None)
    return f"not compiled but for {' and '.join(names)}" if names else "not compiled"


def _same(kind: str) -> str:
    return "the same heads or layer" if kind == "op" else "the same model"
