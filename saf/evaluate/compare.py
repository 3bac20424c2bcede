"""Compare an ordinary and a frozen model: two finished runs, or two evaluations of the same text and questions.

Both are measured by perplexity, or by their accuracy: on questions, on queries of associative recall, on zero-shot
tasks. A record of accuracy has the paired change of each task.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saf.errors import CompareError, InputError, SafWarning
from saf.evaluate.answers import ZERO_SHOT_FILES, TaskAnswers, has_answers, paired_tasks, read_answers, read_zero_shot
from saf.evaluate.paired import RESAMPLES, delta_of_windows
from saf.evaluate.passes import PARENT
from saf.evaluate.perplexity import EVALUATION, read_evaluation
from saf.evaluate.recall import paired_tests, read_recall, unlearnt_reason
from saf.heads import EDITED
from saf.machine import untimed_updates
from saf.records.files import read_json, read_lines, write_json
from saf.records.result import result_header
from saf.records.run import RecordedRun

Record = dict[str, Any]
PERPLEXITY, ACCURACY = "comparison", "accuracy_comparison"
"""The kinds of records."""
_MINIMUM_TIMED_UPDATES = 5
"""The median of fewer says nothing about updates whose times spread by some percent."""
# Files may lie elsewhere: the data's fingerprint, which covers tokenizer and examples, is compared.
_IRRELEVANT = frozenset({"data.folder", "data.tokenizer", "data.test"})
_BUDGETS = ("update_budget", "time_budget_seconds")
"""By these, arms of one parent do as many updates as their speeds allow: they are matched in time."""
_QUERIES = ("vocabulary", "power", "random_fill", "test_examples")
"""Settings of recall that decide the queries of a test, beside its tokens and pairs."""
_EVALUATION_SETTINGS = ("partition", "length", "precision", "data_fingerprint")
_PAIR = ("ordinary", "frozen")
_SHAPE = ("architecture", "vocab_size", "hidden_size", "heads_by_layer", "head_dim")


# --- runs


def compare_runs(
    ordinary: RecordedRun | Path | str,
    frozen: RecordedRun | Path | str,
    *,
    out: Path | str | None = None,
    allow_differences: bool = False,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Record:
    """Compare two finished runs by what both are measured by; the record is written to `out`/compare.json if given.

    Runs of text give delta-PPL with its interval, update times and memory. `update_time_ratio` is ordinary / frozen, of
    separate processes: above 1 the frozen arm is faster; `update_time_caveat` says why it is unclear, "" where it is
    clear. Runs finetuned on questions give what `paired_tasks` returns, runs of recall what `paired_tests` returns.

    Raises CompareError for runs that differ in more than the freezing (`allow_differences` allows all but other windows
    or questions), InputError for one that has not ended or whose files are not those of its result.
    """
    pair = [run if isinstance(run, RecordedRun) else RecordedRun.open(run) for run in (ordinary, frozen)]
    one, other = pair
    results, measures = [run.finished_result() for run in pair], [_measure_of(run) for run in pair]
    if measures[0] != measures[1]:
        raise InputError(f"both runs must be measured alike, got {' and '.join(measures)}")
    of_text = measures[0] == "perplexity"
    if of_text and other.arm == "ordinary":
        raise CompareError(f"{other.folder} froze or pruned no heads; name the ordinary arm first, the other second")
    record = _header(
        PERPLEXITY if of_text else ACCURACY,
        {"allow_differences": allow_differences, "resamples": resamples, "seed": seed},
        (one.folder, other.folder),
        hashes=[result["provenance"]["checkpoints"].get("final") for result in results],
        heads=[run.head_counts for run in pair],
        lines=differences(one, other) if of_text else _setting_differences(one, other),
    )
    record |= {"heads": len(other.edited_heads), "num_heads": other.num_heads}
    if of_text:
        record |= _compare_perplexity(one, other, resamples=resamples, seed=seed)
        record["update_time_caveat"] = speed_caveat(record)
    elif measures[0] == "answers":
        record |= paired_tasks(*({"answers": _task_answers(run)} for run in pair))
    else:
        record |= _compare_recall(one, other)
    if out is not None:
        write_json(Path(out) / "compare.json", record)
    return record


def _header(
    kind: str,
    settings: Record,
    folders: Sequence[Path | str],
    *,
    hashes: Sequence[str | None],
    heads: Sequence[Mapping[str, int]],
    lines: Sequence[str],
    data: Mapping[str, str] | None = None,
) -> Record:
    """Return the entries of every comparison; `lines` are differences, which raise CompareError unless allowed."""
    if lines and not settings["allow_differences"]:
        listed = "\n  ".join(lines)
        raise CompareError(f"they differ in more than the freezing (--allow-differences compares anyway):\n  {listed}")
    return {
        **result_header(kind, settings, checkpoints=dict(zip(_PAIR, hashes, strict=True)), data=data),
        **dict(zip(_PAIR, map(str, folders), strict=True)),
        "heads_by_kind": list(heads),
        "differences": list(lines),
    }


def _measure_of(run: RecordedRun) -> str:
    return "answers" if has_answers(run) else "recall" if "recall" in run.finished_result() else "perplexity"


def _compare_perplexity(ordinary: RecordedRun, frozen: RecordedRun, *, resamples: int, seed: int) -> Record:
    (record, losses), (other, frozen_losses) = map(_final_evaluation, (ordinary, frozen))
    if record["windows_hash"] != other["windows_hash"]:
        raise CompareError("both arms must be evaluated on the same windows, got different windows")
    peaks = (run.finished_result().get("peak_memory_bytes") for run in (ordinary, frozen))
    return {
        **delta_of_windows(losses, frozen_losses, resamples=resamples, seed=seed),
        **compare_update_times(ordinary, frozen),
        **dict(zip(("peak_memory_ordinary", "peak_memory_frozen"), peaks, strict=True)),
    }


def _final_evaluation(run: RecordedRun) -> tuple[Record, Tensor]:
    record, losses = read_evaluation(run.folder)
    if not math.isclose(record["loss"], expected := run.finished_result()["report_loss"], rel_tol=1e-6):
        ends = f"of the run's end, whose loss is {expected:.6f}, got one of {record['loss']:.6f}"
        raise InputError(f"{run.folder / EVALUATION} must be {ends}; take all files of the run")
    return record, losses


def _task_answers(run: RecordedRun) -> TaskAnswers:
    return TaskAnswers({"labels": (), **run.finished_result()}, read_answers(run))


def _compare_recall(ordinary: RecordedRun, frozen: RecordedRun) -> Record:
    left, right = ((run.config.get("data") or {}).get("mqar") or {} for run in (ordinary, frozen))
    if lines := list(_difference_lines(left, right, _QUERIES)):
        raise CompareError(f"the runs were tested on different queries ({'; '.join(lines)}); test both on the same")
    problem = unlearnt_reason(ordinary.finished_result()["recall"])
    return {**paired_tests(read_recall(ordinary), read_recall(frozen)), "not_learnt": problem}


# --- differences of runs


def differences(ordinary: RecordedRun, frozen: RecordedRun) -> list[str]:
    """List every difference of two runs of text that is not the freezing; empty when they are comparable."""
    parents = {(run.config.get("parent") or {}).get("hash") for run in (ordinary, frozen)}
    budgets = [any(run.config["train"].get(name) for name in _BUDGETS) for run in (ordinary, frozen)]
    matched = len(parents) == 1 and None not in parents and all(budgets)
    without = [f"train.{name}" for name in _BUDGETS] if matched else []
    one, other = (
        {"device": run.config.get("device")}
        | {key: run.finished_result().get(key) for key in ("updates", "tokens") if not matched}
        | {f"evaluation {key}": (run.evaluation or {}).get(key) for key in _EVALUATION_SETTINGS}
        for run in (ordinary, frozen)
    )
    settings = _setting_differences(ordinary, frozen, without=without)
    return [*settings, *_difference_lines(one, other), *_parent_difference(ordinary, frozen)]


def _setting_differences(ordinary: RecordedRun, frozen: RecordedRun, without: Sequence[str] = ()) -> list[str]:
    sections = ({name: run.config.get(name) for name in ("model", "train", "data")} for run in (ordinary, frozen))
    left, right = map(_flat, sections)
    return list(_difference_lines(left, right, sorted((left.keys() | right.keys()) - _IRRELEVANT - {*without})))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by names with dots."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _difference_lines(
    ordinary: Mapping[str, Any], frozen: Mapping[str, Any], names: Sequence[str] | None = None
) -> Iterator[str]:
    for name in ordinary if names is None else names:
        if (one := ordinary.get(name)) != (other := frozen.get(name)):
            yield f"{name}: {one!r} in the ordinary arm, {other!r} in the frozen arm"


def _parent_difference(ordinary: RecordedRun, frozen: RecordedRun) -> list[str]:
    """Require that both arms start from the same weights, or the frozen one from a checkpoint of the other."""
    parents = [run.config.get("parent") or {} for run in (ordinary, frozen)]
    hashes = [parent.get("hash") for parent in parents]
    origins = {hashes[1], parents[1].get("frozen_from")} - {None}
    if hashes[0] == hashes[1] or origins & (_checkpoint_hashes(ordinary) | {hashes[0]}):
        return []
    starts = [f"checkpoint {value[:12]}" if value else "no checkpoint" for value in hashes]
    return [f"parent: the ordinary arm starts from {starts[0]}, the frozen arm from {starts[1]}"]


def _checkpoint_hashes(run: RecordedRun) -> set[str]:
    """Return the hashes of a run's checkpoints; those of removed ones come from its log."""
    manifests = (run.folder / "checkpoints").glob("*/manifest.json")
    logged = {str(line.get("hash")) for line in read_lines(run.folder / "clock.jsonl")}
    branch = run.result["provenance"]["checkpoints"].get("branch") if run.result else None
    return {str(read_json(manifest).get("hash")) for manifest in manifests} | logged | ({branch} if branch else set())


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
    common = sorted(update for update in own.keys() & other.keys() if update > start)
    record: Record = {"update_time_ratio": None, "timed_updates": [common[0], common[-1]] if common else None}
    for arm, times in zip(_PAIR, (own, other), strict=True):
        taken = torch.tensor([times[update] for update in common], dtype=torch.float64)
        shares = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
        low, median, high = taken.quantile(shares).tolist() if common else [None] * 3
        record |= {f"update_seconds_{arm}": median, f"update_seconds_spread_{arm}": [low, high] if common else None}
    if len(common) >= _MINIMUM_TIMED_UPDATES and record["update_seconds_frozen"]:
        record["update_time_ratio"] = record["update_seconds_ordinary"] / record["update_seconds_frozen"]
    return record


