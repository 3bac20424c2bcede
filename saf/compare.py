"""`compare_runs` and `compare_folders` measure what freezing cost and saved, by two runs or two evaluations.

A pair is compared by perplexity or by accuracy: on questions, on queries of associative recall, on zero-shot tasks.
`verdict` says the outcome in two lines, `pair_tables` tabulates a pair, `arms_table` any number of runs.
"""

import math
import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch

from saf.errors import CompareError, InputError, SafError, SafWarning
from saf.heads import EDITED
from saf.machine import untimed_updates
from saf.paired import delta_of_windows, paired_tasks
from saf.records.files import read_json, read_lines, write_json
from saf.records.result import result_header
from saf.records.run import RecordedRun, differing, heads_in_words
from saf.records.table import Table, byte_size, change_percent, number, seconds, signed
from saf.tasks.base import PARENT, answers_of_run
from saf.tasks.mqar import GATE
from saf.tasks.text import EVALUATION, read_evaluation
from saf.tasks.zero_shot import ZERO_SHOT_FILES, choices_table, read_zero_shot

Record = dict[str, Any]
PERPLEXITY, ACCURACY = "comparison", "accuracy_comparison"
"""The kinds of records."""
ORDINARY, FROZEN = ARMS = ("ORDINARY", "FROZEN")
"""Headings of the two columns of a pair, as `saf compare` names its arguments."""
_PAIR = ("ordinary", "frozen")
# The median of fewer says nothing about updates whose times spread by some percent.
_MINIMUM_TIMED_UPDATES = 5

# --- runs


def compare_runs(
    ordinary: RecordedRun | Path | str,
    frozen: RecordedRun | Path | str,
    *,
    out: Path | str | None = None,
    allow_differences: bool = False,
) -> Record:
    """Compare two finished runs by what both are measured by; the record is also written to `out`/compare.json.

    Runs of text give delta-PPL with its interval, update times and memory. `update_time_ratio` is ordinary / frozen, of
    separate processes: above 1 the frozen arm is faster; `update_time_caveat` says why it is unclear, "" where it is
    clear. Runs finetuned on questions, and runs of recall, give what `paired_tasks` returns.

    Raises CompareError for runs that differ in more than the freezing (`allow_differences` allows all but other windows
    or questions), InputError for one that has not ended or whose files are not those of its result.
    """
    pair = [run if isinstance(run, RecordedRun) else RecordedRun.open(run) for run in (ordinary, frozen)]
    one, other = pair
    results = [run.finished_result() for run in pair]
    measures = [_measure(result) for result in results]
    if measures[0] != measures[1]:
        raise InputError(f"both runs must be measured alike, got {' and '.join(measures)}")
    of_text = measures[0] == "perplexity"
    if of_text and other.arm == "ordinary":
        raise CompareError(f"{other.folder} froze or pruned no heads; name the ordinary arm first, the other second")
    record = _header(
        PERPLEXITY if of_text else ACCURACY,
        [run.folder for run in pair],
        [result["provenance"]["checkpoints"].get("final") for result in results],
        differences(one, other) if of_text else _setting_differences(one, other),
        allow_differences=allow_differences,
    )
    record["heads_by_kind"] = [run.head_counts for run in pair]
    record |= {"heads": len(other.edited_heads), "num_heads": other.num_heads}
    if of_text:
        record |= _perplexity_change(one, other)
        record |= compare_update_times(one, other)
        for arm, result in zip(_PAIR, results, strict=True):
            record[f"peak_memory_{arm}"] = result.get("peak_memory_bytes")
        record["update_time_caveat"] = speed_caveat(record)
        reasons = map(unlearnt_reason, results)
    else:
        record |= paired_tasks(*map(answers_of_run, pair))
        # The ordinary arm alone shows whether the task is learnt: the other may have lost it by the freezing.
        reasons = [unlearnt_reason(results[0])]
    unlearnt = [f"{arm}: {reason}" for arm, reason in zip(ARMS, reasons, strict=False) if reason]
    record["not_learnt"] = "; ".join(unlearnt) or None
    if out is not None:
        write_json(Path(out) / "compare.json", record)
    return record


