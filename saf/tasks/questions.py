"""Questions with choices in files: examples to finetune on, and the paper's zero-shot tasks as lm-eval reads them.

A user's own files are JSON Lines; the others are the public files of each data set. lm-eval has the prompts of
zero-shot tasks, this file those of finetuning, which the paper does not give.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from saf.data.reading import JSON_LINES, bare_suffix, read_json_lines, read_lines, read_records
from saf.errors import DataError
from saf.records.files import entries_hash, file_hash

Record = dict[str, Any]
LeftOut = defaultdict[str, list[str]]
"""The ids of examples that are not used, by reason."""
_UNREADABLE = (KeyError, TypeError, AttributeError, ValueError)
"""What a record of another format raises."""


# --- examples to finetune on


@dataclass(frozen=True, kw_only=True)
class Example:
    """A question with its choices: a model reads text and question, and says how likely each choice is to follow."""

    id: str
    text: str
    """What comes first; its end may be cut off."""
    question: str = ""
    """What stands between text and answer, and is never shortened."""
    choices: tuple[str, ...]
    answer: int
    """Number of the right choice; -1 when it is none of them."""

    @property
    def problem(self) -> str | None:
        """Why the example cannot be used; None for one that can."""
        if not (self.text + self.question).strip() or not all(choice.strip() for choice in self.choices):
            return "empty"
        if len(set(self.choices)) < max(2, len(self.choices)):
            return "fewer than two different choices"
        if re.search("[\ud800-\udfff]", "".join((self.id, self.text, self.question, *self.choices))):
            return "not Unicode"  # JSON's escapes can spell half of a surrogate pair
        return None if 0 <= self.answer < len(self.choices) else "answer not among the choices"


def read_examples(path: Path | str, task: str) -> tuple[list[Example], LeftOut]:
    """Read the examples of a file, compressed or not, in a task's format, and the ids of those that cannot be used.

    Raises DataError when there is no such file, a line cannot be read, or no example can be used.
    """
    path, examples, left_out, seen = Path(path), list[Example](), LeftOut(list), set[str]()
    field, examples_of = EXAMPLE_FORMATS[task]
    for place, record in read_records(path, field) or read_json_lines(path):
        try:
            for example in examples_of(place, record):
                reason = "duplicate id" if example.id in seen else example.problem
                seen.add(example.id)
                if reason is None:
                    examples.append(example)
                else:
                    left_out[reason].append(example.id)
        except _UNREADABLE as error:
            problem = f"no example of {task} ({type(error).__name__}: {error}): {str(record)[:160]}"
            raise DataError(f"{path}, {place}: {problem}") from error
    if not examples:
        raise DataError(f"{path} has no example that can be used: {counted(left_out) or 'it is empty'}")
    return examples, left_out


def counted(left_out: LeftOut) -> str:
    """Count the examples that were left out by reason, and name the first of them."""
    shown = {reason: ", ".join(names[:3]) + ", ..." * (len(names) > 3) for reason, names in left_out.items()}
    return "; ".join(f"{len(names)} {reason} ({shown[reason]})" for reason, names in left_out.items())


def is_json_lines(name: str) -> bool:
    """Whether a file's name says that it is JSON Lines, compressed or not."""
    return bare_suffix(Path(name)) in (*JSON_LINES, ".json")


def _own_example(place: str, record: Record) -> Iterator[Example]:
    """Yield a user's own example; null is the same as no "id" or "question"."""
    choices, answer = record["choices"], record["answer"]
    if not isinstance(choices, list):
        raise TypeError(f"choices must be a list, got {str(choices)[:40]}")
    if type(answer) is not int:  # true is none
        answer = choices.index(answer) if answer in choices else -1
    name, question = place if record.get("id") is None else str(record["id"]), record.get("question") or ""
    yield Example(id=name, text=record["text"], question=question, choices=tuple(choices), answer=answer)


def _sst2_example(place: str, record: Record) -> Iterator[Example]:
    sentence = record["sentence"].strip()
    yield Example(
        id=place,
        text=f"Review: {sentence}" if sentence else "",
        question="\nSentiment:" if sentence else "",
        choices=(" negative", " positive"),
        answer={"0": 0, "1": 1}.get(record["label"].strip(), -1),
    )


def _boolq_example(place: str, record: Record) -> Iterator[Example]:
    label = record["label"]
    yield Example(
        id=str(record.get("idx", place)),
        text=record["passage"].strip(),
        question=f"\nQuestion: {record['question'].strip()}?\nAnswer:",
        choices=(" no", " yes"),
        answer=int(label) if isinstance(label, bool) else -1,
    )


def _quality_examples(place: str, record: Record) -> Iterator[Example]:
    """Yield QuALITY's questions on one article; the choices are the letters of its options, listed before them."""
    article = record["article"].strip()
    for index, question in enumerate(record["questions"], 1):
        options = question["options"]
        if not isinstance(options, list) or len(options) > 10:
            raise TypeError(f"question {index} has options {str(options)[:40]}")
        letters = "ABCDEFGHIJ"[: len(options)]
        listed = "".join(f"\n{letter}. {option.strip()}" for letter, option in zip(letters, options, strict=True))
        yield Example(
            id=str(question.get("question_unique_id", f"{place}, question {index}")),
            text=article,
            question=f"\nQuestion: {question['question'].strip()}{listed}\nAnswer:",
            choices=tuple(f" {letter}" for letter in letters),
            answer=question["gold_label"] - 1,
        )


EXAMPLE_FORMATS: Mapping[str, tuple[str, Callable[[str, Record], Iterator[Example]]]] = {
    "jsonl": ("text", _own_example),
    "sst2": ("sentence", _sst2_example),
    "boolq": ("question", _boolq_example),
    "quality": ("article", _quality_examples),
}
"""The formats of files of examples, each a task of this name: a field that records of the format have, and the function
that yields the examples of a record and its place in the file."""


# --- zero-shot tasks

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
    # PIQA has its labels in a file of their own.
    labels = [path.with_name(f"{path.name.partition('.')[0]}-labels.lst{suffix}") for suffix in ("", ".gz")]
    if (file := next((file for file in labels if file.is_file()), None)) is not None:
        values, numbered = [line.strip() for line in read_lines(file)], list(records)
        if len(values) != len(numbered):
            raise DataError(f"{path} holds {len(numbered)} questions, {file} {len(values)} labels")
        records = ((at, record | {"label": value}) for (at, record), value in zip(numbered, values, strict=True))
        sums[file.name] = file_hash(file)
    for place, record in islice(records, limit):
        try:
            rows.append(task.question(record))
        except _UNREADABLE as error:
            problem = f"no question of {name} ({type(error).__name__}: {error})"
            raise DataError(f"{path}, {place}: {problem}") from error
    if not rows:
        raise DataError(f"{path} holds no question")
    return Questions(rows, path, entries_hash(sums) if len(sums) > 1 else sums[path.name])


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
