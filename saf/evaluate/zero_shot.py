"""Zero-shot evaluations: a model's answers to tasks with choices, their record and files, and their paired changes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from saf.evaluate.answers import summary
from saf.evaluate.paired import holm, paired_answers
from saf.records.files import check_file, file_hash, read_lines, write_json, write_lines
from saf.records.result import read_result, result_header

FILES = ("zero_shot.json", "zero_shot.jsonl")
"""Files that an evaluation writes: its record, and every question's answer, a line each."""
TooLong = Literal["refuse", "cut"]
"""What happens to a question that is longer than the model takes: refused, or its context cut at its beginning."""
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
        """Summarise accuracy, its standard error over questions, and how often each choice is right and is taken."""
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

    `longest` is the most tokens of an input, `of` the model's `model_facts`; `header` goes to `result_header`.
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
        record["answers_sha256"] = file_hash(write_lines(out / FILES[1], lines))
        write_json(out / FILES[0], record)
    return record


def read_zero_shot(folder: Path | str) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Read the record of an evaluation and its answers by task; raise InputError for a file missing or damaged."""
    table, answers = (Path(folder) / name for name in FILES)
    record = read_result(table)
    check_file(answers, sha256=record.get("answers_sha256"))
    by_task: dict[str, list[dict[str, Any]]] = {name: [] for name in record["tasks"]}
    for line in read_lines(answers):
        by_task[line["task"]].append(line)
    return record, by_task


def paired_tasks(ordinary: AnswersByTask, frozen: AnswersByTask) -> dict[str, Any]:
    """Compute the paired change of each task, with p-values corrected over the tasks (`p_holm`), and the mean change.

    Accuracies are shares. Raises CompareError for other questions.
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