def unlearnt_reason(result: Mapping[str, Any]) -> str | None:
    """Return why no run is to be compared with the one of this result; None where it learnt its task."""
    if (unigram := result.get("unigram_entropy")) and result["report_loss"] > unigram:
        loss = f"the loss {result['report_loss']:.4f} is worse than the unigram entropy, {unigram:.4f}"
        return f"{loss}, which token frequencies alone reach: train longer"
    if "recall" in result and (share := result["recall"]["development"]["accuracy"]) < GATE:
        answered = f"{100 * share:.1f}% of the development queries are answered, below {100 * GATE:g}%"
        return f"the task is not learnt: {answered}"
    return None


def _measure(result: Mapping[str, Any]) -> str:
    """Name what a run is measured by; runs on questions and on recall have files of answers, runs of text none."""
    if "recall" in result:
        return "recall"
    return "accuracy" if "answers_sha256" in result else "perplexity"


def _header(
    kind: str,
    folders: Sequence[Path | str],
    hashes: Sequence[str | None],
    lines: list[str],
    *,
    allow_differences: bool,
    data: Mapping[str, str] | None = None,
) -> Record:
    """Return the entries of every comparison; `lines` are differences, which raise CompareError unless allowed."""
    if lines and not allow_differences:
        listed = "\n  ".join(lines)
        raise CompareError(f"they differ in more than the freezing (--allow-differences compares anyway):\n  {listed}")
    checkpoints: dict[str, str | None] = dict(zip(_PAIR, hashes, strict=True))
    header = result_header(kind, {"allow_differences": allow_differences}, checkpoints=checkpoints, data=data)
    return {**header, **dict(zip(_PAIR, map(str, folders), strict=True)), "differences": lines}


def _perplexity_change(*pair: RecordedRun) -> Record:
    (one, losses), (other, frozen_losses) = (read_evaluation(run.folder) for run in pair)
    for run, record in zip(pair, (one, other), strict=True):
        # Files of another evaluation, copied here, would otherwise be compared as those of the run's end.
        if not math.isclose(record["loss"], expected := run.finished_result()["report_loss"], rel_tol=1e-6):
            ends = f"of the run's end, whose loss is {expected:.6f}, got one of {record['loss']:.6f}"
            raise InputError(f"{run.folder / EVALUATION} must be {ends}; take all files of the run")
    if one["windows_hash"] != other["windows_hash"]:
        raise CompareError("both arms must be evaluated on the same windows, got different windows")
    return delta_of_windows(losses, frozen_losses)


def differences(ordinary: RecordedRun, frozen: RecordedRun) -> list[str]:
    """List every difference of two runs of text that is not the freezing; empty when they are comparable.

    Arms of one parent with a budget of updates or seconds do as many updates as their speeds allow: they are matched
    in time, and their numbers of updates and tokens are no difference.
    """
    pair, budgets = (ordinary, frozen), ("update_budget", "time_budget_seconds")
    parents = {(run.config.get("parent") or {}).get("hash") for run in pair}
    limited = all(any(run.config["train"].get(name) for name in budgets) for run in pair)
    matched_in_time = len(parents) == 1 and None not in parents and limited

    def facts(run: RecordedRun) -> dict[str, Any]:
        values = {"device": run.config.get("device")}  # another kind rounds otherwise, and has other speeds
        if not matched_in_time:
            values |= {name: run.finished_result().get(name) for name in ("updates", "tokens")}
        for name in ("partition", "length", "precision", "data_fingerprint"):
            values[f"evaluation {name}"] = run.evaluation.get(name)
        return values

    one, other = map(facts, pair)
    without = {f"train.{name}" for name in budgets} if matched_in_time else set[str]()
    settings = _setting_differences(*pair, without=without)
    return [*settings, *_difference_lines(one, other), *_parent_difference(*pair)]


