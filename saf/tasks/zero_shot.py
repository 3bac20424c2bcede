"""The paper's zero-shot tasks: where lm-eval defines each, and their public files, read as the hub names their columns.

Prompts, choices and metrics are lm-eval's own; this module reads the questions from files of this machine.
"""

import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from saf.data.reading import read_lines, read_records
from saf.errors import DataError
from saf.records.files import entries_hash, file_hash

TaskName = Literal["hellaswag", "piqa", "arc_easy", "sst2", "boolq"]
"""lm-eval's names of the tasks, in the order of the paper's table."""
Record = dict[str, Any]


class ZeroShotTask(NamedTuple):
    """Where a task is defined and where its questions lie."""

    definition: str
    """The folder of lm-eval's tasks that defines it."""
    files: tuple[str, ...]
    """Names of its public file of questions, the split that lm-eval evaluates first; each may be gzipped."""
    question: Callable[[Record], Record]
    """Makes a question, with the columns of the hub's data set, of a file's record."""


class Questions(NamedTuple):
    """The questions of a file, with the columns of the hub's data set."""

    rows: list[Record]
    path: Path
    sha256: str
    """Of the file, and of the file of labels beside it where there is one."""


def read_questions(name: TaskName, folder: Path, *, limit: int | None = None) -> Questions:
    """Read the first `limit` questions of a task, or all, from `folder`/NAME; raise DataError when that fails."""
    task = ZERO_SHOT[name]
    paths = (folder / name / f"{file}{suffix}" for file in task.files for suffix in ("", ".gz"))
    if (path := next((path for path in paths if path.is_file()), None)) is None:
        names = " or ".join(task.files)
        raise DataError(f"{folder / name} holds no {names}, gzipped or not; leave the folder out to take the hub's")
    records, sums, rows = read_records(path) or iter(()), {path.name: file_hash(path)}, []
    if (beside := _labels_beside(path)).is_file():
        labels, numbered = [line.strip() for line in read_lines(beside)], list(records)
        if len(labels) != len(numbered):
            raise DataError(f"{path} holds {len(numbered)} questions, {beside} {len(labels)} labels")
        records = ((at, record | {"label": label}) for (at, record), label in zip(numbered, labels, strict=True))
        sums[beside.name] = file_hash(beside)
    for place, record in islice(records, limit):
        try:
            rows.append(task.question(record))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            problem = f"no question of {name} ({type(error).__name__}: {error})"
            raise DataError(f"{path}, {place}: {problem}") from error
    if not rows:
        raise DataError(f"{path} holds no question")
    return Questions(rows, path, entries_hash(sums) if len(sums) > 1 else sums[path.name])


def _labels_beside(path: Path) -> Path:
    """The file of labels that belongs to one of questions, as PIQA has it, gzipped where that alone is there."""
    plain = path.with_name(f"{path.name.partition('.')[0]}-labels.lst")
    packed = plain.with_name(f"{plain.name}.gz")
    return packed if packed.is_file() and not plain.is_file() else plain


def _label(value: Any, choices: int) -> int:
    if str(value).strip() not in map(str, range(choices)):
        raise ValueError(f"label must be from 0 to {choices - 1}, got {value!r}")
    return int(value)


def _hellaswag(record: Record) -> Record:
    first, last = record.get("ctx_a"), record.get("ctx_b")
    if first is None or last is None:
        first, last = split_context(record["ctx"])
    label = str(_label(record["label"], len(record["endings"])))
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
    if not isinstance(record["label"], bool):
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
