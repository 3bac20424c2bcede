"""Tables of comparisons: a pair with its verdict, and all arms beside each other."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saf.errors import SafError
from saf.evaluate.answers import choices_table
from saf.evaluate.compare import ACCURACY, PERPLEXITY, compare_runs, speed_caveat, was_busy
from saf.records.run import RecordedRun, heads_in_words
from saf.records.table import Table, byte_size, change_percent, number, seconds, signed

Record = Mapping[str, Any]
ORDINARY, FROZEN = _ARMS = ("ORDINARY", "FROZEN")
"""Headings of the two columns of a pair, as `saf compare` names its arguments."""
_COLUMNS = ("arm", "heads frozen", "loss, nats", "perplexity", "change, 95% interval", "median update", "peak memory")
_COLUMNS += ("freezing took", "whole run", "whole run, warm")
_COLOURS = {
    "ordinary": ("ordinary", "ordinary-2"),
    "frozen": ("frozen", "frozen-2", "frozen-3"),
    "pruned": ("pruned", "pruned-2"),
}
"""CSS colours of the kinds of arms, in the order in which they are taken."""
_TIMES = (
    "Update times are of separate processes and carry the machine's drift; a whole run counts the part before the "
    "checkpoint that an arm continues from, warm without loading and compilation."
)
_PAIRED = (
    "Gained and lost are questions that FROZEN or ORDINARY alone answers rightly, or examples of recall with more or "
    "fewer; p is McNemar's, exact, Holm's for all tasks. Intervals and p are of one pair, not over seeds."
)
_CLOCKS = ("everything", "warm")


# --- a pair


def verdict(record: Record) -> str:
    """Say in a line or two what freezing cost, and how speed and memory changed, for a record of any comparison."""
    if record["kind"] == PERPLEXITY:
        return "\n".join(filter(None, [f"Cost: perplexity {perplexity_change(record)}.", _saving(record)]))
    name, worst = min(record["tasks"].items(), key=lambda task: task[1]["difference"])
    if len(record["tasks"]) == 1:
        return f"Cost: accuracy {_points(worst)} points."
    mean = _mean_change(record)
    return (
        f"Cost: accuracy {mean} on average over {len(record['tasks'])} tasks, {_points(worst)} at {name}, the lowest."
    )


def perplexity_change(record: Record) -> str:
    """Show the change of perplexity with its 95% interval."""
    return _interval(record, "95% interval ")


def _saving(record: Record) -> str:
    parts = []
    if ratio := record.get("update_time_ratio"):
        within = ", within the spread of both arms" if speed_caveat(record) else ""
        busy = "update times unclear: the machine was busy"
        parts.append(busy if was_busy(record) else f"updates {ratio:.3f}× as fast{within}")
    memory = change_percent(record.get("peak_memory_ordinary"), record.get("peak_memory_frozen"))
    parts += [f"peak memory {signed(memory)}"] * (memory is not None)
    return f"Speed: {', '.join(parts)}." if parts else ""


def _mean_change(record: Record) -> str:
    return f"{signed(100 * record['mean_difference'], 2, '')} points"


def _points(change: Record) -> str:
    """Show a change of accuracy in points, with its interval."""
    text, low, high = (signed(100 * share, 2, "") for share in (change["difference"], *change["ci95"]))
    return f"{text} ({low} to {high})"


def pair_tables(record: Record, ordinary: RecordedRun | None = None, frozen: RecordedRun | None = None) -> list[Table]:
    """Tabulate the record of any comparison of two; runs of text add what they alone know."""
    if record["kind"] == ACCURACY:
        return _accuracy_tables(record)
    if ordinary is None or frozen is None:
        windows = f"{record['windows']:,} paired windows of {record['length']:,} tokens, in {record['precision']}."
        rows = [["perplexity", f"{record['ppl_ordinary']:.4f}", f"{record['ppl_frozen']:.4f}", _interval(record)]]
        return [Table.of("", ("", *_ARMS, "change"), rows, [*_where(record), windows, *model_notes(record)])]
    table = arms_table((ordinary, frozen), _ARMS, [ArmComparison(FROZEN, ordinary, frozen, dict(record))])
    rows = zip(table.columns[1:], *(row[1:] for row in table.rows), strict=True)
    return [Table.of("", ("", *_ARMS), [*rows], [*_where(record), *table.notes])]


def _accuracy_tables(record: Record) -> list[Table]:
    """Tabulate changes of accuracy, a row a task or test of recall, and how often each choice is taken."""
    rows, tasks = [], record["tasks"]
    for name, task in tasks.items():
        shares = [f"{100 * share:.2f}" for share in task["accuracy"]]
        p_values = [f"{task[key]:.3g}" if key in task else None for key in ("p_value", "p_holm")]
        gained = f"{task['gained']:,} / {task['lost']:,}"
        rows.append([name, task["questions"], *shares, _points(task), gained, *p_values])
    columns = ("", "questions", f"{ORDINARY}, %", f"{FROZEN}, %", "change, points (95%)", "gained / lost", "p", "Holm")
    notes = [*_where(record), f"Mean change {_mean_change(record)}.", _PAIRED, *model_notes(record)]
    table = Table.of("Accuracy", columns, rows, notes).used()
    if not all("taken" in task for task in tasks.values()):
        return [table]
    taken = {arm: {name: task["taken"][at] for name, task in tasks.items()} for at, arm in enumerate(_ARMS)}
    return [table, choices_table(tasks, taken)]


def _where(record: Record) -> list[str]:
    heads = [heads_in_words(each) if any(each.values()) else "no" for each in record["heads_by_kind"]]
    places = (record["ordinary"], record["frozen"])
    return ["; ".join(f"{arm}: {place}, {count} heads" for arm, place, count in zip(_ARMS, places, heads, strict=True))]


def model_notes(record: Record) -> list[str]:
    """Say what a reader must know of the two models of a comparison; nothing where all is well."""
    lines = [f"Differs in more than the freezing: {line}." for line in record["differences"]]
    if any(record["heads_by_kind"][0].values()):
        lines.append("Heads that the first model has frozen or pruned already are not in the change.")
    return lines + [problem for problem in [record.get("not_learnt")] if problem]


# --- all arms of a page


@dataclass(frozen=True)
class ArmComparison:
    """An edited run and the ordinary one; `record` is None where they could not be compared, for a `reason`."""

    name: str
    ordinary: RecordedRun
    frozen: RecordedRun
    record: dict[str, Any] | None
    reason: str | None = None

    @property
    def perplexity(self) -> dict[str, Any] | None:
        """The record, where it compares perplexities."""
        return self.record if self.record and self.record["kind"] == PERPLEXITY else None


def compare_all(runs: Sequence[RecordedRun], names: Sequence[str]) -> list[ArmComparison]:
    """Compare every frozen or pruned run with the first ordinary one; record differences and failures."""
    ordinary = next((run for run in runs if run.arm == "ordinary"), None)
    comparisons = []
    for run, name in zip(runs, names, strict=True):
        if ordinary is None or run.arm == "ordinary":
            continue
        record, reason = None, None
        try:
            record = compare_runs(ordinary, run, allow_differences=True)
        except SafError as error:
            reason = str(error)
        comparisons.append(ArmComparison(name, ordinary, run, record, reason))
    return comparisons


def arm_names(runs: Sequence[RecordedRun]) -> list[str]:
    """Name each run by its folder, with as much of the path before it as makes all names differ."""
    parts = [run.folder.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(path[-depth:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path[-1]} {place}" for place, path in enumerate(parts, start=1)]


def arm_colours(runs: Sequence[RecordedRun]) -> list[str]:
    """Choose the CSS colour of each run; arms beyond the colours of their kind share them."""
    used: Counter[str] = Counter()
    colours = []
    for run in runs:
        kind = run.arm if run.arm in _COLOURS else "frozen"  # a frozen run may have pruned heads too
        colours.append(_COLOURS[kind][used[kind] % len(_COLOURS[kind])])
        used[kind] += 1
    return colours


def arms_table(runs: Sequence[RecordedRun], names: Sequence[str], comparisons: Sequence[ArmComparison]) -> Table:
    """Tabulate one row a run: loss, perplexity and its change, update time, memory, and what freezing took.

    A ratio behind an update time is ordinary / frozen: above 1 the frozen arm is faster.
    """
    by_name = {comparison.name: comparison for comparison in comparisons}
    rows = [[name, *_arm_cells(run, by_name.get(name))] for run, name in zip(runs, names, strict=True)]
    notes = [f"{each.name}: {note}" for each in comparisons for note in _comparison_notes(each)]
    return Table.of("Arms side by side", _COLUMNS, rows, [_TIMES, *notes]).used()


def _arm_cells(run: RecordedRun, comparison: ArmComparison | None) -> Iterator[str | None]:
    """Yield the cells of a run's row; `comparison` is that with the ordinary run."""
    result, record = run.result or {}, comparison.perplexity if comparison else None
    loss, perplexity, peak = (result.get(key) for key in ("report_loss", "report_perplexity", "peak_memory_bytes"))
    yield (
        f"{run.heads_in_words if run.frozen_heads and run.pruned_heads else len(run.edited_heads)} of {run.num_heads}"
        + (" pruned" if run.arm == "pruned" else "")
    )
    yield None if loss is None else f"{loss:.4f}"
    yield None if perplexity is None else f"{perplexity:.3f}"
    yield None if record is None else _interval(record)
    median = (result.get("update_seconds") or {}).get("median")
    yield _with(seconds(record["update_seconds_frozen"] if record else median), _ratio(record) if record else "")
    change = change_percent(record["peak_memory_ordinary"], peak) if record else None
    yield _with(byte_size(peak), "" if change is None else signed(change))
    parts = (result.get("intervention") or {}).get("seconds")
    yield seconds(sum(parts.values()) if parts else None)
    for clock in _CLOCKS:
        yield _with(seconds(run.seconds(clock)), _time_change(comparison, clock) if comparison else "")