def _setting_differences(*pair: RecordedRun, without: Set[str] = frozenset()) -> list[str]:
    left, right = ({name: run.config.get(name) for name in ("model", "train", "data")} for run in pair)
    # Files may lie elsewhere: the data's fingerprint, which covers tokenizer and examples, is compared.
    return _difference_lines(left, right, without={"data.folder", "data.tokenizer", "data.test", *without})


def _difference_lines(
    ordinary: Mapping[str, Any], frozen: Mapping[str, Any], *, without: Set[str] = frozenset()
) -> list[str]:
    return [
        f"{name}: {one!r} in the ordinary arm, {other!r} in the frozen arm"
        for name, one, other in differing(ordinary, frozen)
        if name not in without
    ]


def _parent_difference(ordinary: RecordedRun, frozen: RecordedRun) -> list[str]:
    """Require that both arms start from the same weights, or the frozen one from a checkpoint of the other."""
    parents = [run.config.get("parent") or {} for run in (ordinary, frozen)]
    hashes = [parent.get("hash") for parent in parents]
    origins = {hashes[1], parents[1].get("frozen_from")} - {None}
    if hashes[0] == hashes[1] or origins & (_checkpoint_hashes(ordinary) | {hashes[0]}):
        return []
    starts = [f"checkpoint {value[:12]}" if value else "no checkpoint" for value in hashes]
    return [f"parent: the ordinary arm starts from {starts[0]}, the frozen arm from {starts[1]}"]


def _checkpoint_hashes(run: RecordedRun) -> set[str | None]:
    """Return the hashes of all checkpoints that a run has written."""
    # clock.jsonl has those of removed ones, too: a run keeps its newest few.
    manifests = map(read_json, (run.folder / "checkpoints").glob("*/manifest.json"))
    branch = run.finished_result()["provenance"]["checkpoints"].get("branch")
    return {branch, *(record.get("hash") for record in (*manifests, *read_lines(run.folder / "clock.jsonl")))}


# --- speed of runs


def compare_update_times(ordinary: RecordedRun, frozen: RecordedRun) -> Record:
    """Compute median update seconds of both arms over the same updates after the last event, and ordinary / frozen.

    A spread is the 20th and 80th percentile. The first updates after the event or a resumption (compilation, allocator
    growth) are left out; with fewer than five common ones the ratio is None.
    """
    for run in (ordinary, frozen):
        if not run.metrics:
            raise InputError(f"{run.folder}/metrics.jsonl is missing or empty; update times cannot be compared")
    begin = max(frozen.last_change or 0, *(run.metrics[0]["update"] - 1 for run in (ordinary, frozen)))
    last = min(run.metrics[-1]["update"] for run in (ordinary, frozen))
    start = begin + untimed_updates(last - begin)
    own, other = ({line["update"]: line["update_seconds"] for line in run.metrics} for run in (ordinary, frozen))
    # The same updates of both, so that evaluations and checkpoints come between the same ones.
    common = sorted(update for update in own.keys() & other.keys() if update > start)
    record: Record = {"update_time_ratio": None, "timed_updates": [common[0], common[-1]] if common else None}
    for arm, times in zip(_PAIR, (own, other), strict=True):
        record |= {f"update_seconds_{arm}": None, f"update_seconds_spread_{arm}": None}
        if common:
            taken = torch.tensor([times[update] for update in common], dtype=torch.float64)
            low, median, high = taken.quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
            record |= {f"update_seconds_{arm}": median, f"update_seconds_spread_{arm}": [low, high]}
    if len(common) >= _MINIMUM_TIMED_UPDATES and record["update_seconds_frozen"]:
        record["update_time_ratio"] = record["update_seconds_ordinary"] / record["update_seconds_frozen"]
    return record


