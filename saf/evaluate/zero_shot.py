"""Zero-shot evaluations: a model's answers to tasks with choices, by question; two of them, paired by question."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from saf.errors import CompareError
from saf.evaluate.answers import holm, paired_answers, summary
from saf.evaluate.evaluated import check_pair, pair_words
from saf.records.files import check_file, file_hash, read_lines, write_json, write_lines
from saf.records.quantities import signed
from saf.records.result import read_result, result_header
from saf.records.table import Part, Table

WRITTEN = ("zero_shot.json", "zero_shot.jsonl")
"""Files that an evaluation writes: its record, and every question's answer, a line each."""
TooLong = Literal["refuse", "cut"]
"""What is done with a question that is longer than the model takes: refused, or its context cut at its beginning."""
Answer = Mapping[str, Any]
"""How one question is answered, as in `saf.evaluate.answers`: `id`, `answer`, `taken`, `right`, `shortened`,
`log_probs`; where the task has it, `right_norm`, by log-probabilities over the characters of choices."""
AnswersByTask = Mapping[str, tuple[Mapping[str, Any], Sequence[Answer]]]
"""By task, `TaskAnswers.to_dict` and the answers."""


@dataclass(frozen=True, kw_only=True)
class TaskAnswers:
    """A model's answers to one task."""

    answers: Sequence[Answer]
    labels: tuple[str, ...]
    """Names of the choices where all questions have the same; none otherwise."""
    version: str
    """Of the task's definition."""
    source: Mapping[str, Any]
    """Where the questions come from."""

    def to_dict(self) -> dict[str, Any]:
        """Accuracy, its standard error over questions, and how often each choice is right and is taken."""
        record = {"version": self.version, "source": dict(self.source), "labels": list(self.labels)}
        record |= summary(self.answers)
        if all("right_norm" in answer for answer in self.answers):
            record["accuracy_norm"] = sum(answer["right_norm"] for answer in self.answers) / len(self.answers)
        return record


def zero_shot_record(
    tasks: Mapping[str, TaskAnswers],
    settings: Mapping[str, Any],
    *,
    longest: int,
    precision: str,
    of: Mapping[str, Any],
    out: Path | None = None,
    **header: Any,
) -> dict[str, Any]:
    """Make the record of an evaluation, and write it with every answer into `out` if given.

    `longest` is the most tokens of an input, `of` the model's `facts_of`, `header` what `result_header` takes.
    """
    record = {
        **result_header("zero_shot", settings, **header),
        "precision": precision,
        "of": dict(of),
        "longest": longest,
        "tasks": {name: task.to_dict() for name, task in tasks.items()},
    }
    if out is not None:
        lines = [{"task": name, **answer} for name, task in tasks.items() for answer in task.answers]
        record["answers_sha256"] = file_hash(write_lines(out / WRITTEN[1], lines))
        write_json(out / WRITTEN[0], record)
    return record


