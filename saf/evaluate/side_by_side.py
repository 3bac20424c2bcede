"""Runs side by side: each edited run compared with the first ordinary one, and the table of all of them."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from saf.errors import SafError
from saf.evaluate.answers import answers_comparison_tables, compare_answers, has_answers
from saf.evaluate.compare import compare_runs, speed_caveat, was_busy
from saf.evaluate.compare_recall import compare_recall, has_recall, recall_comparison_tables
from saf.records.quantities import change_percent, gibibytes, number, seconds, signed
from saf.records.result import read_result
from saf.records.run import RecordedRun
from saf.records.table import Table

_COLUMNS = ("arm", "heads frozen", "loss, nats", "perplexity", "change, 95% interval", "median update", "peak memory")
_COLUMNS += ("freezing took", "whole run", "whole run, warm")
_WIDE = ("loss, nats", "whole run", "whole run, warm")
"""Columns that a terminal leaves out, which would break its lines."""
_COLOURS = {
    "ordinary": ("ordinary", "ordinary-2"),
    "frozen": ("frozen", "frozen-2", "frozen-3"),
    "pruned": ("pruned", "pruned-2"),
}
"""CSS colours of the kinds of arms, in the order in which they are taken."""
_BASELINE = (
    "Baseline: the ordinary arm. Each arm ran in a process of its own, so update times carry the machine's drift; the "
    "alternating pairs of saf bench update do not."
)
_WHOLE_RUN = (
    "The whole run counts everything up to the last decision, with the part before the checkpoint that an arm "
    "continues from; warm leaves out loading and compilation."
)


class Judged(NamedTuple):
    """How runs of a task are compared that are judged by something else than perplexity."""

    has: Callable[[RecordedRun], bool]
    """Whether a run was judged so."""
    compare: Callable[..., dict[str, Any]]
    """Compares two runs, as `compare_answers` does."""
    tables: Callable[[Mapping[str, Any]], list[Table]]
    """The tables of a comparison."""


JUDGED = {
    "answers": Judged(has_answers, compare_answers, answers_comparison_tables),
    "recall": Judged(has_recall, compare_recall, recall_comparison_tables),
}


@dataclass(frozen=True)
class Comparison:
    """An edited run and the ordinary one; `record` is None where they could not be compared, for a `reason`."""

    name: str
    ordinary: RecordedRun
    frozen: RecordedRun
    record: dict[str, Any] | None
    reason: str | None = None


def compare_all(runs: Sequence[RecordedRun], names: Sequence[str]) -> list[Comparison]:
    """Compare every frozen or pruned run with the first ordinary one; differences and failures are kept.

    Runs of tasks are left to `JUDGED`: their comparison has neither record nor reason.
    """
    ordinary = next((run for run in runs if run.arm == "ordinary"), None)
    if ordinary is None:
        return []
    comparisons = []
    for run, name in zip(runs, names, strict=True):
        if run.arm == "ordinary":
            continue
        record, reason = None, None
        if not any(all(map(judged.has, (ordinary, run))) for judged in JUDGED.values()):
            try:
                record = compare_runs(ordinary, run, allow_differences=True)
            except SafError as error:
                record = _stored(ordinary, run)
                reason = str(error) if record is None else None
        comparisons.append(Comparison(name, ordinary, run, record, reason))
    return comparisons


def _stored(ordinary: RecordedRun, frozen: RecordedRun) -> dict[str, Any] | None:
    """Return the frozen run's compare.json if it is about these two results.

    Archived runs keep their results, not the log-probabilities of every token.
    """
    path = frozen.folder / "compare.json"
    record = read_result(path) if path.is_file() else {}
    if "ppl_ordinary" not in record:
        return None
    for arm, run in (("ordinary", ordinary), ("frozen", frozen)):
        if not math.isclose(record[f"ppl_{arm}"], run.finished_result()["report_perplexity"], rel_tol=1e-9):
            return None
    return record


def arm_names(runs: Sequence[RecordedRun]) -> list[str]:
    """Return a name for each run: its folder's, with as much of the path before it as makes all names differ."""
    parts = [run.folder.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(path[-depth:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path[-1]} {place}" for place, path in enumerate(parts, start=1)]


def arm_colours(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the CSS colour of each run; arms beyond the colours of their kind share them."""
    taken: Counter[str] = Counter()
    colours = []
    for run in runs:
        kind = run.arm if run.arm in _COLOURS else "frozen"  # heads may be pruned beside them
        colours.append(_COLOURS[kind][taken[kind] % len(_COLOURS[kind])])
        taken[kind] += 1
    return colours


def arms_table(
    runs: Sequence[RecordedRun], names: Sequence[str], comparisons: Sequence[Comparison], *, brief: bool = False
) -> Table:
    """Return one row a run: loss, perplexity and its change, update time, memory, and what freezing took.

    A ratio behind an update time is ordinary / frozen: above 1 the frozen arm is faster. `brief`, for a terminal,
    leaves out what would break its lines.
    """
    by_name = {comparison.name: comparison for comparison in comparisons}
    rows = []
    for run, name in zip(runs, names, strict=True):
        result, comparison = run.result or {}, by_name.get(name)
        record = comparison.record if comparison else None
        event = (result.get("intervention") or {}).get("seconds") or {}
        loss, perplexity = result.get("report_loss"), result.get("report_perplexity")
        rows.append(
            [
                name,
                _heads(run),
                None if loss is None else f"{loss:.4f}",
                None if perplexity is None else f"{perplexity:.3f}",
                None if record is None else _change(record),
                _update(run, record, comparisons),
                _memory(result, record),
                seconds(sum(event.values()) if event else None),
                *(_whole_run(run, comparison, clock) for clock in ("everything", "warm")),
            ]
        )
    notes = [note for comparison in comparisons for note in _notes(comparison)] + _missing(runs, names)
    if brief:
        notes = [*(line for comparison in comparisons for line in _times(comparison)), *notes]
        return Table.of("Arms side by side", _COLUMNS, rows, notes).without(_WIDE)
    whole = [_WHOLE_RUN] * any(run.seconds("everything") for run in runs)
    return Table.of("Arms side by side", _COLUMNS, rows, [*[_BASELINE] * bool(comparisons), *whole, *notes]).used()


def _heads(run: RecordedRun) -> str:
    if run.frozen_heads and run.pruned_heads:
        return f"{run.heads_in_words} of {run.num_heads}"
    return f"{len(run.edited_heads)} of {run.num_heads}{' pruned' if run.arm == 'pruned' else ''}"


def _change(record: Mapping[str, Any]) -> str:
    low, high = record["ci95"]
    return f"{signed(record['delta_ppl_percent'])} ({signed(low)} to {signed(high)})"


def _update(run: RecordedRun, record: dict[str, Any] | None, comparisons: Sequence[Comparison]) -> str:
    """Return a run's median over the compared updates where these are the same in all comparisons, else its own."""
    medians = {each.record["update_seconds_ordinary"] for each in comparisons if each.record and each.ordinary is run}
    if record is not None:
        medians = {record["update_seconds_frozen"]}
    own = ((run.result or {}).get("update_seconds") or {}).get("median")
    ratio = record["update_time_ratio"] if record else None
    words = "unclear" if record and was_busy(record) else f"{ratio:.3f}×" if ratio else ""
    return seconds(medians.pop() if len(medians) == 1 else own) + (f" ({words})" if words else "")


def _memory(result: Mapping[str, Any], record: Mapping[str, Any] | None) -> str:
    peak = result.get("peak_memory_bytes")
    change = change_percent(record["peak_memory_ordinary"], peak) if record else None
    return gibibytes(peak) + (f" ({signed(change)})" if change is not None else "")


def _whole_run(run: RecordedRun, comparison: Comparison | None, clock: str) -> str:
    words = _saved(comparison, clock) if comparison else ""
    return seconds(run.seconds(clock)) + (f" ({words})" if words else "")


def _saved(comparison: Comparison, clock: str) -> str:
    """Return by how much a whole run's time differs from the ordinary one's; a busy machine makes that unclear."""
    change = change_percent(comparison.ordinary.seconds(clock), comparison.frozen.seconds(clock))
    if change is None:
        return ""
    return "unclear" if comparison.record and was_busy(comparison.record) else signed(change)


def _times(comparison: Comparison) -> Iterator[str]:
    words = []
    for clock, name in (("everything", "the whole run"), ("warm", "without loading and compilation")):
        pair = [run.seconds(clock) for run in (comparison.ordinary, comparison.frozen)]
        if None not in pair:
            words.append(f"{name} {seconds(pair[1])} against {seconds(pair[0])} ({_saved(comparison, clock)})")
    if words:
        yield f"{comparison.name}: {'; '.join(words)}."


def _missing(runs: Sequence[RecordedRun], names: Sequence[str]) -> list[str]:
    """Return what runs lack, each thing once with the runs that lack it."""
    missing: dict[str, list[str]] = {}
    for run, name in zip(runs, names, strict=True):
        for what in run.lacks:
            missing.setdefault(what, []).append(name)
    return [f"Not known of {', '.join(names)}: {what}." for what, names in missing.items()]


def _notes(comparison: Comparison) -> Iterator[str]:
    """Yield why there is no comparison, or what differs and over what it was measured."""
    name, record = comparison.name, comparison.record
    if record is None:
        if comparison.reason is not None:
            yield f"{name} could not be compared: {comparison.reason}"
        return
    yield from (f"{name} differs in more than the freezing: {line}" for line in record["differences"])
    block = record.get("block", 1)
    blocks = f" of blocks of {block} neighbours" if block > 1 else ""
    facts = [f"{number(record['windows'])} paired windows, {number(record['resamples'])} resamples{blocks}"]
    if record["timed_updates"]:
        facts.append(f"update times over updates {' to '.join(map(number, record['timed_updates']))}")
    yield f"{name}: {'; '.join(filter(None, [*facts, speed_caveat(record)]))}."