def speed_caveat(record: Mapping[str, Any]) -> str:
    """Say why a record's ratio of update times is unclear; "" where it is clear."""
    if not record["update_time_ratio"]:
        return "too few updates to tell which arm is faster"
    # An update that did nothing but the work of heads would be 1 / (1 - r) times as fast with a share r of them gone.
    if record["update_time_ratio"] * (record["num_heads"] - record["heads"]) > record["num_heads"]:
        return "timing unclear: more was saved than all the work of these heads"
    spreads = sorted([record["update_seconds_spread_ordinary"], record["update_seconds_spread_frozen"]])
    return "" if spreads[0][1] < spreads[1][0] else "timing unclear: the spreads of both arms overlap"


# --- evaluations


def compare_folders(
    ordinary: Path, frozen: Path, *, allow_differences: bool = False
) -> tuple[Record | None, Record | None]:
    """Compare the perplexities and the zero-shot tasks of two folders that `saf evaluate --out` wrote.

    Each part is None where not both folders have it; raises InputError where neither part is shared.
    """
    records: list[Record | None] = []
    for name, compare in ((EVALUATION, compare_evaluations), (ZERO_SHOT_FILES[0], compare_zero_shot)):
        holders = [folder for folder in (ordinary, frozen) if (folder / name).is_file()]
        if len(holders) == 1:
            warnings.warn(f"{name} is in {holders[0]} alone: it is not compared", SafWarning, stacklevel=3)
        record = compare(ordinary, frozen, allow_differences=allow_differences) if len(holders) == 2 else None
        records.append(record)
    if records == [None, None]:
        raise InputError(f"{ordinary} and {frozen} are evaluations of different things; evaluate both on the same")
    return records[0], records[1]


def compare_evaluations(ordinary: Path | str, frozen: Path | str, *, allow_differences: bool = False) -> Record:
    """Compute delta-PPL with its interval from two folders that `saf evaluate --out` wrote.

    Raises CompareError where they are of other windows or another precision, the models differ in more than the
    freezing (`allow_differences` allows that alone), or the second one has no frozen or pruned heads.
    """
    folders = (ordinary, frozen)
    (record, losses), (other, frozen_losses) = map(read_evaluation, folders)
    # From the setting to what follows from it: the first difference is the one that a message names.
    names = ("length", "data_fingerprint", "bos", "windows_hash", "precision")
    _check_same({name: (record[name], other[name]) for name in names}, folders)
    data = {record["partition"]: record["data_fingerprint"]}
    header = _evaluation_header(PERPLEXITY, folders, (record, other), allow_differences=allow_differences, data=data)
    shape = {name: record[name] for name in ("length", "precision")}
    return {**header, **shape, **delta_of_windows(losses, frozen_losses)}


def compare_zero_shot(ordinary: Path | str, frozen: Path | str, *, allow_differences: bool = False) -> Record:
    """Compare two evaluations of the same zero-shot questions, task by task, as `paired_tasks` does.

    Raises CompareError for other tasks or questions, another precision, questions that were shortened to other lengths,
    or models that differ in more than the freezing (`allow_differences` allows that alone).
    """
    folders = (ordinary, frozen)
    (one, answers), (other, frozen_answers) = map(read_zero_shot, folders)
    versions = tuple({name: task["version"] for name, task in record["tasks"].items()} for record in (one, other))
    same = {"tasks": versions, "precision": (one["precision"], other["precision"])}
    # Models may take inputs of different lengths, as long as no question was cut to one of them.
    if any(task["shortened"] for record in (one, other) for task in record["tasks"].values()):
        same["longest"] = (one["longest"], other["longest"])
    _check_same(same, folders)
    header = _evaluation_header(ACCURACY, folders, (one, other), allow_differences=allow_differences)
    return {**header, **paired_tasks(answers, frozen_answers)}


def _check_same(pairs: Mapping[str, tuple[Any, ...]], folders: Sequence[Path | str]) -> None:
    for name, (one, other) in pairs.items():
        if one != other:
            values = f"{one} in {folders[0]}, {other} in {folders[1]}"
            if name == "data_fingerprint":
                values = f"{folders[0]} and {folders[1]} read other text, or by another tokenizer"
            raise CompareError(f"the evaluations differ in {name}: {values}; evaluate both alike")


