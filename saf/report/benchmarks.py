"""Tables of benchmark records, as `saf bench` and the scripts in benchmarks/ print them.

A speed record compares arms with a baseline at points: context x sequences (x micro-batches of an update). A row has a
role: "control" is a second baseline, "free" is the arm as if mixing in its frozen heads cost nothing.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from saf.records.table import MISSING, Part, Table, byte_size, number, signed

Record = Mapping[str, Any]
SPEEDS = ("update", "finetune", "prefill", "attention", "decode", "op")
"""Kinds of records whose rows compare arms with a baseline."""
REFUSED = "refused"
NEAR_ONE = 0.005
"""A bound this close to 1 leaves nothing to take a share of."""
# The committed results have records of earlier versions, whose tables are rendered from them, too.
_WORDS = {"update": "", "both": "forward and backward", "call": "called", "graph": "replayed as a CUDA graph"}
_KERNELS = {
    "cudnn": "cuDNN",
    "auto": "PyTorch's choice of kernel",
    "flash": "flash attention",
    "flex": "flex attention",
}
_ROLES = {"keeping": "ordinary, every activation kept", "apart": "ordinary, each process by itself"}
"""Arms of earlier records."""


def tables(record: Record) -> list[Part]:
    """Return what a speed record measured, why comparisons were refused, and what any record leaves out."""
    parts: list[Part] = []
    if record["kind"] == "finetune":
        title = f"{record['settings']['task']}: means over the orders of examples"
        parts.append(_table(title, [cells for graphed in (False, True) for _, cells in means(record, graphed=graphed)]))
    elif record["kind"] in SPEEDS:
        titled: dict[str, list[tuple[Record, dict[str, str]]]] = {}
        for row, cells in speed_cells(record):
            titled.setdefault(table_title(row), []).append((row, cells))
        parts += [_speed_table(title, lines) for title, lines in titled.items()]
    if record["memory"]:
        parts.append(_table("peak memory", [memory_cells(record, entry) for entry in record["memory"]]))
    if record["kind"] in SPEEDS:
        parts += _refusals(record)
    return [*parts, *_missing(record)]


def _speed_table(title: str, lines: Sequence[tuple[Record, Mapping[str, str]]]) -> Table:
    """Return a table that 80 columns hold: its note has the numbers of pairs and the controls."""
    shown = []
    for _, cells in lines:
        line = {
            name: text for name, text in cells.items() if name in ("point", "baseline", "arm") or "ms" in name.split()
        }
        spread, cache = cells["middle half of pairs"], cells["cache"]
        line["speedup (middle half)"] = cells["speedup"] if spread == MISSING else f"{cells['speedup']} ({spread})"
        line["free bound"] = cells["free bound"]
        line["cache"] = MISSING if cache == MISSING else f"{cache} of {cells['baseline cache']}"
        shown.append(line)
    pairs = _range([f"{count}" for count in sorted(row["pairs"] for row, _ in lines)])
    controls = sorted({row["control_ratio"] for row, _ in lines} - {None})
    control = _range([f"{each:.4f}" for each in controls])
    note = f"speedup: median of {pairs} pairs, baseline / arm; control, a second ordinary arm: {control}"
    if any(cells["free bound"] != MISSING for cells in shown):
        note += "; free bound: if mixing in frozen heads cost nothing"
    return _table(title, shown, notes=[note])


def _range(texts: Sequence[str]) -> str:
    """Name the first and the last of some texts in order: "4 to 8", "8" for equal ones, a dash for none."""
    return " to ".join(dict.fromkeys([*texts[:1], *texts[-1:]])) or MISSING


def _table(title: str, rows: Sequence[Mapping[str, str]], notes: Sequence[str] = ()) -> Table:
    """Return a table without empty columns; a baseline that all rows share is named in the title."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    baselines = {row.get("baseline") for row in rows}
    if len(baselines) == 1 and (baseline := baselines.pop()):
        title, columns = f"{title}, against {baseline}", [name for name in columns if name != "baseline"]
    return Table.of(title, columns, [[row.get(name) for name in columns] for row in rows], notes).used()