def speed_caveat(record: Mapping[str, Any]) -> str:
    """Say why a record's ratio of update times is unclear; "" where it is clear."""
    if not record["update_time_ratio"]:
        return "too few updates to tell which arm is faster"
    if was_busy(record):
        return (
            "timing unclear: the machine was busy, for heads that took no time at all would save less than was measured"
        )
    spreads = sorted([record["update_seconds_spread_ordinary"], record["update_seconds_spread_frozen"]])
    if spreads[0][1] < spreads[1][0]:
        return ""
    bound = free_heads_bound(record["heads"], record["num_heads"])
    most = "" if bound is None else f" (the work of these heads is worth at most {bound:.2f}×)"
    return f"timing unclear: the spreads of both arms overlap{most}"


def was_busy(record: Mapping[str, Any]) -> bool:
    """Whether the machine had other work during one of the runs: their ratio is beyond the free bound."""
    bound = free_heads_bound(record["heads"], record["num_heads"])
    return bool(record["update_time_ratio"]) and bound is not None and record["update_time_ratio"] > bound


def free_heads_bound(heads: int, num_heads: int) -> float | None:
    """Compute the speedup that no update reaches by freezing or pruning `heads` heads; None where all of them are.

    An update that did nothing but the work of heads would be 1 / (1 - r) times as fast with a share r of them gone.
    """
    return None if heads >= num_heads else num_heads / (num_heads - heads)