def _evaluation_header(
    kind: str,
    folders: Sequence[Path | str],
    records: Sequence[Record],
    *,
    allow_differences: bool,
    data: Mapping[str, str] | None = None,
) -> Record:
    """Return the entries about two models, whose shape and origin may differ in the freezing alone."""
    ordinary, frozen = (record["of"] for record in records)
    counts = [{kind: facts[kind] for kind in EDITED if kind in facts} for facts in (ordinary, frozen)]
    # A model whose attention is unknown has no counts: nothing can be said of its heads.
    if "heads_by_layer" in frozen and not any(counts[1].values()):
        raise CompareError(f"the model of {folders[1]} has no frozen or pruned heads; name the ordinary model first")
    lines = _difference_lines(ordinary, frozen, without=set(EDITED))
    checkpoints = [record["provenance"]["checkpoints"] for record in records]
    # The frozen model may come from the ordinary one, or both from one parent.
    own = {value for role, value in checkpoints[0].items() if role.startswith(("model", PARENT))}
    origins = {value for role, value in checkpoints[1].items() if role.startswith(PARENT)}
    if own and PARENT in checkpoints[1] and not own & origins:
        origin = checkpoints[1][PARENT][:12]
        remedy = "compare one frozen twice with the one frozen once, or pass --allow-differences"
        lines.append(f"parent: the frozen model was derived from {origin}, which is not the ordinary model; {remedy}")
    models = [each.get("model") for each in checkpoints]
    header = _header(kind, folders, models, lines, allow_differences=allow_differences, data=data)
    return {**header, "heads_by_kind": counts}


# --- a pair, for people


def verdict(record: Record) -> str:
    """Say in two lines what freezing cost, and how speed and memory changed; then why that may mean nothing."""
    if record["kind"] == PERPLEXITY:
        lines = [f"Cost: perplexity {perplexity_change(record, '95% interval ')}."]
        if saving := _saving(record):
            lines.append(f"Speed: {saving}.")
    else:
        tasks = record["tasks"]
        worst = min(tasks, key=lambda name: tasks[name]["difference"])
        change = f"{_points(tasks[worst])} points"
        if len(tasks) > 1:
            mean = f"{_mean_change(record)} on average over {len(tasks)} tasks"
            change = f"{mean}, {_points(tasks[worst])} at {worst}, the lowest"
        lines = [f"Cost: accuracy {change}."]
    if record.get("not_learnt"):
        lines += wrap(f"Not to be compared: {record['not_learnt']}.", 80)
    return "\n".join(lines)


def perplexity_change(record: Mapping[str, Any], name: str = "") -> str:
    """Show the change of perplexity with its 95% interval, which may have a name."""
    low, high = record["ci95"]
    return f"{signed(record['delta_ppl_percent'])} ({name}{signed(low)} to {signed(high)})"


def _saving(record: Record) -> str:
    parts = []
    if ratio := record.get("update_time_ratio"):
        parts.append("update times unclear" if record["update_time_caveat"] else f"updates {ratio:.3f}× as fast")
    memory = change_percent(record.get("peak_memory_ordinary"), record.get("peak_memory_frozen"))
    if memory is not None:
        parts.append(f"peak memory {signed(memory)}")
    return ", ".join(parts)


def _mean_change(record: Record) -> str:
    return f"{signed(100 * record['mean_difference'], 2, '')} points"


def _points(change: Record) -> str:
    text, low, high = (signed(100 * share, 2, "") for share in (change["difference"], *change["ci95"]))
    return f"{text} ({low} to {high})"