def _groups(record: Record) -> list[list[Record]]:
    # Rows of one group share their control and their free bound.
    groups: dict[Any, list[Record]] = {}
    for row in record["rows"]:
        groups.setdefault((_subject(row), *row["point"].items(), row["variant"], row["baseline"]), []).append(row)
    return list(groups.values())


def _control(group: Sequence[Record]) -> Record | None:
    return next((row for row in group if row["role"] == "control"), None)


def speed_cells(record: Record) -> Iterator[tuple[Record, dict[str, str]]]:
    """Yield each arm's row and the cells of its line in a table."""
    for group in _groups(record):
        free = {row["rate"]: row for row in group if row["role"] == "free" and not row["refused"]}
        for row in group:
            if row["role"] not in ("control", "free"):
                # A pruned head has no values and no output columns: it may be faster than a free one.
                bound = free.get(row["rate"]) if row["backend"] and row["role"] != "pruned" else None
                yield row, _cells(row, _control(group), bound)


def _cells(row: Record, control: Record | None, free: Record | None) -> dict[str, str]:
    arm = _edited_name(row) if row["backend"] else _ROLES.get(row["role"], f"ordinary, {_kernel_name(row['kernel'])}")
    ratio, bound, share = None if row["refused"] else row["ratio"], free["ratio"] if free else None, None
    if ratio is not None and ratio >= 1 and bound is not None and bound >= max(1 + NEAR_ONE, ratio):
        share = (1 - 1 / ratio) / (1 - 1 / bound)  # saved time over the time that free heads save
    times = {}
    for side in ("baseline", "arm"):  # earlier records count operations, too
        rate = row.get(f"{side}_tflops")
        name = f"{side}, ms" + (" (TFLOP/s)" if rate else "")
        times[name] = number(row[f"{side}_ms"]) + (f" ({number(rate, 3)})" if rate else "")
    return {
        "point": shape(row["point"]),
        "baseline": _baseline(row),
        "arm": arm,
        **times,
        "speedup": REFUSED if ratio is None else f"{ratio:.3f}×",
        "middle half of pairs": MISSING if ratio is None else f"{row['q25']:.3f} to {row['q75']:.3f}",
        "pairs": number(row["pairs"]),
        "share of time": f"{1 / ratio:.3f}" if ratio is not None and row.get("part") == "frozen" else MISSING,
        "control": MISSING if control is None else f"{control['ratio']:.4f}",
        "free bound": MISSING if bound is None else f"{bound:.3f}×",
        "of the bound": MISSING if share is None else f"{100 * share:.0f}%",
        "baseline cache": byte_size(row.get("baseline_cache_bytes")),
        "cache": byte_size(row.get("cache_bytes")),
    }


def memory_cells(record: Record, entry: Record) -> dict[str, str]:
    """Return the cells of one arm's peak memory in a process of its own, and its change from ordinary attention."""
    kernel, change = entry["arm"].split()[-1], entry["change_percent"]
    several = len({each["arm"].split()[-1] for each in record["memory"]}) > 1
    name = f"ordinary, {_kernel_name(kernel)}"
    if entry["backend"]:
        name = _edited_name(entry) + (f", live heads on {_kernel_name(kernel)}" if several else "")
    return {
        "point": shape(entry["point"]),
        "arm": name,
        "peak memory": f"{entry['bytes'] / 2**30:.2f} GiB",
        "against ordinary": MISSING if change is None or entry["backend"] is None else signed(change),
    }


