"""Tables of benchmarks: speed and memory of each arm beside its baseline, its bound and the paper's number."""

from collections.abc import Iterable, Sequence
from typing import Any

from saf.records import paper
from saf.records.paper import Quoted
from saf.records.quantities import MISSING, number, signed
from saf.records.table import Table
from saf.report.measured import Group, Measured, Record, kernel_name, shape

REFUSED = "refused"
UNFINISHED = "Not finished: what was measured before the benchmark was stopped."


def ways(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """Return the groups by what they measure: those of one key share a table and an axis."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(group.way, []).append(group)
    return found


def speed_table(groups: Sequence[Group]) -> Table:
    """Return one row an arm: times with the TFLOP/s reached and floors, ratio and its spread, control, bound, paper."""
    head = ["point", "baseline", "arm", "heads", "baseline, ms (TFLOP/s)", "baseline floor, ms"]
    head += ["arm, ms (TFLOP/s)", "arm floor, ms", "speedup", "middle half of pairs", "pairs", "share of time"]
    head += ["control", "free bound", "of the bound", "paper"]
    several = len({group.baseline for group in groups}) > 1
    rows = [_speed_cells(group, arm, baseline=several) for group in groups for arm in group.arms]
    return Table.of("", head, rows).used()


def _speed_cells(group: Group, arm: Measured, *, baseline: bool) -> list[str]:
    row, told = arm.row, arm.ratio is not None
    share = arm.share_of_bound
    return [
        shape(group.point),
        kernel_name(group.baseline.removeprefix("ordinary ")) if baseline else MISSING,
        arm.name,
        number(row["heads"]) if row.get("heads") else MISSING,
        _time(row, "baseline"),
        number(row["baseline_floor_ms"]),
        _time(row, "arm"),
        number(row["arm_floor_ms"]),
        f"{arm.ratio:.3f}×" if arm.ratio is not None else REFUSED,
        _half(row) if told else MISSING,
        number(row["pairs"]),
        f"{1 / arm.ratio:.3f}" if arm.ratio is not None and row.get("part") == "frozen" else MISSING,
        MISSING if group.control is None else f"{group.control['ratio']:.4f}",
        MISSING if arm.bound is None else f"{arm.bound:.3f}×",
        MISSING if share is None else f"{100 * share:.0f}%",
        _quoted(arm.paper),
    ]


def _time(row: Record, side: str) -> str:
    return f"{number(row[f'{side}_ms'])} ({number(row[f'{side}_tflops'], 3)})"


def bound_notes(groups: Iterable[Group]) -> list[str]:
    """Return one line for each arm that was measured faster than its free bound, which says how far pairs scatter."""
    lines = []
    for group in groups:
        for arm in group.arms:
            if arm.free is None or not arm.beats_bound:
                continue
            meet = arm.row["q25"] <= arm.free["q75"]
            why = "pairs scatter more than the two differ" if meet else "something else differs between the two"
            lines.append(
                f"{arm.name}, {shape(group.point)} ({group.way}): measured faster than its free bound, so no share of "
                f"it is told; {why} (middle halves {_half(arm.row)} and {_half(arm.free)})."
            )
    return lines


def _half(row: Record) -> str:
    return f"{row['q25']:.3f} to {row['q75']:.3f}"


def memory_table(record: Record) -> Table:
    """Return one row an arm: peak memory in a process of its own, and its change against the ordinary one."""
    head = ["point", "arm", "peak memory", "against ordinary", "paper"]
    rows = []
    for entry in record["memory"]:
        change = entry["change_percent"]
        rows.append(
            [
                shape(entry["point"]),
                memory_arm(record, entry),
                f"{entry['bytes'] / 2**30:.2f} GiB",
                MISSING if change is None or entry["backend"] is None else signed(change),
                _quoted(memory_quoted(record, entry)),
            ]
        )
    return Table.of("", head, rows).used()


def memory_arm(record: Record, entry: Record) -> str:
    """Return the name of an arm of the memory table, with its kernel where the record has several."""
    kernels = {each["arm"].split()[-1] for each in record["memory"]}
    kernel = kernel_name(entry["arm"].split()[-1])
    if entry["backend"] is None:
        return f"ordinary, {kernel}"
    return f"{100 * entry['rate']:g}% frozen, {entry['backend']}" + f", live heads on {kernel}" * (len(kernels) > 1)


def memory_quoted(record: Record, entry: Record) -> Quoted | None:
    """Return the paper's peak memory at the same shape; it has some for updates alone."""
    if record["kind"] != "update":
        return None
    point = (record["settings"]["model"], entry["point"]["length"], entry["point"]["batch_size"])
    return paper.update_memory(point, entry["rate"])


def caveats(record: Record, groups: Sequence[Group]) -> list[str]:
    """Return what a reader must know: an unfinished file, refusals, wrong kernels, what was left out."""
    lines = []
    if not record["finished"]:
        lines.append(UNFINISHED)
    for group in groups:
        if group.reason:
            lines.append(f"Refused: {group.way}, {shape(group.point)}: {group.reason}.")
    for seen in record["kernels"]:
        if seen["kernel_seen"] is False:
            lines.append(f"{shape(seen['point'])}: {seen['arm']} did not run the attention kernel it was told to.")
    return lines + left_out(record)


def left_out(record: Record) -> list[str]:
    """Return one line for each reason why something was not measured."""
    reasons: dict[str, list[str]] = {}
    for entry in record.get("left_out") or []:
        reasons.setdefault(entry["why"].rstrip("."), []).append(entry["what"])
    return [f"Left out: {'; '.join(what)}: {why}." for why, what in reasons.items()]


def quoted_in(record: Record, groups: Sequence[Group]) -> list[Quoted | None]:
    """Return every number of the paper in the record's tables."""
    arms: list[Any] = [arm.paper for group in groups for arm in group.arms]
    return arms + [memory_quoted(record, entry) for entry in record["memory"]]


def _quoted(quoted: Quoted | None) -> str:
    return MISSING if quoted is None else quoted.text