def _with(value: str, change: str) -> str:
    return f"{value} ({change})" if change else value


def _interval(record: Record, name: str = "") -> str:
    low, high = record["ci95"]
    return f"{signed(record['delta_ppl_percent'])} ({name}{signed(low)} to {signed(high)})"


def _ratio(record: Record) -> str:
    ratio = record["update_time_ratio"]
    return "unclear" if was_busy(record) else f"{ratio:.3f}×" if ratio else ""


def _time_change(comparison: ArmComparison, clock: str) -> str:
    """Show by how much a whole run's time differs from the ordinary one's; a busy machine makes that unclear."""
    change = change_percent(comparison.ordinary.seconds(clock), comparison.frozen.seconds(clock))
    if change is None:
        return ""
    return "unclear" if comparison.perplexity and was_busy(comparison.perplexity) else signed(change)


def _comparison_notes(comparison: ArmComparison) -> Iterator[str]:
    if comparison.reason is not None:
        yield f"could not be compared: {comparison.reason}"
    if record := comparison.perplexity:
        yield from (f"differs in more than the freezing: {line}" for line in record["differences"])
        block = f" of blocks of {record['block']} neighbours" if record.get("block", 1) > 1 else ""
        facts = f"{number(record['windows'])} paired windows, {number(record['resamples'])} resamples{block}"
        yield "; ".join(filter(None, [facts, speed_caveat(record)])) + "."