# --- evaluations


def compare_folders(
    ordinary: Path, frozen: Path, *, allow_differences: bool = False, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[Record | None, Record | None]:
    """Compare the perplexities and the zero-shot tasks of two folders that `saf evaluate --out` wrote.

    Each part is None where not both folders have it; raises InputError where neither part is shared.
    """
    options, changes, tasks = {"allow_differences": allow_differences}, None, None
    if _both_have(ordinary, frozen, EVALUATION):
        changes = compare_evaluations(ordinary, frozen, **options, resamples=resamples, seed=seed)
    if _both_have(ordinary, frozen, ZERO_SHOT_FILES[0]):
        tasks = compare_zero_shot(ordinary, frozen, **options)
    if changes is None and tasks is None:
        raise InputError(f"{ordinary} and {frozen} are evaluations of different things; evaluate both on the same")
    return changes, tasks


def _both_have(ordinary: Path, frozen: Path, name: str) -> bool:
    holders = [folder for folder in (ordinary, frozen) if (folder / name).is_file()]
    if len(holders) == 1:
        warnings.warn(f"{name} is in {holders[0]} alone: it is not compared", SafWarning, stacklevel=4)
    return len(holders) == 2


def compare_evaluations(
    ordinary: Path | str,
    frozen: Path | str,
    *,
    allow_differences: bool = False,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Record:
    """Compute delta-PPL with its interval from two folders that `saf evaluate --out` wrote.

    Raises CompareError where they are of other windows or another precision, the models differ in more than the
    freezing (`allow_differences` allows that alone), or the second one has no frozen or pruned heads.
    """
    folders, settings = (ordinary, frozen), {"allow_differences": allow_differences}
    (record, losses), (other, frozen_losses) = map(read_evaluation, folders)
    names = ("length", "data_fingerprint", "bos", "windows_hash", "precision")
    _check_same({name: (record.get(name), other.get(name)) for name in names}, folders)
    settings |= {"resamples": resamples, "seed": seed}
    return {
        **_evaluation_header(PERPLEXITY, settings, folders, (record, other)),
        "length": record["length"],
        "precision": record["precision"],
        **delta_of_windows(losses, frozen_losses, resamples=resamples, seed=seed),
    }


def compare_zero_shot(ordinary: Path | str, frozen: Path | str, *, allow_differences: bool = False) -> Record:
    """Compare two evaluations of the same zero-shot questions, task by task, as `paired_tasks` does.

    Raises CompareError for other tasks or questions, another precision, questions that were shortened to other lengths,
    or models that differ in more than the freezing (`allow_differences` allows that alone).
    """
    folders = (ordinary, frozen)
    (one, answers), (other, frozen_answers) = map(read_zero_shot, folders)
    names = ["precision"]
    if any(task["shortened"] for record in (one, other) for task in record["tasks"].values()):
        names.append("longest")
    versions = tuple({name: task["version"] for name, task in record["tasks"].items()} for record in (one, other))
    _check_same({"tasks": versions, **{name: (one[name], other[name]) for name in names}}, folders)
    header = _evaluation_header(ACCURACY, {"allow_differences": allow_differences}, folders, (one, other))
    return {**header, **paired_tasks(answers, frozen_answers)}


def _check_same(pairs: Mapping[str, tuple[Any, ...]], folders: Sequence[Path | str]) -> None:
    for name, (one, other) in pairs.items():
        if one != other:
            values = f"{one} in {folders[0]}, {other} in {folders[1]}"
            raise CompareError(f"the evaluations differ in {name}: {values}; evaluate both alike")


def _evaluation_header(kind: str, settings: Record, folders: Sequence[Path | str], records: Sequence[Record]) -> Record:
    """Return the entries about two models, whose shape and origin may differ in the freezing alone."""
    ordinary, frozen = (record.get("of") or {} for record in records)
    counts = [{kind: facts[kind] for kind in EDITED if kind in facts} for facts in (ordinary, frozen)]
    if "heads_by_layer" in frozen and not any(counts[1].values()):
        raise CompareError(f"the model of {folders[1]} has no frozen or pruned heads; give the ordinary model first")
    lines = list(_difference_lines(ordinary, frozen, _SHAPE if ordinary and frozen else ()))
    checkpoints = [record["provenance"]["checkpoints"] for record in records]
    own = {value for role, value in checkpoints[0].items() if role.startswith(("model", PARENT))}
    origins = {value for role, value in checkpoints[1].items() if role.startswith(PARENT)}
    if own and PARENT in checkpoints[1] and not own & origins:
        origin = checkpoints[1][PARENT][:12]
        remedy = "compare one frozen twice with the one frozen once, or pass --allow-differences"
        lines.append(f"parent: the frozen model was made from {origin}, which is not the ordinary model; {remedy}")
    models = [each.get("model") for each in checkpoints]
    data = {records[0]["partition"]: records[0]["data_fingerprint"]} if "partition" in records[0] else None
    return _header(kind, settings, folders, hashes=models, heads=counts, lines=lines, data=data)
