"""Tables and words of benchmarks that compare arms: speed, memory, how it was measured, what to know."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from saf.bench.harness.measured import (
    KEEPING,
    Group,
    Measured,
    Record,
    baseline_name,
    edited_name,
    kernel_name,
    shape,
)
from saf.bench.harness.recorder import UNFINISHED, left_out
from saf.bench.harness.timing import REST_MS, SETTLE_MS
from saf.records.paper import Quoted
from saf.records.quantities import MISSING, gibibytes, number, signed
from saf.records.table import Cell, Table

REFUSED = "refused"
WIDE = ("baseline floor, ms", "arm floor, ms", "middle half of pairs", "of the bound", "paper")
"""Columns of the table of speeds that a terminal leaves out: with them its lines would break."""
DETAILS = ("heads", "baseline floor, ms", "arm floor, ms")
"""Columns that the table of several files leaves to the page of each."""


def ways(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """Return the groups by what they measure: those of one key share a table and an axis."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(group.way, []).append(group)
    return found


def speed_table(groups: Sequence[Group], sources: Mapping[str, Cell] | None = None) -> Table:
    """Return one row an arm: times with the TFLOP/s reached and floors, ratio and its spread, control, bound, paper.

    With the cells that name their files, by name, a last column says in which file each row is.
    """
    head = ["point", "baseline", "arm", "heads", "baseline, ms (TFLOP/s)", "baseline floor, ms"]
    head += ["arm, ms (TFLOP/s)", "arm floor, ms", "speedup", "middle half of pairs", "pairs", "share of time"]
    head += ["control", "free bound", "of the bound", "baseline cache", "cache", "paper"]
    several = len({group.baseline for group in groups}) > 1
    head += ["in"] if sources else []
    rows = [
        [*_speed_cells(group, arm, baseline=several), *([sources[group.file]] if sources else [])]
        for group in groups
        for arm in group.arms
    ]
    return Table.of("", head, rows).used()


def _speed_cells(group: Group, arm: Measured, *, baseline: bool) -> list[str]:
    """Return the cells of one arm's row; the baseline is named in the first row of its group alone."""
    row, has_ratio = arm.row, arm.ratio is not None
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
        _half(row) if has_ratio else MISSING,
        number(row["pairs"]),
        f"{1 / arm.ratio:.3f}" if arm.ratio is not None and row.get("part") == "frozen" else MISSING,
        MISSING if group.control is None else f"{group.control['ratio']:.4f}",
        MISSING if arm.bound is None else f"{arm.bound:.3f}×",
        MISSING if share is None else f"{100 * share:.0f}%",
        gibibytes(row.get("baseline_cache_bytes")),
        gibibytes(row.get("cache_bytes")),
        _quoted(arm.paper),
    ]


def row_line(row: Record) -> str:
    """Return one row, an arm's or a control's, as a line for people; a refused one says so behind its ratio."""
    verdict = f", {REFUSED}" if row["refused"] else ""
    times = f"{row['arm']} {number(row['arm_ms'])} ms, {row['baseline']} {number(row['baseline_ms'])} ms"
    return f"{row['variant']}: {times}, {row['ratio']:.3f}× ({_half(row)}, {number(row['pairs'])} pairs){verdict}"


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


def memory_table(record: Record, model: str, quoted: Callable[[Record, Record], Quoted | None]) -> Table:
    """Return a row for each arm of a model: its peak memory in a process of its own, and the change from ordinary."""
    head = ["model", "point", "arm", "peak memory", "against ordinary", "paper"]
    rows = []
    for entry in record["memory"]:
        change = entry["change_percent"]
        rows.append(
            [
                model,
                shape(entry["point"]),
                memory_arm(record, entry),
                f"{entry['bytes'] / 2**30:.2f} GiB",
                MISSING if change is None or entry["backend"] is None else signed(change),
                _quoted(quoted(record, entry)),
            ]
        )
    return Table.of("", head, rows).used()


def memory_arm(record: Record, entry: Record) -> str:
    """Return the name of an arm of the memory table, with its kernel where the record has several."""
    kernels = {each["arm"].split()[-1] for each in record["memory"]}
    kernel = kernel_name(entry["arm"].split()[-1])
    if entry["backend"] is None:
        return KEEPING if " keeping " in entry["arm"] else f"ordinary, {kernel}"
    return edited_name(entry) + f", live heads on {kernel}" * (len(kernels) > 1)


