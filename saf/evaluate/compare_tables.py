"""Tables of comparisons: a pair's verdict and table for a terminal, and all arms beside each other for pages."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saf.errors import SafError
from saf.evaluate.compare import compare_runs, speed_caveat, was_busy
from saf.evaluate.recall import RECALL
from saf.evaluate.zero_shot import choice_counts
from saf.records.events import heads_in_words
from saf.records.result import read_result
from saf.records.run import RecordedRun
from saf.records.table import Table, byte_size, change_percent, number, seconds, signed

Record = Mapping[str, Any]
ORDINARY, FROZEN = "ORDINARY", "FROZEN"
"""Headings of the two columns of a pair, as `saf compare` names its arguments."""
_COLUMNS = ("arm", "heads frozen", "loss, nats", "perplexity", "change, 95% interval", "median update", "peak memory")
_COLUMNS += ("freezing took", "whole run", "whole run, warm")
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
_CLOCKS = ("everything", "warm")


# --- a pair


def verdict(record: Record) -> str:
    """Say in a line or two what freezing cost, and how speed and memory changed, for a record of any comparison."""
    match record["kind"]:
        case "answers_comparison":
            return f"Cost: accuracy {_points(record)}, p = {record['p_value']:.3g}."
        case "recall_comparison":
            worst = min(record["tests"], key=lambda test: test["difference"])
            where = f"{worst['length']:,} tokens with {worst['pairs']} pairs"
            return f"Cost: queries of recall answered {_points(worst)} at {where}, the largest loss."
        case "zero_shot_comparison":
            mean = signed(100 * record["mean_difference"], 2, "")
            return f"Cost: zero-shot accuracy {mean} points on average over {len(record['tasks'])} tasks."
    return "\n".join(filter(None, [f"Cost: perplexity {perplexity_change(record)}.", _saving(record)]))


def perplexity_change(record: Record) -> str:
    """Show the change of perplexity with its 95% interval."""
    low, high = record["ci95"]
    change = signed(record["delta_ppl_percent"], 3)
    return f"{change} (95% interval {signed(low, 3, '')} to {signed(high, 3, '')})"


def _saving(record: Record) -> str:
    parts = []
    if ratio := record.get("update_time_ratio"):
        within = ", within the spread of both arms" if speed_caveat(record) else ""
        busy = "update times unclear: the machine was busy"
        parts.append(busy if was_busy(record) else f"updates {ratio:.3f}× as fast{within}")
    memory = change_percent(record.get("peak_memory_ordinary"), record.get("peak_memory_frozen"))
    parts += [f"peak memory {signed(memory)}"] * (memory is not None)
    return f"Speed: {', '.join(parts)}." if parts else ""


def _points(change: Record) -> str:
    text = f"{signed(100 * change['difference'], 2, '')} points"
    if change["ci95"] is None:
        return text
    low, high = (signed(100 * end, 2, "") for end in change["ci95"])
    return f"{text} (95% interval {low} to {high})"


def pair_tables(record: Record, ordinary: RecordedRun | None = None, frozen: RecordedRun | None = None) -> list[Table]:
    """Tabulate the record of any comparison of two; runs of text add what they alone know."""
    match record["kind"]:
        case "answers_comparison":
            return [_answers_table(record)]
        case "recall_comparison":
            return _recall_tables(record)
        case "zero_shot_comparison":
            return _zero_shot_tables(record)
    if ordinary is None or frozen is None:
        return [_evaluations_table(record)]
    return [_runs_table(record, ordinary, frozen)]


def _pair(record: Record, rows: Sequence[Sequence[Any]], notes: Sequence[str]) -> Table:
    where = f"{ORDINARY}: {record['ordinary']}; {FROZEN}: {record['frozen']}."
    return Table.of("", ("", ORDINARY, FROZEN, "change"), rows, [where, *notes]).used()


def _runs_table(record: Record, ordinary: RecordedRun, frozen: RecordedRun) -> Table:
    comparison = ArmComparison(frozen.folder.name, ordinary, frozen, dict(record))
    runs = (ordinary, frozen)
    ratio = record["update_time_ratio"]
    speed = "unclear" if was_busy(record) else f"{ratio:.3f}×" if ratio else None
    memory = [record[f"peak_memory_{arm}"] for arm in ("ordinary", "frozen")]
    rows = [
        ["heads frozen", *map(_heads, runs), None],
        ["perplexity", f"{record['ppl_ordinary']:.3f}", f"{record['ppl_frozen']:.3f}", _interval(record)],
        ["median update", *(seconds(record[f"update_seconds_{arm}"]) for arm in ("ordinary", "frozen")), speed],
        ["peak memory", *map(byte_size, memory), signed(change_percent(*memory))],
        ["freezing took", None, seconds(_freezing_seconds(frozen)), None],
    ]
    for clock, name in zip(_CLOCKS, ("whole run", "whole run, warm"), strict=True):
        rows.append([name, *(seconds(run.seconds(clock)) for run in runs), _time_change(comparison, clock) or None])
    return _pair(record, rows, [*_comparison_notes(comparison), *_missing(runs, (ORDINARY, FROZEN))])


def _evaluations_table(record: Record) -> Table:
    heads = [heads_in_words(each) if any(each.values()) else "none" for each in record["heads_by_kind"]]
    rows = [
        ["heads frozen", *heads, None],
        ["perplexity", f"{record['ppl_ordinary']:.4f}", f"{record['ppl_frozen']:.4f}", _interval(record)],
    ]
    windows = f"{record['windows']:,} paired windows of {record['length']:,} tokens, in {record['precision']}."
    return _pair(record, rows, [windows, *model_notes(record)])


def model_notes(record: Record) -> list[str]:
    """Say what a reader must know of the two models of a comparison of evaluations; nothing where all is well."""
    lines = [f"Difference of the models: {line}." for line in record["differences"]]
    if record["made_from"] is None:
        lines.append("No file says whether the frozen model was made from the ordinary one.")
    before = record["heads_by_kind"][0]
    if any(before.values()):
        heads = heads_in_words(before)
        lines.append(f"The first model has {heads} heads already: their cost is not in the change.")
    return lines


def _answers_table(record: Record) -> Table:
    taken = [
        ", ".join(f"{n}: {each.get(n, 0):,}" for n in sorted(record["answers"], key=int)) for each in record["taken"]
    ]
    heads = [heads_in_words(each) if any(each.values()) else "none" for each in record["heads_by_kind"]]
    rows = [
        ["heads frozen or pruned", *heads, None],
        ["accuracy, %", *(f"{100 * share:.2f}" for share in record["accuracy"]), _short_points(record)],
        ["taken, by choice", *taken, None],
        ["median update", *map(seconds, record["update_seconds"]), None],
    ]
    right = ", ".join(
        f"{n}: {count:,}" for n, count in sorted(record["answers"].items(), key=lambda each: int(each[0]))
    )
    notes = [
        f"{record['questions']:,} questions; right answers by choice {right}. {FROZEN} alone answers "
        f"{record['gained']:,} rightly, {ORDINARY} alone {record['lost']:,} (McNemar's exact test: p = "
        f"{record['p_value']:.3g}). The standard error over questions is {100 * record['standard_error']:.2f} points.",
        _ONE_SEED + " Error, interval and p treat questions of one text as independent.",
        *(f"Difference of the runs: {line}" for line in record["differences"]),
    ]
    return _pair(record, rows, notes)


_ONE_SEED = "Both runs have one seed each: nothing here is over seeds."


def _recall_tables(record: Record) -> list[Table]:
    rows = []
    for test in record["tests"]:
        moved = None if test["better"] is None else f"{test['better']:,} / {test['worse']:,}"
        shares = [f"{100 * share:.2f}" for share in test["accuracy"]]
        rows.append([f"{test['length']:,}", test["pairs"], test["queries"], *shares, _short_points(test), moved])
    columns = ("tokens", "pairs", "queries", f"{ORDINARY}, %", f"{FROZEN}, %", "change, points (95%)", "better / worse")
    tables = [Table.of("Queries of recall that two runs answer", columns, rows, _recall_notes(record)).used()]
    if reports := record["reports"]:
        columns = ("tokens / pairs", *(f"{int(update):,} updates" for update in reports))
        tests = zip(*reports.values(), strict=True)
        rows = [[f"{each[0]['length']:,} / {each[0]['pairs']}", *map(_short_points, each)] for each in tests]
        tables.append(Table.of("Change of queries answered in between, points (95%)", columns, rows))
    return tables


def _short_points(change: Record) -> str:
    text = signed(100 * change["difference"], 2, "")
    if change["ci95"] is None:
        return text
    low, high = (signed(100 * end, 2, "") for end in change["ci95"])
    return f"{text} ({low} to {high})"


def _recall_notes(record: Record) -> list[str]:
    notes = []
    for name, key, counts, took in zip(
        (ORDINARY, FROZEN), ("ordinary", "frozen"), record["heads_by_kind"], record["update_seconds"], strict=True
    ):
        heads = f"{heads_in_words(counts)} heads" if any(counts.values()) else "no heads"
        notes.append(f"{name}: {record[key]} ({heads}{'' if took is None else f', {seconds(took)} an update'}).")
    if record["without_hits"]:
        runs = " and ".join(record["without_hits"])
        notes.append(f"No interval can be given: {runs} has no {RECALL}, which holds the answers to every example.")
    else:
        notes.append(
            f"Intervals are over examples, paired, each test by itself; better and worse count examples of which "
            f"{FROZEN} answers more, or fewer."
        )
    notes.append(_ONE_SEED)
    notes += [f"{words[:1].upper()}{words[1:]}." for words in dict.fromkeys(record["not_learnt"].values())]
    return [*notes, *(f"Difference of the runs: {line}" for line in record["differences"])]


def _zero_shot_tables(record: Record) -> list[Table]:
    """Tabulate changes of accuracy by task, the questions behind them, and how often each choice is taken."""
    changes, questions = [], []
    for name, task in record["tasks"].items():
        shares = [f"{100 * share:.2f}" for share in task["accuracy"]]
        changes.append([name, *shares, _short_points(task), *(f"{task[key]:.3g}" for key in ("p_value", "p_holm"))])
        questions.append([name, task["questions"], task["gained"], task["lost"]])
    notes = [
        f"Mean change {signed(100 * record['mean_difference'], 2, '')} points. Intervals are 95% over questions, "
        "paired; p is McNemar's, exact, with Holm's correction over the tasks. A large p does not show equality.",
        *model_notes(record),
    ]
    columns = ["task", f"{ORDINARY}, %", f"{FROZEN}, %", "change, points (95%)", "p", "Holm"]
    alone = ["task", "questions", f"{FROZEN} alone is right", f"{ORDINARY} alone is right"]
    taken = {
        model: {name: task["taken"][place] for name, task in record["tasks"].items()}
        for place, model in enumerate((ORDINARY, FROZEN))
    }
    return [
        Table.of("Zero-shot tasks, paired", columns, changes, notes),
        Table.of("Questions that one model alone answers rightly", alone, questions),
        choice_counts(record["tasks"], taken),
    ]


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
        return self.record if self.record and self.record["kind"] == "comparison" else None


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
            record = _stored(ordinary, run)
            reason = str(error) if record is None else None
        comparisons.append(ArmComparison(name, ordinary, run, record, reason))
    return comparisons


def _stored(ordinary: RecordedRun, frozen: RecordedRun) -> dict[str, Any] | None:
    """Read the frozen run's compare.json if it is about these two results.

    Archived runs hold their results, not the log-probabilities of every token.
    """
    path = frozen.folder / "compare.json"
    record = read_result(path) if path.is_file() else {}
    for arm, run in (("ordinary", ordinary), ("frozen", frozen)):
        perplexity = (run.result or {}).get("report_perplexity", math.nan)
        if not math.isclose(record.get(f"ppl_{arm}", math.inf), perplexity, rel_tol=1e-9):
            return None
    return record


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
    rows = []
    for run, name in zip(runs, names, strict=True):
        result, comparison = run.result or {}, by_name.get(name)
        record = comparison.perplexity if comparison else None
        loss, perplexity = result.get("report_loss"), result.get("report_perplexity")
        rows.append(
            [
                name,
                _heads(run),
                None if loss is None else f"{loss:.4f}",
                None if perplexity is None else f"{perplexity:.3f}",
                None if record is None else _interval(record),
                _update(run, record, comparisons),
                _memory(result, record),
                seconds(_freezing_seconds(run)),
                *(_whole_run(run, comparison, clock) for clock in _CLOCKS),
            ]
        )
    notes = [_BASELINE] * bool(comparisons) + [_WHOLE_RUN] * any(run.seconds("everything") for run in runs)
    for comparison in comparisons:
        notes += [f"{comparison.name}: {note}" for note in _comparison_notes(comparison)]
    return Table.of("Arms side by side", _COLUMNS, rows, [*notes, *_missing(runs, names)]).used()


def _heads(run: RecordedRun) -> str:
    if run.frozen_heads and run.pruned_heads:
        return f"{run.heads_in_words} of {run.num_heads}"
    return f"{len(run.edited_heads)} of {run.num_heads}{' pruned' if run.arm == 'pruned' else ''}"


def _interval(record: Record) -> str:
    low, high = record["ci95"]
    return f"{signed(record['delta_ppl_percent'])} ({signed(low)} to {signed(high)})"


def _freezing_seconds(run: RecordedRun) -> float | None:
    parts = ((run.result or {}).get("intervention") or {}).get("seconds") or {}
    return sum(parts.values()) if parts else None


def _update(run: RecordedRun, record: Record | None, comparisons: Sequence[ArmComparison]) -> str:
    """Show a run's median over the compared updates where these are the same in all comparisons, else its own."""
    records = [each.perplexity for each in comparisons if each.perplexity and each.ordinary is run]
    medians = {each["update_seconds_ordinary"] for each in records if each}
    if record is not None:
        medians = {record["update_seconds_frozen"]}
    own = ((run.result or {}).get("update_seconds") or {}).get("median")
    ratio = record["update_time_ratio"] if record else None
    words = "unclear" if record and was_busy(record) else f"{ratio:.3f}×" if ratio else ""
    return seconds(medians.pop() if len(medians) == 1 else own) + (f" ({words})" if words else "")


