"""Runs side by side: which are compared with which, what came of it, and the table of their arms.

A terminal, a page and the document of all results write this one table.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from saf.errors import SafError
from saf.evaluate.answers import answers_comparison_tables, compare_answers, has_answers
from saf.evaluate.compare import compare_runs, speed_caveat, was_busy
from saf.evaluate.compare_recall import compare_recall, has_recall, recall_comparison_tables
from saf.records import paper
from saf.records.paper import Quoted, footnotes
from saf.records.quantities import MISSING, change_percent, gibibytes, number, seconds, signed
from saf.records.result import read_result
from saf.records.run import RecordedRun
from saf.records.table import Cell, Table

_COLUMNS = ("arm", "heads frozen", "loss, nats", "perplexity", "change, 95% interval", "paper's change")
_COLUMNS += ("median update", "peak memory", "paper's memory", "freezing took", "paper's freezing")
_COLUMNS += ("whole run", "whole run, warm")
_WIDE = ("loss, nats", "paper's change", "paper's memory", "paper's freezing")
_WIDE += ("whole run", "whole run, warm")
"""Columns that a terminal leaves out: with them its lines would break."""
_COLOURS = {
    "ordinary": ("ordinary", "ordinary-2"),
    "frozen": ("frozen", "frozen-2", "frozen-3"),
    "pruned": ("pruned", "pruned-2"),
}
"""Of the kinds of arms, by the names of the page's style sheet, in the order in which they are taken."""
_BASELINE = (
    "Baseline: the ordinary arm. Each arm ran in a process of its own, so update times carry the machine's drift, "
    "which the alternating pairs of saf bench update do not."
)
_WHOLE_RUN = (
    "A whole run is everything up to the last decision, the part before the checkpoint that an arm continues from "
    "included; warm is the same without loading and compilation."
)


class Judged(NamedTuple):
    """Say how runs of a task are compared that are judged by something else than perplexity."""

    has: Callable[[RecordedRun], bool]
    """Whether a run was judged so."""
    compare: Callable[..., dict[str, Any]]
    """Compares two runs, as `compare_answers` does."""
    tables: Callable[[Mapping[str, Any]], list[Table]]
    """The tables of what it found."""


JUDGED = {
    "answers": Judged(has_answers, compare_answers, answers_comparison_tables),
    "recall": Judged(has_recall, compare_recall, recall_comparison_tables),
}
"""What runs of tasks are judged by, by its name."""


@dataclass(frozen=True)
class Comparison:
    """Pair a frozen or pruned run with the report's ordinary run; `record` is None when they could not be compared."""

    name: str
    ordinary: RecordedRun
    frozen: RecordedRun
    record: dict[str, Any] | None
    reason: str | None = None


def compare_all(runs: Sequence[RecordedRun], names: Sequence[str]) -> list[Comparison]:
    """Compare every frozen or pruned run with the first ordinary one; differences and failures are kept to be shown."""
    ordinary = next((run for run in runs if run.arm == "ordinary"), None)
    if ordinary is None:
        return []
    found = []
    for run, name in zip(runs, names, strict=True):
        if run.arm == "ordinary":
            continue
        if any(all(map(judged.has, (ordinary, run))) for judged in JUDGED.values()):
            found.append(Comparison(name, ordinary, run, None))  # a table of their answers is made elsewhere
            continue
        try:
            record, reason = compare_runs(ordinary, run, allow_differences=True), None
        except SafError as error:
            record = recorded(ordinary, run)
            reason = str(error) if record is None else None
        found.append(Comparison(name, ordinary, run, record, reason))
    return found


def recorded(ordinary: RecordedRun, frozen: RecordedRun) -> dict[str, Any] | None:
    """Return what `saf compare` once wrote into the frozen run's folder, if it is about these two results.

    Archived runs keep their results but not the log-probabilities of every token.
    """
    path = frozen.folder / "compare.json"
    if not path.is_file():
        return None
    record = read_result(path)
    if "ppl_ordinary" not in record:  # of finetuned runs, which are compared by their answers
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
    return [f"{path[-1]} {number}" for number, path in enumerate(parts, start=1)]