def pair_tables(record: Record, ordinary: RecordedRun | None = None, frozen: RecordedRun | None = None) -> list[Table]:
    """Tabulate the record of any comparison of two; runs of text add what they alone know."""
    if record["kind"] == ACCURACY:
        return _accuracy_tables(record)
    if ordinary is None or frozen is None:
        windows = f"{record['windows']:,} paired windows of {record['length']:,} tokens, in {record['precision']}."
        values = [f"{record[f'ppl_{arm}']:.4f}" for arm in _PAIR]
        rows = [["perplexity", *values, perplexity_change(record)]]
        return [Table.of("", ("", *ARMS, "change"), rows, [*_notes(record), windows])]
    table = arms_table(
        (ordinary, frozen), ARMS, [ArmComparison(FROZEN, ordinary, frozen, record | {"not_learnt": None})]
    )
    rows = zip(table.columns[1:], *(row[1:] for row in table.rows), strict=True)
    return [Table.of("", ("", *ARMS), [*rows], [*_notes(record)[:1], *table.notes])]


def _accuracy_tables(record: Record) -> list[Table]:
    """Tabulate changes of accuracy, a row a task or test of recall, and how often each choice is taken."""
    rows, tasks = [], record["tasks"]
    for name, task in tasks.items():
        shares = [f"{100 * share:.2f}" for share in task["accuracy"]]
        p_values = [f"{task[key]:.3g}" if key in task else None for key in ("p_value", "p_holm")]
        gained = f"{task['gained']:,} / {task['lost']:,}"
        rows.append([name, task["questions"], *shares, _points(task), gained, *p_values])
    columns = ("", "questions", f"{ORDINARY}, %", f"{FROZEN}, %", "change, points (95%)", "gained / lost", "p", "Holm")
    paired = (
        "Gained and lost are questions that FROZEN or ORDINARY alone answers rightly, or examples of recall with more "
        "or fewer; p is McNemar's, exact, Holm's for all tasks. Intervals and p are of one pair, not over seeds."
    )
    notes = [*_notes(record), f"Mean change {_mean_change(record)}.", paired]
    tables = [Table.of("Accuracy", columns, rows, notes).used()]
    if all("taken" in task for task in tasks.values()):
        taken = {arm: {name: task["taken"][at] for name, task in tasks.items()} for at, arm in enumerate(ARMS)}
        tables.append(choices_table(tasks, taken))
    return tables


def _notes(record: Record) -> list[str]:
    """Say where both models are, with how many edited heads, and what else a reader must know of them."""
    heads = [heads_in_words(each) if any(each.values()) else "no" for each in record["heads_by_kind"]]
    places = zip(ARMS, (record["ordinary"], record["frozen"]), heads, strict=True)
    lines = ["; ".join(f"{arm}: {place}, {count} heads" for arm, place, count in places)]
    lines += [f"Differs in more than the freezing: {line}." for line in record["differences"]]
    if any(record["heads_by_kind"][0].values()):
        lines.append("Heads that the first model has frozen or pruned already are not in the change.")
    return lines


# --- all arms in one table

_TIMES = (
    "Update times are of separate processes and carry the machine's drift. A whole run includes its parent's part, up "
    "to the checkpoint where the arm begins; warm leaves out loading and compilation."
)


@dataclass(frozen=True)
class ArmComparison:
    """An edited run and the ordinary one; `record` is None where they could not be compared, for a `reason`."""

    name: str
    ordinary: RecordedRun
    frozen: RecordedRun
    record: Record | None
    reason: str | None = None

    @property
    def perplexity(self) -> Record | None:
        """The record, where it compares perplexities."""
        return self.record if self.record and self.record["kind"] == PERPLEXITY else None

    @property
    def warnings(self) -> list[str]:
        """Why the pair could not, or is not to be compared, and what differs besides the freezing."""
        record = self.record or {}
        reasons = {"could not be": self.reason, "is not to be": record.get("not_learnt")}
        differing = [f"differs in more than the freezing: {line}" for line in record.get("differences", ())]
        return [f"{words} compared: {reason}" for words, reason in reasons.items() if reason] + differing


