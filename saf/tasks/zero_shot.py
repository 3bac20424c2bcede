"""Zero-shot tasks: `read_questions` reads their public files, `zero_shot_record` records a model's answers.

Prompts, choices and metrics are lm-eval's own (`saf.hf.lm_eval`). This file never imports it: records are read and
compared where it is not installed.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from saf.data.reading import read_records, text_lines
from saf.errors import DataError
from saf.records.files import entries_hash, file_hash, write_json
from saf.records.result import read_result, result_header
from saf.records.table import Table
from saf.tasks.base import Answer, TaskAnswers, read_answers, summary, write_answers

Record = dict[str, Any]
TooLong = Literal["refuse", "cut"]
"""What happens to a question that is longer than the model takes: refused, or its context cut at its beginning."""
ZERO_SHOT_FILES = ("zero_shot.json", "zero_shot.jsonl")
"""Files of an evaluation by zero-shot tasks: its record, and every question's answer, a line each."""
TaskName = Literal["hellaswag", "piqa", "arc_easy", "sst2", "boolq"]
"""lm-eval's names of the tasks, in the order of the paper's table."""


class ZeroShotTask(NamedTuple):
    """Where a task is defined and where its questions lie."""

    definition: str
    """The folder of lm-eval's tasks that defines it."""
    files: tuple[str, ...]
    """Names of its public file of questions, the split that lm-eval evaluates first; each may be gzipped."""
    question: Callable[[Record], Record]
    """Converts a file's record to a question, with the columns of the hub's data set."""


def read_questions(name: TaskName, folder: Path, *, limit: int | None = None) -> tuple[list[Record], dict[str, str]]:
    """Read the first `limit` questions of a task, or all, from `folder`/NAME, with the columns of the hub's data set.

    The second value has the `path` of the file and its SHA-256. Raises DataError for a file that cannot be read.
    """
    task, rows = ZERO_SHOT[name], []
    if (path := _find(folder / name, task.files)) is None:
        names = " or ".join(task.files)
        raise DataError(f"{folder / name} holds no {names}, gzipped or not; leave the folder out to take the hub's")
    records, sums = read_records(path) or iter(()), {path.name: file_hash(path)}
    # PIQA has its labels in a file of their own.
    if (file := _find(path.parent, [f"{path.name.partition('.')[0]}-labels.lst"])) is not None:
        labels, unlabelled = [line.strip() for line in text_lines(file)], list(records)
        if len(labels) != len(unlabelled):
            raise DataError(f"{path} holds {len(unlabelled)} questions, {file} {len(labels)} labels")
        pairs = zip(unlabelled, labels, strict=True)
        records = ((place, record | {"label": label}) for (place, record), label in pairs)
        sums[file.name] = file_hash(file)
    for place, record in islice(records, limit):
        try:
            rows.append(task.question(record))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            problem = f"no question of {name} ({type(error).__name__}: {error})"
            raise DataError(f"{path}, {place}: {problem}") from error
    if not rows:
        raise DataError(f"{path} holds no question")
    # Of one file the plain sum, which anyone can check.
    return rows, {"path": str(path), "sha256": entries_hash(sums) if len(sums) > 1 else sums[path.name]}


