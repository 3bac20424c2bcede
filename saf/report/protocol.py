"""How a benchmark's speeds were measured, in words."""

from collections.abc import Sequence

from saf.bench.settings import SETTLE_MS
from saf.report.measured import Group, Record, baseline_name
from saf.report.words import number


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
        f"{compiled(record)}, {process}; alternating pairs (ABBA), {block}{_settled(record)}. "
        f"Control: a second ordinary model against the first; measurements whose control is further than "
        f"{100 * settings['tolerance']:g}% from 1 are refused."
    )


def _settled(record: Record) -> str:
    """Say for how long untimed calls come before each block; older records have none."""
    asked = record["settings"].get("settle_ms", 0.0)
    usual = SETTLE_MS if record["environment"]["driver"] else 0.0
    settle = usual if asked is None else asked
    return f" after up to {settle:g} ms of untimed ones" if settle else ""


def compiled(record: Record) -> str:
    """Say whether a benchmark compiled its models: by default where there is a GPU."""
    asked = record["settings"]["compile"]
    return "compiled" if asked == "on" or (asked == "auto" and record["environment"]["driver"]) else "not compiled"


def _same(kind: str) -> str:
    return "the same heads or layer" if kind == "op" else "the same model"