def read_zero_shot(folder: Path | str) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Read the record of an evaluation and its answers by task; raise InputError for a file missing or damaged."""
    table, answers = (Path(folder) / name for name in WRITTEN)
    record = read_result(table)
    check_file(answers, sha256=record.get("answers_sha256"))
    by_task: dict[str, list[dict[str, Any]]] = {name: [] for name in record["tasks"]}
    for line in read_lines(answers):
        by_task[line["task"]].append(line)
    return record, by_task


def compare_zero_shot(ordinary: Path | str, frozen: Path | str, *, allow_differences: bool = False) -> dict[str, Any]:
    """Compare two evaluations of the same questions, task by task.

    Raises:
        CompareError: Other tasks or questions, another precision, questions that were shortened to other lengths, or
            models that differ in more than the freezing (`allow_differences` passes that alone).
        InputError: A file is missing or damaged.
    """
    (record_o, answers_o), (record_f, answers_f) = pair = read_zero_shot(ordinary), read_zero_shot(frozen)
    records = (record_o, record_f)
    same: dict[str, list[Any]] = {
        "tasks": [sorted(record["tasks"]) for record in records],
        "precision": [record["precision"] for record in records],
        "versions": [{name: task["version"] for name, task in record["tasks"].items()} for record in records],
    }
    if any(answer["shortened"] for _, answers in pair for task in answers.values() for answer in task):
        same["longest"] = [record["longest"] for record in records]
    for name, (one, other) in same.items():
        if one != other:
            remedy = f", cut to one length (saf evaluate --length {min(one, other)})" if name == "longest" else ""
            raise CompareError(
                f"the evaluations differ in {name}: {one} in {ordinary}, {other} in {frozen}; evaluate both models on "
                f"the same questions, in one precision{remedy}"
            )
    facts = check_pair(records, (ordinary, frozen), allow_differences=allow_differences)
    ordinary_hash, frozen_hash = (record["provenance"]["checkpoints"].get("model") for record in records)
    checkpoints = {"ordinary": ordinary_hash, "frozen": frozen_hash}
    head = result_header("zero_shot_comparison", {"allow_differences": allow_differences}, checkpoints=checkpoints)
    names = record_o["tasks"]
    changes = paired_tasks(
        {name: (record_o["tasks"][name], answers_o[name]) for name in names},
        {name: (record_f["tasks"][name], answers_f[name]) for name in names},
    )
    return {**head, "ordinary": str(ordinary), "frozen": str(frozen), **changes, **facts}


def paired_tasks(ordinary: AnswersByTask, frozen: AnswersByTask) -> dict[str, Any]:
    """The paired change of each task, with McNemar's p-value corrected over the tasks, and the mean change.

    Accuracies are shares; `p_holm` is the corrected p-value. Raises CompareError for other questions.
    """
    tasks = {}
    for name, (one, answers) in ordinary.items():
        other, others = frozen[name]
        shared = {key: one[key] for key in ("questions", "labels", "answers")}
        both = {key: [one[key], other[key]] for key in ("accuracy", "taken")}
        tasks[name] = {**shared, **both, **paired_answers(answers, others)}
    corrected = holm([task["p_value"] for task in tasks.values()])
    for task, value in zip(tasks.values(), corrected, strict=True):
        task["p_holm"] = value
    return {"tasks": tasks, "mean_difference": math.fsum(task["difference"] for task in tasks.values()) / len(tasks)}


def zero_shot_tables(record: Mapping[str, Any]) -> list[Part]:
    """Tables of one evaluation: accuracies, and how often each choice is taken, a row a task."""
    rows = []
    for name, task in record["tasks"].items():
        norm = task.get("accuracy_norm")
        accuracy = f"{100 * task['accuracy']:.2f} ± {100 * task['standard_error']:.2f}"
        rows.append([name, f"{task['questions']:,}", accuracy, None if norm is None else f"{100 * norm:.2f}"])
    notes = ["± is the standard error over questions. Accuracy is lm-eval's acc, that by characters its acc_norm."]
    if cut := sum(task["shortened"] for task in record["tasks"].values()):
        notes.append(f"Questions longer than {record['longest']:,} tokens, cut at the beginning: {cut:,}.")
    columns = ["task", "questions", "accuracy, %", "by characters, %"]
    taken = {"the model": {name: task["taken"] for name, task in record["tasks"].items()}}
    return [Table.of("Zero-shot tasks", columns, rows, notes).used(), counts_table(record["tasks"], taken)]


def zero_shot_comparison_tables(record: Mapping[str, Any]) -> list[Part]:
    """Tables of two evaluations, paired by question: changes, and how often each choice is taken."""
    rows = []
    for name, task in record["tasks"].items():
        low, high = (100 * end for end in task["ci95"])
        rows.append(
            [
                name,
                f"{task['questions']:,}",
                *(f"{100 * share:.2f}" for share in task["accuracy"]),
                f"{signed(100 * task['difference'], 2, '')} ({signed(low, 2, '')} to {signed(high, 2, '')})",
                f"{task['gained']:,} / {task['lost']:,}",
                f"{task['p_value']:.3g}",
                f"{task['p_holm']:.3g}",
            ]
        )
    notes = [
        f"Mean change {signed(100 * record['mean_difference'], 2, '')} points. Intervals are 95% over questions, "
        "paired; p is of McNemar's exact test, Holm's correction is over the tasks; a large p shows no equality.",
        "Gained and lost: questions that the frozen or the ordinary model alone answers rightly.",
        *pair_words(record),
    ]
    columns = ["task", "questions", "ordinary, %", "frozen, %", "change", "gained / lost", "p", "Holm"]
    taken = {
        model: {name: task["taken"][place] for name, task in record["tasks"].items()}
        for place, model in enumerate(("ordinary", "frozen"))
    }
    return [Table.of("Zero-shot tasks, paired", columns, rows, notes), counts_table(record["tasks"], taken)]


def counts_table(tasks: Mapping[str, Mapping[str, Any]], taken: Mapping[str, Mapping[str, Any]]) -> Table:
    """A table of how often each choice is right, and how often models take it: `taken` by model, then by task."""
    rows = [
        [name, counted(task["answers"], task["labels"]), *(counted(of[name], task["labels"]) for of in taken.values())]
        for name, task in tasks.items()
    ]
    return Table.of("How often each choice is right, and is taken", ["task", "right", *taken], rows)


def counted(counts: Mapping[str, int], labels: Sequence[str]) -> str:
    """How often each choice was taken, by its name, else by its letter.

    >>> counted({"0": 3, "1": 1}, ("no", "yes")), counted({"0": 3, "3": 1}, ())
    ('no 3, yes 1', 'A 3, D 1')
    """
    names = labels or "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return ", ".join(f"{names[int(number)]} {count:,}" for number, count in counts.items())
