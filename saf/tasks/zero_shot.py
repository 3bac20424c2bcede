"""The paper's zero-shot tasks: where lm-eval defines each, and their public files, read as the hub names their columns.

Prompts, choices and metrics are lm-eval's own. What is here brings the questions to them from files of this machine.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from saf.data.reading import read_lines
from saf.errors import DataError
from saf.records.files import entries_hash, file_hash
from saf.tasks.examples import records_of, sst2_rows

TaskName = Literal["hellaswag", "piqa", "arc_easy", "sst2", "boolq"]
"""lm-eval's names of the tasks, in the order of the paper's table."""
Question = dict[str, Any]
"""One question with the columns of the hub's data set."""


@dataclass(frozen=True, kw_only=True)
class ZeroShotTask:
    """Hold where a task is defined and where its questions lie."""

    definition: str
    """The folder of lm-eval's tasks that defines it."""
    files: tuple[str, ...]
    """Names of its public file of questions, the split that lm-eval evaluates first; each may be gzipped."""
    read: Callable[[Path], Iterator[Question]]


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Hold the questions of a file."""

    rows: list[Question]
    path: Path
    sha256: str
    """Of the file, and of the file of labels beside it where there is one."""


def read_questions(name: TaskName, folder: Path, *, limit: int | None = None) -> Questions:
    """Return the first `limit` questions of a task, or all, from `folder`/NAME.

    Raises:
        DataError: Its file is missing or damaged.
    """
    task, path = ZERO_SHOT[name], find_questions(name, folder)
    if path is None:
        raise DataError(
            f"{folder / name} holds no {' or '.join(task.files)}, gzipped or not; expected the task's public file, or "
            "leave the folder of tasks out to take the hub's"
        )
    try:
        rows = list(islice(task.read(path), limit))
    except (KeyError, TypeError, AttributeError) as error:
        told = f"{type(error).__name__}: {error}"
        raise DataError(f"{path} is not laid out as the public file of {name} is ({told})") from error
    if not rows:
        raise DataError(f"{path} holds no question")
    return Questions(rows=rows, path=path, sha256=_hash(path))


def find_questions(name: TaskName, folder: Path) -> Path | None:
    """Return the public file of a task's questions in `folder`/NAME; None where it has none."""
    files = ((folder / name / file, folder / name / f"{file}.gz") for file in ZERO_SHOT[name].files)
    return next((path for both in files for path in both if path.is_file()), None)


def questions_hash(folder: Path) -> str:
    """Return one SHA-256 of the questions of all tasks that a folder has."""
    found = {name: find_questions(name, folder) for name in ZERO_SHOT}
    return entries_hash({name: _hash(path) for name, path in found.items() if path})


def _hash(path: Path) -> str:
    """Return one SHA-256 of a file of questions and its labels."""
    labels = _labels_beside(path)
    if not labels.is_file():
        return file_hash(path)
    return entries_hash({each.name: file_hash(each) for each in (path, labels)})


def _read_hellaswag(path: Path) -> Iterator[Question]:
    """Yield HellaSwag's questions; what its context ends with, `ctx_b`, is cut off where a file has one context."""
    for number, record in records_of(path, "activity_label", "ctx", "endings", "label"):
        first, last = record.get("ctx_a"), record.get("ctx_b")
        if first is None or last is None:
            first, last = split_context(record["ctx"])
        _check(path, number, record["label"], len(record["endings"]))
        shown = {"activity_label": record["activity_label"], "ctx_a": first, "ctx_b": last}
        yield {**shown, "endings": record["endings"], "label": str(record["label"])}


def split_context(context: str) -> tuple[str, str]:
    """Return the whole sentences of a context, and the beginning of a sentence behind them; either may be empty.

    >>> split_context("A man is on a roof. he"), split_context("How to sing. Stand up.")
    (('A man is on a roof.', 'he'), ('How to sing. Stand up.', ''))
    """
    if re.search(r"""[.!?]["')]*$""", context):
        return context, ""
    found = re.fullmatch(r"""(.*[.!?]["')]*) (.+)""", context, flags=re.DOTALL)
    return (found[1], found[2]) if found else ("", context)


def _read_piqa(path: Path) -> Iterator[Question]:
    """Yield PIQA's questions, each with the label on the same line of the file of labels beside it."""
    labels = [line.strip() for _, line in read_lines(_labels_beside(path))]
    records = list(records_of(path, "goal", "sol1", "sol2"))
    if len(labels) != len(records):
        raise DataError(f"{path} holds {len(records)} questions, {_labels_beside(path)} {len(labels)} labels")
    for (number, record), label in zip(records, labels, strict=True):
        _check(path, number, label, 2)
        yield {name: record[name] for name in ("goal", "sol1", "sol2")} | {"label": int(label)}


def _labels_beside(path: Path) -> Path:
    """Return the file of labels that belongs to one of questions, gzipped where that alone is there."""
    plain = path.with_name(f"{path.name.partition('.')[0]}-labels.lst")
    packed = plain.with_name(f"{plain.name}.gz")
    return packed if packed.is_file() and not plain.is_file() else plain


def _read_arc(path: Path) -> Iterator[Question]:
    """Yield ARC's questions, whose choices are called A to E or 1 to 4, and the answer by one of these names."""
    for number, record in records_of(path, "id", "question", "answerKey"):
        asked, key = record["question"], str(record["answerKey"])
        choices = {
            "text": [choice["text"] for choice in asked["choices"]],
            "label": [str(choice["label"]) for choice in asked["choices"]],
        }
        if choices["label"].count(key) != 1:
            raise DataError(f"{path}, line {number}: the answer {key!r} names no choice of {choices['label']}")
        yield {"id": record["id"], "question": asked["stem"], "choices": choices, "answerKey": key}


def _read_sst2(path: Path) -> Iterator[Question]:
    """Yield SST-2's sentences, with the space that ends them in GLUE's file."""
    for number, sentence, label in sst2_rows(path):
        _check(path, number, label, 2)
        yield {"sentence": sentence, "label": int(label)}


def _read_boolq(path: Path) -> Iterator[Question]:
    """Yield BoolQ's questions."""
    for number, record in records_of(path, "question", "passage", "label"):
        if not isinstance(record["label"], bool):
            raise DataError(f"{path}, line {number}: expected a label true or false; got {record['label']!r}")
        yield {"question": record["question"], "passage": record["passage"], "label": int(record["label"])}


def _check(path: Path, number: int, label: Any, choices: int) -> None:
    """Raise DataError unless a label is the number of a choice."""
    if str(label) not in map(str, range(choices)):
        raise DataError(f"{path}, line {number}: expected a label from 0 to {choices - 1}; got {label!r}")


ZERO_SHOT: dict[TaskName, ZeroShotTask] = {
    "hellaswag": ZeroShotTask(definition="hellaswag", files=("hellaswag_val.jsonl",), read=_read_hellaswag),
    "piqa": ZeroShotTask(definition="piqa", files=("valid.jsonl",), read=_read_piqa),
    "arc_easy": ZeroShotTask(definition="arc", files=("ARC-Easy-Test.jsonl", "ARC-Easy-Dev.jsonl"), read=_read_arc),
    "sst2": ZeroShotTask(definition="glue/sst2", files=("dev.tsv",), read=_read_sst2),
    "boolq": ZeroShotTask(definition="super_glue/boolq", files=("val.jsonl",), read=_read_boolq),
}
"""lm-eval evaluates ARC's test split, and so did the paper: its 80.43% is 1,911 of these 2,376 questions, and no whole
number of the 570 of validation."""