def _find(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the first of these files that the folder has, gzipped or not."""
    paths = (folder / f"{name}{suffix}" for name in names for suffix in ("", ".gz"))
    return next((path for path in paths if path.is_file()), None)


def _label(value: Any, choices: int) -> int:
    # Files have labels as numbers or as text. GLUE's -1, a hidden label, would be counted as a wrong answer.
    if str(value).strip() not in map(str, range(choices)):
        raise ValueError(f"label must be from 0 to {choices - 1}, got {value!r}")
    return int(value)


def _hellaswag(record: Record) -> Record:
    first, last = record.get("ctx_a"), record.get("ctx_b")
    if first is None or last is None:  # some copies of the file have the whole context alone
        first, last = split_context(record["ctx"])
    label = str(_label(record["label"], len(record["endings"])))  # text, as in the hub's column
    context = {"activity_label": record["activity_label"], "ctx_a": first, "ctx_b": last}
    return {**context, "endings": record["endings"], "label": label}


def split_context(context: str) -> tuple[str, str]:
    """Split a context into its whole sentences and the beginning of a sentence behind them; either may be empty.

    >>> split_context("A man is on a roof. he"), split_context("How to sing. Stand up.")
    (('A man is on a roof.', 'he'), ('How to sing. Stand up.', ''))
    """
    if re.search(r"""[.!?]["')]*$""", context):
        return context, ""
    match = re.fullmatch(r"""(.*[.!?]["')]*) (.+)""", context, flags=re.DOTALL)
    return (match[1], match[2]) if match else ("", context)


def _piqa(record: Record) -> Record:
    return {name: record[name] for name in ("goal", "sol1", "sol2")} | {"label": _label(record["label"], 2)}


def _arc(record: Record) -> Record:
    """Return ARC's question, whose choices are named A to E or 1 to 4, and the answer by one of these names."""
    question, key = record["question"], str(record["answerKey"])
    choices = {name: [str(choice[name]) for choice in question["choices"]] for name in ("text", "label")}
    if choices["label"].count(key) != 1:
        raise ValueError(f"the answer {key!r} names no choice of {choices['label']}")
    return {"id": record["id"], "question": question["stem"], "choices": choices, "answerKey": key}


def _sst2(record: Record) -> Record:
    return {"sentence": record["sentence"], "label": _label(record["label"], 2)}  # GLUE's sentences end in a space


def _boolq(record: Record) -> Record:
    if not isinstance(record["label"], bool):  # 0 and 1 would be of a converted file, in either meaning
        raise ValueError(f"label must be true or false, got {record['label']!r}")
    return {"question": record["question"], "passage": record["passage"], "label": int(record["label"])}


ZERO_SHOT: dict[TaskName, ZeroShotTask] = {
    "hellaswag": ZeroShotTask("hellaswag", ("hellaswag_val.jsonl",), _hellaswag),
    "piqa": ZeroShotTask("piqa", ("valid.jsonl",), _piqa),
    "arc_easy": ZeroShotTask("arc", ("ARC-Easy-Test.jsonl", "ARC-Easy-Dev.jsonl"), _arc),
    "sst2": ZeroShotTask("glue/sst2", ("dev.tsv",), _sst2),
    "boolq": ZeroShotTask("super_glue/boolq", ("val.jsonl",), _boolq),
}
"""lm-eval evaluates ARC's test split, and so did the paper: its 80.43% is 1,911 of these 2,376 questions, and no whole
number of the 570 of validation."""


# --- the record of an evaluation


def task_answers(answers: Sequence[Answer], **facts: Any) -> TaskAnswers:
    """Summarise answers; `facts` are a task's `version`, the `source` of its questions, and `labels` of choices."""
    record = {**facts, **summary(answers)}
    if all("right_norm" in answer for answer in answers):
        record["accuracy_norm"] = sum(answer["right_norm"] for answer in answers) / len(answers)
    return TaskAnswers(record, answers)


def zero_shot_record(
    tasks: Mapping[str, TaskAnswers],
    settings: Mapping[str, Any],
    *,
    out: Path | None = None,
    facts: Mapping[str, Any],
    **header: Any,
) -> dict[str, Any]:
    """Return the record of an evaluation by zero-shot tasks; `out` is a folder for it and every answer.

    `facts` are `longest`, the most tokens of an input, the `precision`, and `of`, the model's `model_facts`.
    """
    records = {name: record for name, (record, _) in tasks.items()}
    written = {**result_header("zero_shot", settings, **header), **facts, "tasks": records}
    if out is not None:  # the answers first: the record has their hash
        answers = {name: answers for name, (_, answers) in tasks.items()}
        written["answers_sha256"] = write_answers(out / ZERO_SHOT_FILES[1], answers)
        write_json(out / ZERO_SHOT_FILES[0], written)
    return written


def read_zero_shot(folder: Path | str) -> tuple[dict[str, Any], dict[str, TaskAnswers]]:
    """Read an evaluation's record, and its answers by task; raise InputError for a file missing or damaged."""
    table, answers = (Path(folder) / name for name in ZERO_SHOT_FILES)
    record = read_result(table)
    return record, read_answers(answers, record["tasks"], record["answers_sha256"])


def zero_shot_tables(record: Mapping[str, Any]) -> list[Table]:
    """Tabulate one evaluation: accuracies, and how often each choice is taken, a row a task."""
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
    return [Table.of("Zero-shot tasks", columns, rows, notes).used(), choices_table(record["tasks"], taken)]


def choices_table(tasks: Mapping[str, Mapping[str, Any]], taken: Mapping[str, Mapping[str, Any]]) -> Table:
    """Tabulate how often each choice is right, and how often models take it: `taken` by model, then by task."""
    rows = []
    for name, task in tasks.items():
        counts = (task["answers"], *(of[name] for of in taken.values()))
        rows.append([name, *(counts_text(each, task.get("labels", ())) for each in counts)])
    return Table.of("How often each choice is right, and is taken", ["task", "right", *taken], rows)


def counts_text(counts: Mapping[str, int], labels: Sequence[str]) -> str:
    """Show how often each choice was taken, by its name, else by its letter.

    >>> counts_text({"0": 3, "1": 1}, ("no", "yes")), counts_text({"0": 3, "3": 1}, ())
    ('no 3, yes 1', 'A 3, D 1')
    """
    names = labels or "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return ", ".join(f"{names[int(number)]} {count:,}" for number, count in counts.items())