def caveats(record: Record, groups: Sequence[Group]) -> list[str]:
    """Return what a reader must know: an unfinished file, refusals, wrong kernels, what was left out."""
    unfinished = [] if record["finished"] else [UNFINISHED]
    return [*unfinished, *refusals(groups), *wrong_kernels(record), *left_out(record)]


def refusals(groups: Iterable[Group]) -> list[str]:
    """Return one line for each group whose measurements are refused."""
    refused = [group for group in groups if group.reason]
    return [f"Refused: {group.way}, {shape(group.point)}: {group.reason}." for group in refused]


def wrong_kernels(record: Record) -> list[str]:
    """Return one line for each arm whose profile shows another attention kernel than the one it names."""
    wrong = [seen for seen in record["kernels"] if seen["kernel_seen"] is False]
    return [f"{shape(seen['point'])}: {seen['arm']} did not run the attention kernel it was told to." for seen in wrong]


def memory_words(record: Record) -> str:
    """Return a sentence on what peak memory is in this record."""
    kind = {"allocated": "what PyTorch's allocator handed out", "resident": "the process's resident set"}
    measured = kind[record["memory"][0]["kind"]]
    return f"Peak memory since the warm-up, one arm a process ({measured}). Baseline: the ordinary model."


def _quoted(quoted: Quoted | None) -> str:
    return MISSING if quoted is None else quoted.text


def protocol(record: Record, groups: Sequence[Group], *, same: str, up_to_repeats: bool) -> str:
    """Return in one paragraph how a record's speeds were measured, and against what.

    `same` is what the baseline is but for its heads; `up_to_repeats` says that a timed block may have fewer calls, of
    which it takes the median, and not the mean of all.
    """
    settings = record["settings"]
    baselines = " or ".join(dict.fromkeys(baseline_name(group.baseline) for group in groups))
    process = "every timed block in a process of its own" if settings.get("fresh") else "in the same process"
    if settings.get("parallel", "none") != "none":
        count = record["provenance"]["processes"]
        process = f"in {count} process{'es' * (count > 1)} ({settings['parallel']}), the slowest one's time"
    count = number(settings["repeats"])
    block = f"each timed block the {'median of up to' if up_to_repeats else 'mean of'} {count} calls"
    block = "each timed block one call" if settings["repeats"] == 1 else block
    return (
        f"Baseline: {same} with {baselines} in every head, "
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
    """Say what comes before each timed block on account of the device's clocks; older records have nothing."""
    settings, cuda = record["settings"], record["provenance"]["driver"]
    pauses = (
        ("settle_ms", SETTLE_MS, "after up to {:g} ms of untimed ones"),
        ("rest_ms", REST_MS, "after {:g} ms of rest"),
    )
    for name, usual, words in pauses:
        asked = settings.get(name, 0.0)
        if milliseconds := (usual if cuda else 0.0) if asked is None else asked:
            return " " + words.format(milliseconds)
    return ""


def compiled(record: Record) -> str:
    """Say whether a benchmark compiled its models, by default where there is a GPU, or which arms of an operator's."""
    if any("ran" in row for row in record["rows"]):
        return _compiled_arms(record["rows"])
    asked, again = record["settings"]["compile"], ""
    if record["settings"].get("activation_checkpointing"):
        again = ", layers computed again in the backward pass"
    if asked == "layers":
        return f"compiled by decoder layers{again}"
    return ("compiled" if is_compiled(asked, record["provenance"]["driver"]) else "not compiled") + again


def is_compiled(asked: str, driver: str | None) -> bool:
    """Return whether a setting of `compile` has whole models compiled, on the device of a driver, None for a CPU."""
    return asked == "on" or (asked == "auto" and bool(driver))


def _compiled_arms(rows: Sequence[Record]) -> str:
    """Say which arms ran compiled, of rows that tell it one by one; those of older records do not."""
    some = [row for row in rows if row.get("ran") == "compiled"]
    names = ["layers with frozen heads where replayed as graphs"] * any(row["backend"] for row in some)
    names += dict.fromkeys(kernel_name(row["kernel"]) for row in some if row["backend"] is None)
    return f"not compiled but for {' and '.join(names)}" if names else "not compiled"
