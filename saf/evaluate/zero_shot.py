"""Zero-shot evaluations: a model's answers to tasks with choices, their record and files, and their paired changes."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

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


class TaskAnswers(NamedTuple):
    """A model's answers to one task."""

    record: Mapping[str, Any]
    """What `of` summarises."""
    answers: Sequence[Answer]

    @classmethod
    def of(cls, answers: Sequence[Answer], **facts: Any) -> "TaskAnswers":
        """Summarise accuracy, its standard error over questions, and how often each choice is right and is taken.

        `facts` are the task's `version`, the `source` of its questions, and `labels`, names of the choices where all
        questions have the same.
        """
        record = {**facts, **summary(answers)}
        if all("right_norm" in answer for answer in answers):
            record["accuracy_norm"] = sum(answer["right_norm"] for answer in answers) / len(answers)
        return cls(record, answers)


AnswersByTask = Mapping[str, tuple[Mapping[str, Any], Sequence[Answer]]]
"""`TaskAnswers` by task."""


def zero_shot_record(
    tasks: AnswersByTask,
    settings: Mapping[str, Any],
    *,
    out: Path | None = None,
    facts: Mapping[str, Any],
    **header: Any,
) -> dict[str, Any]:
    """Make the record of an evaluation, and write it with every answer into `out` if given.

    `facts` are `longest`, the most tokens of an input, the `precision`, and `of`, the model's `model_facts`; `header`
    goes to `result_header`.
    """
    records = {name: record for name, (record, _) in tasks.items()}
    written = {**result_header("zero_shot", settings, **header), **facts, "tasks": records}
    if out is not None:
        lines = [{"task": name, **answer} for name, (_, answers) in tasks.items() for answer in answers]
        written["answers_sha256"] = file_hash(write_lines(out / FILES[1], lines))
        write_json(out / FILES[0], written)
    return written


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