def _refusals(record: Record) -> Iterator[str]:
    """Yield a line for each group of comparisons that is refused, with its reason."""
    for group in _groups(record):
        control, reason = _control(group), ""
        if control is None and any(row["refused"] for row in group):
            reason = "the control could not be measured"
        elif control is not None and control["refused"]:
            equal = "two ordinary models" if control.get("model") else "two times the same ordinary heads"
            reason = f"{equal} differ by {100 * abs(control['ratio'] - 1):.2f}%"
        if reason:
            at = f"{shape(group[0]['point'])} against {_baseline(group[0])}"
            yield f"Refused: {table_title(group[0])}, {at}: {reason}."


def _missing(record: Record) -> Iterator[str]:
    """Yield a line for each gap of a record: an end before its time, measurements that were left out."""
    if record.get("finished") is False:
        yield "Not finished: what was measured before the benchmark was stopped."
    reasons: dict[str, list[str]] = {}
    for entry in record.get("left_out") or ():
        reasons.setdefault(entry["why"].rstrip("."), []).append(entry["what"])
    for why, what in reasons.items():
        yield f"Left out: {'; '.join(what)}: {why}."


def _subject(row: Record) -> str:
    if row.get("alone"):
        return "1 head alone" if row["alone"] == 1 else f"{row['alone']} heads alone"
    return f"whole {row['part']}" if "part" in row else row["model"]


def table_title(row: Record, unusual: str = "") -> str:
    """Return the subject of a row and how it ran: rows that share them share a table."""
    words = [_WORDS.get(word, word.replace("-", " ")) for word in row["variant"].split()]
    return ", ".join(filter(None, [_subject(row), unusual, *words, row["point"].get("precision", "")]))


def shape(point: Record) -> str:
    """Return a point as the command line writes it: context x sequences (x micro-batches of an update)."""
    return "x".join(str(point[key]) for key in ("length", "batch_size", "accumulation") if key in point)


def _edited_name(row: Record) -> str:
    share = f"{100 * row['rate']:.3g}%"
    return f"{share} pruned" if row["backend"] == "pruned" else f"{share} frozen, {row['backend']}"


def _baseline(row: Record) -> str:
    return _kernel_name(row["baseline"].removeprefix("ordinary "))


def _kernel_name(kernel: str) -> str:
    return _KERNELS.get(kernel, kernel)


def means(record: Record, *, graphed: bool) -> list[tuple[Record, dict[str, str]]]:
    """Return the mean ratio of each arm over the orders of the same examples, with its standard error.

    Orders whose control refuses them are left out. Where kernels take less time than the update, the host bounds it.
    """
    kernels, repeats, lines = {}, record["settings"]["repeats"], []
    # Profiled is the last launch mode alone, graphs where both are timed; without a driver it was a CPU.
    if record["provenance"]["driver"] and (graphed or record["settings"].get("graphs") != "both"):
        kernels = {entry["arm"]: entry["kernels"] for entry in record["kernels"]}
    accepted = []
    for row in record["rows"]:
        if row["variant"].endswith(" graph") == graphed and row["backend"] and not row["refused"]:
            accepted.append(row)
    for arm in dict.fromkeys(row["arm"] for row in accepted):
        rows = [row for row in accepted if row["arm"] == arm]
        ratios = [row["ratio"] for row in rows]
        error = f" ± {statistics.stdev(ratios) / len(ratios) ** 0.5:.3f}" if len(ratios) > 1 else ""
        seen = [each for name in (rows[0]["baseline"], arm) if (each := kernels.get(name))]
        cells = {
            "arm": _edited_name(rows[0]),
            "speedup, mean ± SE": f"{statistics.fmean(ratios):.3f}×{error}",
            "orders": str(len(ratios)),
            "ordinary, ms": number(statistics.fmean(row["baseline_ms"] for row in rows)),
            "arm, ms": number(statistics.fmean(row["arm_ms"] for row in rows)),
            "kernels an update": " / ".join(f"{sum(one['calls'] for one in each) / repeats:,.0f}" for each in seen),
            "ms on the device": " / ".join(f"{sum(one['ms'] for one in each) / repeats:.1f}" for each in seen),
        }
        lines.append((rows[0], {name: text or MISSING for name, text in cells.items()}))
    return lines
