"""Which kernels really ran in one iteration of an arm, and the tables that tell them."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from saf.bench.harness.measured import Record, shape, subject
from saf.bench.harness.timing import Call, wait_for
from saf.records.quantities import MISSING, number
from saf.records.table import Cell, Table

MOST = 250
"""Kernels of an iteration that are recorded, the longest ones; a compiled update has some 200."""
ATTENTION = (
    *("attention", "sdpa", "flash", "fmha", "toeplitz", "fused_forward", "key_block", "query_block", "prescale"),
    *("rows_kernel", "split_kernel"),
)
MARKS = {
    "cudnn": ("cudnn",),
    "flash": ("flash_fwd", "flash_attention"),
    "flex": ("flex_attention", "triton_tem"),
    "fa3": ("flashattnfwd",),
    "fa4": ("flash_attncute",),
    "split": ("split_kernel",),
}
"""Parts of kernel names that show that an attention kernel ran; those of "flash" are in the names of others too."""


def kernels_of(call: Call, device: torch.device, *, most: int | None = MOST) -> list[dict[str, Any]]:
    """Return name, calls and milliseconds of the kernels of one call (operators on a CPU), longest first.

    These are the `most` longest ones, or all of them.
    """
    cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        call()
        wait_for(device)
    found = []
    for event in profiler.key_averages():
        if cuda and not str(event.device_type).endswith("CUDA"):
            continue
        microseconds = event.self_device_time_total if cuda else event.self_cpu_time_total
        found.append({"name": event.key[:200], "calls": event.count, "ms": microseconds / 1e3})
    return sorted(found, key=lambda kernel: -kernel["ms"])[:most]


def attention_kernels(kernels: Iterable[dict[str, Any]]) -> list[str]:
    """Return the names among them that mix positions."""
    return [kernel["name"] for kernel in kernels if any(part in kernel["name"].lower() for part in ATTENTION)]


def kernel_seen(kernel: str, kernels: list[dict[str, Any]], device: torch.device) -> bool | None:
    """Return whether the pinned kernel is among those that ran; None when nothing was recorded or pinned."""
    if device.type != "cuda" or not kernels or kernel not in MARKS:
        return None
    names = [found["name"].lower() for found in kernels]
    if kernel == "flash":
        names = [name for name in names if not any(mark in name for mark in (*MARKS["cudnn"], *MARKS["fa4"]))]
    return any(mark in name for name in names for mark in MARKS[kernel])


_MOST_KERNELS = 14
"""Kernels in a table: those that take nearly all of the time."""
_LONGEST_NAME = 100
"""Letters of a kernel's name; templates go on for longer."""
_SEEN = {True: "yes", False: "no", None: MISSING}


def kernel_words(record: Record) -> str:
    """Return in a sentence or two whether kernels were recorded, and whether they are those of the arms' names."""
    if not record["kernels"]:
        why = "" if record["settings"].get("profile", True) else " (--no-profile)"
        return f"Kernels not recorded{why}."
    profiled = {(_where(entry), entry["arm"]) for entry in record["kernels"]}
    timed = [(_where(row), row[side]) for row in record["rows"] if not row["control"] for side in ("baseline", "arm")]
    lines = []
    if missing := [f"{where}: {arm}" for where, arm in dict.fromkeys(timed) if (where, arm) not in profiled]:
        lines.append(f"Kernels not recorded of {'; '.join(missing)}.")
    seen = [entry["kernel_seen"] for entry in record["kernels"] if entry["kernel_seen"] is not None]
    if seen and all(seen):
        lines.append("The profile of every arm that names an attention kernel shows it.")
    return " ".join(lines)


def attention_table(record: Record) -> Table:
    """Return one row for each attention kernel that an arm ran: its calls and time in one pass, longest first.

    "named kernel seen" says whether an arm's kernels show the one it asked for by name; a dash where it asked for none.
    """
    rows = [row for entry in record["kernels"] for row in _attention_rows(entry)]
    return Table.of("", ["where", "arm", "named kernel seen", "attention kernel", "calls", "ms"], rows).used()


def _attention_rows(entry: Record) -> list[list[str | Cell]]:
    """Return a row of cells for each attention kernel of an arm, or one row that says that none was found."""
    known = [_where(entry), entry["arm"], _SEEN[entry["kernel_seen"]]]
    ran = [kernel for kernel in entry["kernels"] if kernel["name"] in entry["attention"]]
    kernels = [
        [Cell(text=_short(kernel["name"]), code=True), number(kernel["calls"]), number(kernel["ms"], 3)]
        for kernel in ran
    ]
    return [[*known, *each] for each in kernels] or [[*known, "none found by name", MISSING, MISSING]]


def _short(name: str) -> str:
    plain = name.removeprefix("void ")
    return plain if len(plain) <= _LONGEST_NAME else f"{plain[: _LONGEST_NAME - 1]}…"


def _where(entry: Record) -> str:
    part = subject(entry) if "part" in entry else ""
    return ", ".join(filter(None, [part, shape(entry["point"]), entry["point"].get("precision")]))


def longest_kernels(record: Record) -> dict[str, Table]:
    """Return for each point a table of the longest kernels, the arms side by side."""
    points: dict[str, list[Record]] = {}
    for entry in record["kernels"]:
        points.setdefault(_where(entry), []).append(entry)
    return {point: _longest(entries) for point, entries in points.items()}


def _longest(entries: Sequence[Record]) -> Table:
    """Return the table of the longest kernels of any arm, a column an arm, in milliseconds of one pass."""
    times = [{kernel["name"]: kernel["ms"] for kernel in entry["kernels"]} for entry in entries]
    longest = {name: max(each.get(name, 0.0) for each in times) for each in times for name in each}
    names = sorted(longest, key=lambda name: -longest[name])[:_MOST_KERNELS]
    rows = [
        [Cell(text=name, code=True), *(f"{each[name]:.3g}" if name in each else MISSING for each in times)]
        for name in names
    ]
    return Table.of("Milliseconds in one pass", ["kernel", *(entry["arm"] for entry in entries)], rows)