def arm_colours(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the name of each run's colour, the same wherever it is shown; more arms of a kind than colours share."""
    taken: Counter[str] = Counter()
    found = []
    for run in runs:
        kind = run.arm if run.arm in _COLOURS else "frozen"  # heads may be pruned beside them
        found.append(_COLOURS[kind][taken[kind] % len(_COLOURS[kind])])
        taken[kind] += 1
    return found


def arms_table(
    runs: Sequence[RecordedRun], names: Sequence[str], comparisons: Sequence[Comparison], *, brief: bool = False
) -> Table:
    """Return one row a run: loss, perplexity and its change, update time, memory, cost of freezing, and the paper's.

    A ratio behind an update time is ordinary / frozen: above 1 the frozen arm is faster. The paper's columns are there
    where it has numbers of the same model and shape, its changes where a run has some of its own. `brief`, for a
    terminal, leaves out what would break its lines.
    """
    by_name = {comparison.name: comparison for comparison in comparisons}
    beside_ordinary = {comparison.name for comparison in comparisons if comparison.record is not None}
    quoted = [_papers(run, changes=name in beside_ordinary) for run, name in zip(runs, names, strict=True)]
    rows = []
    for run, name, claims, colour in zip(runs, names, quoted, arm_colours(runs), strict=True):
        result, record = run.result or {}, by_name[name].record if name in by_name else None
        paper_change, paper_memory, paper_seconds = (MISSING if each is None else each.text for each in claims)
        event = (result.get("intervention") or {}).get("seconds") or {}
        loss, perplexity = result.get("report_loss"), result.get("report_perplexity")
        row = [
            Cell(text=name, arm=colour),
            _heads(run),
            None if loss is None else f"{loss:.4f}",
            None if perplexity is None else f"{perplexity:.3f}",
            None if record is None else _change(record),
            paper_change,
            _update(run, record, comparisons),
            _memory(result, record),
            paper_memory,
            seconds(sum(event.values()) if event else None),
            paper_seconds,
            *(_whole_run(run, by_name.get(name), clock) for clock in ("everything", "warm")),
        ]
        rows.append(row)
    notes = [note for comparison in comparisons for note in _notes(comparison)]
    notes += _lacks(runs, names)
    if brief:
        notes = [*(told for comparison in comparisons for told in _times(comparison)), *notes]
        return Table.of("Arms side by side", _COLUMNS, rows, notes).without(_WIDE)
    timed = any(run.seconds("everything") for run in runs)
    notes = [*([_BASELINE] if comparisons else []), *([_WHOLE_RUN] if timed else []), *notes]
    notes += [f"Paper, {note}" for note in footnotes(each for claims in quoted for each in claims)]
    return Table.of("Arms side by side", _COLUMNS, rows, notes).used()


def _heads(run: RecordedRun) -> str:
    """Return how many of a run's heads are frozen, and what else is done to them."""
    if run.frozen_heads and run.pruned_heads:
        return f"{run.heads_in_words} of {run.num_heads}"
    return f"{len(run.edited_heads)} of {run.num_heads}{' pruned' if run.arm == 'pruned' else ''}"


def _papers(run: RecordedRun, *, changes: bool) -> tuple[Quoted | None, Quoted | None, Quoted | None]:
    """Return the paper's change of perplexity, memory and seconds of freezing for a run's model, shape and rate.

    Without `changes` those are left out that are changes from ordinary attention.
    """
    settings, train = run.config.get("settings") or {}, run.config.get("train") or {}
    model, length, sequences = settings.get("model"), train.get("length"), train.get("batch_size")
    if run.pruned_heads:
        return None, None, None  # what is quoted is of frozen heads
    rate = len(run.frozen_heads) / run.num_heads if run.num_heads else 0.0
    changes |= rate == 0
    return (
        paper.perplexity(model, length, rate) if changes else None,
        paper.update_memory((model or "", length or 0, sequences or 0), rate) if changes else None,
        paper.intervention(model, length, rate, sequences=(run.freeze or {}).get("num_sequences")),
    )


def _change(record: dict[str, Any]) -> Cell:
    """Return the change of perplexity with its interval."""
    low, high = record["ci95"]
    return Cell(text=signed(record["delta_ppl_percent"]), aside=f"({signed(low)} to {signed(high)})")


def _update(run: RecordedRun, record: dict[str, Any] | None, comparisons: Sequence[Comparison]) -> str:
    """Return a run's median over the compared updates where these are the same in all comparisons, else its own."""
    medians = {each.record["update_seconds_ordinary"] for each in comparisons if each.record and each.ordinary is run}
    if record is not None:
        medians = {record["update_seconds_frozen"]}
    own = ((run.result or {}).get("update_seconds") or {}).get("median")
    ratio = record["update_time_ratio"] if record else None
    told = "unclear" if record and was_busy(record) else f"{ratio:.3f}×" if ratio else ""
    return seconds(medians.pop() if len(medians) == 1 else own) + (f" ({told})" if told else "")


def _lacks(runs: Sequence[RecordedRun], names: Sequence[str]) -> list[str]:
    """Return what runs lack, each thing once with the runs that lack it."""
    lacking: dict[str, list[str]] = {}
    for run, name in zip(runs, names, strict=True):
        for what in run.lacks:
            lacking.setdefault(what, []).append(name)
    return [f"Not known of {', '.join(names)}: {what}." for what, names in lacking.items()]


def _whole_run(run: RecordedRun, comparison: Comparison | None, clock: str) -> str:
    told = _saved(comparison, clock) if comparison else ""
    return seconds(run.seconds(clock)) + (f" ({told})" if told else "")


def _saved(comparison: Comparison, clock: str) -> str:
    """Return by how much a whole run's time differs from the ordinary one's; a busy machine makes that unclear, too."""
    change = change_percent(comparison.ordinary.seconds(clock), comparison.frozen.seconds(clock))
    if change is None:
        return ""
    return "unclear" if comparison.record and was_busy(comparison.record) else signed(change)


def _times(comparison: Comparison) -> list[str]:
    """Return what both arms took from the first update of their parents on, where that is known."""
    words = []
    for clock, name in (("everything", "the whole run"), ("warm", "without loading and compilation")):
        pair = [run.seconds(clock) for run in (comparison.ordinary, comparison.frozen)]
        if None not in pair:
            words.append(f"{name} {seconds(pair[1])} against {seconds(pair[0])} ({_saved(comparison, clock)})")
    return [f"{comparison.name}: {'; '.join(words)}."] if words else []


def _memory(result: dict[str, Any], record: dict[str, Any] | None) -> str:
    """Return an arm's peak memory, and its change where there is an ordinary arm."""
    peak = result.get("peak_memory_bytes")
    change = change_percent(record["peak_memory_ordinary"], peak) if record else None
    return gibibytes(peak) + (f" ({signed(change)})" if change is not None else "")


def _notes(comparison: Comparison) -> list[str]:
    """Return what to know about a comparison: why there is none, what differs, over what it was measured."""
    name, record = comparison.name, comparison.record
    if record is None and comparison.reason is None:
        return []
    if record is None:
        return [f"{name} could not be compared: {comparison.reason}"]
    lines = [f"{name} differs in more than the freezing: {found}" for found in record["differences"]]
    block = record.get("block", 1)
    blocks = f" of blocks of {block} neighbours" if block > 1 else ""
    facts = [f"{number(record['windows'])} paired windows, {number(record['resamples'])} resamples{blocks}"]
    if record["timed_updates"]:
        facts.append(f"update times over updates {' to '.join(map(number, record['timed_updates']))}")
    return [*lines, f"{name}: {'; '.join(filter(None, [*facts, speed_caveat(record)]))}."]