def compare_all(runs: Sequence[RecordedRun], names: Sequence[str]) -> list[ArmComparison]:
    """Compare every frozen or pruned run with the first ordinary one; record differences and failures."""
    ordinary = next((run for run in runs if run.arm == "ordinary"), None)
    comparisons = []
    for run, name in zip(runs, names, strict=True):
        if ordinary is None or run.arm == "ordinary":
            continue
        try:
            # Differences are listed, not refused: a page shows all of its runs.
            record, reason = compare_runs(ordinary, run, allow_differences=True), None
        except SafError as error:
            record, reason = None, str(error)
        comparisons.append(ArmComparison(name, ordinary, run, record, reason))
    return comparisons


def arm_names(runs: Sequence[RecordedRun]) -> list[str]:
    """Name each run by its folder, with as much of the path before it as makes all names differ."""
    parts = [run.folder.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(path[-depth:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path[-1]} {place}" for place, path in enumerate(parts, start=1)]  # one run twice


def arms_table(runs: Sequence[RecordedRun], names: Sequence[str], comparisons: Sequence[ArmComparison]) -> Table:
    """Tabulate one row a run: loss, perplexity and its change, update time, memory, and what freezing took.

    A ratio behind an update time is ordinary / frozen: above 1 the frozen arm is faster. Where it is unclear, whole
    runs have no change either.
    """
    by_name = {comparison.name: comparison for comparison in comparisons}
    rows = [{"arm": name, **_arm_cells(run, by_name.get(name))} for run, name in zip(runs, names, strict=True)]
    notes = [f"{each.name} {warning}" for each in comparisons for warning in each.warnings]
    notes += [f"{each.name}: {_sample(each.perplexity)}" for each in comparisons if each.perplexity]
    cells = [row.values() for row in rows]
    return Table.of("Arms side by side", list(rows[0]), map(list, cells), [_TIMES, *notes]).used()


def _arm_cells(run: RecordedRun, comparison: ArmComparison | None) -> dict[str, str | None]:
    """Return the cells of a run's row by their columns; `comparison` is that with the ordinary run."""
    result, record = run.result, comparison.perplexity if comparison else None
    loss, perplexity, peak = (result.get(name) for name in ("report_loss", "report_perplexity", "peak_memory_bytes"))
    edited = run.heads_in_words if run.frozen_heads and run.pruned_heads else len(run.edited_heads)
    pruned = " pruned" if run.arm == "pruned" else ""
    update, memory, unclear = seconds((result.get("update_seconds") or {}).get("median")), byte_size(peak), False
    if record:
        update = seconds(record["update_seconds_frozen"])  # over the updates that both runs did
        memory += _change(record["peak_memory_ordinary"], peak)
        unclear = bool(record["update_time_caveat"])
        if ratio := record["update_time_ratio"]:
            update += " (unclear)" if unclear else f" ({ratio:.3f}×)"
    freezing = (result.get("intervention") or {}).get("seconds")
    whole = {}
    for clock in ("everything", "warm"):
        own = run.seconds(clock)
        whole[clock] = seconds(own)
        if comparison and not unclear:  # a run is as long as its updates
            whole[clock] += _change(comparison.ordinary.seconds(clock), own)
    return {
        "heads frozen": f"{edited} of {run.num_heads}{pruned}",
        "loss, nats": None if loss is None else f"{loss:.4f}",
        "perplexity": None if perplexity is None else f"{perplexity:.3f}",
        "change, 95% interval": perplexity_change(record) if record else None,
        "median update": update,
        "peak memory": memory,
        "freezing took": seconds(sum(freezing.values()) if freezing else None),
        "whole run": whole["everything"],
        "whole run, warm": whole["warm"],
    }


def _change(before: float | None, after: float | None) -> str:
    change = change_percent(before, after)
    return "" if change is None else f" ({signed(change)})"


def _sample(record: Record) -> str:
    """Say by how many windows and resamples perplexities are compared, and what is unclear about times."""
    block = f" of blocks of {record['block']} neighbours" if record["block"] > 1 else ""
    facts = f"{number(record['windows'])} paired windows, {number(record['resamples'])} resamples{block}"
    return "; ".join(filter(None, [facts, record["update_time_caveat"]])) + "."