def _memory(result: Record, record: Record | None) -> str:
    peak = result.get("peak_memory_bytes")
    change = change_percent(record["peak_memory_ordinary"], peak) if record else None
    return byte_size(peak) + (f" ({signed(change)})" if change is not None else "")


def _whole_run(run: RecordedRun, comparison: ArmComparison | None, clock: str) -> str:
    words = _time_change(comparison, clock) if comparison else ""
    return seconds(run.seconds(clock)) + (f" ({words})" if words else "")


def _time_change(comparison: ArmComparison, clock: str) -> str:
    """Show by how much a whole run's time differs from the ordinary one's; a busy machine makes that unclear."""
    change = change_percent(comparison.ordinary.seconds(clock), comparison.frozen.seconds(clock))
    if change is None:
        return ""
    return "unclear" if comparison.perplexity and was_busy(comparison.perplexity) else signed(change)


def _missing(runs: Sequence[RecordedRun], names: Sequence[str]) -> list[str]:
    missing: dict[str, list[str]] = {}
    for run, name in zip(runs, names, strict=True):
        for what in run.missing:
            missing.setdefault(what, []).append(name)
    return [f"Not known of {', '.join(names)}: {what}." for what, names in missing.items()]


def _comparison_notes(comparison: ArmComparison) -> Iterator[str]:
    if comparison.reason is not None:
        yield f"could not be compared: {comparison.reason}"
    if (record := comparison.perplexity) is None:
        return
    yield from (f"differs in more than the freezing: {line}" for line in record["differences"])
    block = record.get("block", 1)
    blocks = f" of blocks of {block} neighbours" if block > 1 else ""
    facts = [f"{number(record['windows'])} paired windows, {number(record['resamples'])} resamples{blocks}"]
    if record["timed_updates"]:
        facts.append(f"update times over updates {' to '.join(map(number, record['timed_updates']))}")
    yield f"{'; '.join(filter(None, [*facts, speed_caveat(record)]))}."
