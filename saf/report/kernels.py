"""What the profiles of a benchmark say: which attention kernels really ran in each arm, and the longest kernels."""

from collections.abc import Sequence

from saf.records.quantities import MISSING, number
from saf.records.table import Cell, Table
from saf.report.measured import Record, shape, subject
from saf.report.page import text

_MOST_KERNELS = 14
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
    known = [_where(entry), entry["arm"], _SEEN[entry["kernel_seen"]]]
    ran = [kernel for kernel in entry["kernels"] if kernel["name"] in entry["attention"]]
    told = [
        [Cell(text=_short(kernel["name"]), code=True), number(kernel["calls"]), number(kernel["ms"], 3)]
        for kernel in ran
    ]
    return [[*known, *each] for each in told] or [[*known, "none found by name", MISSING, MISSING]]


def _short(name: str) -> str:
    plain = name.removeprefix("void ")
    return plain if len(plain) <= _LONGEST_NAME else f"{plain[: _LONGEST_NAME - 1]}…"


def _where(entry: Record) -> str:
    part = subject(entry) if "part" in entry else ""
    return ", ".join(filter(None, [part, shape(entry["point"]), entry["point"].get("precision")]))


def longest_kernels(record: Record) -> str:
    """Return as HTML, for each point, the longest kernels of every arm side by side."""
    points: dict[str, list[Record]] = {}
    for entry in record["kernels"]:
        points.setdefault(_where(entry), []).append(entry)
    return "".join(_longest(point, entries) for point, entries in points.items())


def _longest(point: str, entries: Sequence[Record]) -> str:
    times = [{kernel["name"]: kernel["ms"] for kernel in entry["kernels"]} for entry in entries]
    longest = {name: max(each.get(name, 0.0) for each in times) for each in times for name in each}
    names = sorted(longest, key=lambda name: -longest[name])[:_MOST_KERNELS]
    rows = [
        [Cell(text=name, code=True), *(f"{each[name]:.3g}" if name in each else MISSING for each in times)]
        for name in names
    ]
    shown = Table.of("Milliseconds in one pass", ["kernel", *(entry["arm"] for entry in entries)], rows)
    return f'<details class="numbers"><summary>{text(point)}: longest kernels</summary>{shown.html()}</details>'
