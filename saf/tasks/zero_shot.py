"""The paper's zero-shot tasks: where lm-eval defines each, and their public files, read as the hub names their columns.

Prompts, choices and metrics are lm-eval's own; this module reads the questions from files of this machine.
"""

import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from saf.data.reading import Records, read_lines, read_records
from saf.errors import DataError
from saf.records.files import entries_hash, file_hash

TaskName = Literal["hellaswag", "piqa", "arc_easy", "sst2", "boolq"]
"""lm-eval's names of the tasks, in the order of the paper's table."""
Question = dict[str, Any]
"""One question with the columns of the hub's data set."""


class ZeroShotTask(NamedTuple):
    """Where a task is defined and where its questions lie."""

    definition: str
    """The folder of lm-eval's tasks that defines it."""
    files: tuple[str, ...]
    """Names of its public file of questions, the split that lm-eval evaluates first; each may be gzipped."""
    read: Callable[[Path, Records], Iterator[Question]]
    """Makes questions of a file's records."""


class Questions(NamedTuple):
    """The questions of a file."""

    rows: list[Question]
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
    try:
        rows = list(islice(task.read(path, read_records(path, "") or iter(())), limit))
    except (KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise DataError(f"{path} is not laid out as the public file of {name} is ({problem})") from error
    if not rows:
        raise DataError(f"{path} holds no question")
    labels = _labels_beside(path)
    files = [path, labels] if labels.is_file() else [path]
    sums = {each.name: file_hash(each) for each in files}
    return Questions(rows, path, entries_hash(sums) if len(sums) > 1 else sums[path.name])


def _read_hellaswag(path: Path, records: Records) -> Iterator[Question]:
    """HellaSwag's questions; the end of the context, `ctx_b`, is cut off where a file has one context."""
    for number, record in records:
        first, last = record.get("ctx_a"), record.get("ctx_b")
        if first is None or last is None:
            first, last = split_context(record["ctx"])
        _check_label(path, number, record["label"], len(record["endings"]))
        context = {"activity_label": record["activity_label"], "ctx_a": first, "ctx_b": last}
        yield {**context, "endings": record["endings"], "label": str(record["label"])}


def split_context(context: str) -> tuple[str, str]:
    """Split a context into its whole sentences and the beginning of a sentence behind them; either may be empty.

    >>> split_context("A man is on a roof. he"), split_context("How to sing. Stand up.")
    (('A man is on a roof.', 'he'), ('How to sing. Stand up.', ''))
    """
    if re.search(r"""[.!?]["')]*$""", context):
        return context, ""
    match = re.fullmatch(r"""(.*[.!?]["')]*) (.+)""", context, flags=re.DOTALL)
    return (match[1], match[2]) if match else ("", context)


def _read_piqa(path: Path, records: Records) -> Iterator[Question]:
    """PIQA's questions, each with the label on the same line of the file of labels beside it."""
    labels, questions = [line.strip() for _, line in read_lines(_labels_beside(path))], list(records)
    if len(labels) != len(questions):
        raise DataError(f"{path} holds {len(questions)} questions, {_labels_beside(path)} {len(labels)} labels")
    for (number, record), label in zip(questions, labels, strict=True):
        _check_label(path, number, label, 2)
        yield {name: record[name] for name in ("goal", "sol1", "sol2")} | {"label": int(label)}


def _labels_beside(path: Path) -> Path:
    """The file of labels that belongs to one of questions, gzipped where that alone is there."""
    plain = path.with_name(f"{path.name.partition('.')[0]}-labels.lst")
    packed = plain.with_name(f"{plain.name}.gz")
    return packed if packed.is_file() and not plain.is_file() else plain


def _read_arc(path: Path, records: Records) -> Iterator[Question]:
    """ARC's questions, whose choices are named A to E or 1 to 4, and the answer by one of these names."""
    for number, record in records:
        question, key = record["question"], str(record["answerKey"])
        texts = [choice["text"] for choice in question["choices"]]
        labels = [str(choice["label"]) for choice in question["choices"]]
        if labels.count(key) != 1:
            raise DataError(f"{path}, line {number}: the answer {key!r} names no choice of {labels}")
        choices = {"text": texts, "label": labels}
        yield {"id": record["id"], "question": question["stem"], "choices": choices, "answerKey": key}


def _read_sst2(path: Path, records: Records) -> Iterator[Question]:
    """SST-2's sentences, with the space that ends them in GLUE's file."""
    for number, row in records:
        label = row["label"].strip()
        _check_label(path, number, label, 2)
        yield {"sentence": row["sentence"], "label": int(label)}


def _read_boolq(path: Path, records: Records) -> Iterator[Question]:
    for number, record in records:
        if not isinstance(record["label"], bool):
            raise DataError(f"{path}, line {number}: label must be true or false, got {record['label']!r}")
        yield {"question": record["question"], "passage": record["passage"], "label": int(record["label"])}


def _check_label(path: Path, number: int, label: Any, choices: int) -> None:
    if str(label) not in map(str, range(choices)):
        raise DataError(f"{path}, line {number}: label must be from 0 to {choices - 1}, got {label!r}")


ZERO_SHOT: dict[TaskName, ZeroShotTask] = {
    "hellaswag": ZeroShotTask("hellaswag", ("hellaswag_val.jsonl",), _read_hellaswag),
    "piqa": ZeroShotTask("piqa", ("valid.jsonl",), _read_piqa),
    "arc_easy": ZeroShotTask("arc", ("ARC-Easy-Test.jsonl", "ARC-Easy-Dev.jsonl"), _read_arc),
    "sst2": ZeroShotTask("glue/sst2", ("dev.tsv",), _read_sst2),
    "boolq": ZeroShotTask("super_glue/boolq", ("val.jsonl",), _read_boolq),
}
"""lm-eval evaluates ARC's test split, and so did the paper: its 80.43% is 1,911 of these 2,376 questions, and no whole
number of the 570 of validation."""
