"""Examples of a task with choices: read from a user's JSONL or a public set's files, checked, split and made tokens.

An example is text, a question (or nothing), choices, and the answer, which is one of them. A model reads text and
question and is asked how likely each choice is to follow.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from saf.data import Tokenizer
from saf.data.reading import JSON_LINES, bare_suffix, read_json, read_json_lines, read_table
from saf.errors import DataError

EMPTY = "empty"
"""Why an example is left out: it has no text and question, or an empty choice."""
DUPLICATE = "duplicate id"
STRANGE = "answer not among the choices"
FEW = "fewer than two different choices"
NOT_UNICODE = "not Unicode"
"""It has half of a surrogate pair, which no tokenizer takes."""
LONG = "too long"
ALIKE = "choices of the same tokens"
"""Its choices differ as text, and not as what this tokenizer makes of them."""
_SHOWN = 160
"""Characters of a record that an error shows."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """Hold one question with its choices."""

    id: str
    text: str
    """What comes first, and may be shortened at its end where the settings say so."""
    question: str = ""
    """What stands between text and answer, and is never shortened."""
    choices: tuple[str, ...]
    answer: int
    """Number of the right choice; -1 when it is none of them."""

    @property
    def obstacle(self) -> str | None:
        """Return why the example cannot be used; None for one that can."""
        if not (self.text + self.question).strip() or not all(choice.strip() for choice in self.choices):
            return EMPTY
        if len(set(self.choices)) < max(2, len(self.choices)):
            return FEW
        if not is_unicode("".join((self.id, self.text, self.question, *self.choices))):
            return NOT_UNICODE
        return None if 0 <= self.answer < len(self.choices) else STRANGE


def is_unicode(text: str) -> bool:
    """Return whether a text can be written as UTF-8: JSON's escapes can also spell half of a surrogate pair.

    >>> is_unicode("film"), is_unicode(chr(0xD800))
    (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass
class Found:
    """Hold what a file of examples gave: those that can be used, and those that cannot, by reason."""

    examples: list[Any] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """The ids of examples that are not used, by reason."""

    def leave_out(self, reason: str, name: str) -> None:
        """Name an example that is not used."""
        self.left_out.setdefault(reason, []).append(name)

    def words(self) -> str:
        """Return how many examples were left out, why, and the first of them; nothing when none were."""
        parts = []
        for reason, names in self.left_out.items():
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            parts.append(f"{len(names)} {reason} ({shown})")
        return "; ".join(parts)


def read_examples(path: Path | str, form: str) -> Found:
    """Return the examples of a file, gzipped or not; those that cannot be used are named, by reason.

    Args:
        path: The file.
        form: Its layout, one of `FORMS`.

    Raises:
        DataError: No such file, a line that cannot be read, or no example that can be used.
    """
    path, found, seen = Path(path), Found(), set()
    for example in FORMS[form](path):
        reason = DUPLICATE if example.id in seen else example.obstacle
        seen.add(example.id)
        if reason is None:
            found.examples.append(example)
        else:
            found.leave_out(reason, example.id)
    if not found.examples:
        raise DataError(f"{path} has no example that can be used{': ' if found.left_out else ''}{found.words()}")
    return found


def is_json_lines(name: str) -> bool:
    """Return whether a file's name says that it is JSON Lines, compressed or not."""
    return bare_suffix(Path(name)) in (*JSON_LINES, ".json")


def records_of(path: Path, *fields: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a JSON Lines file with their line numbers; raise DataError for one without the fields."""
    records = read_json(path, fields[0]) if bare_suffix(path) == ".json" else read_json_lines(path)
    for number, record in records or ():
        if missing := [name for name in fields if name not in record]:
            raise DataError(f"{path}, line {number}: expected an object with {', '.join(fields)}; lacks {missing}")
        yield number, record


def shown(value: Any) -> str:
    """Return what an error shows of a line or record, which may hold a whole article."""
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _read_own(path: Path) -> Iterator[Example]:
    """Yield examples `{"text", "choices", "answer"}`; "id" and "question" may be there, and null as if they were not.

    The answer is one of the choices, or its number from 0.
    """
    for number, record in records_of(path, "text", "choices", "answer"):
        text, choices = record["text"], record["choices"]
        question = "" if record.get("question") is None else record["question"]
        fits = isinstance(text, str) and isinstance(question, str) and isinstance(choices, list)
        if not fits or not all(isinstance(choice, str) for choice in choices):
            raise DataError(
                f'{path}, line {number}: "text" (and "question") must be text, "choices" a list of texts; got '
                f"{shown(record)}"
            )
        answer = record["answer"]
        if isinstance(answer, str):
            answer = choices.index(answer) if answer in choices else -1
        elif isinstance(answer, bool) or not isinstance(answer, int):
            answer = -1
        name = f"line {number}" if record.get("id") is None else str(record["id"])
        yield Example(id=name, text=text, question=question, choices=tuple(choices), answer=answer)


def sst2_rows(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line number, sentence and label of SST-2's tab-separated file as they are, a header line first."""
    for number, row in read_table(path):
        if list(row) != ["sentence", "label"]:
            raise DataError(f"{path}: the header line of SST-2 must be sentence<TAB>label, got {shown(list(row))}")
        yield number, row["sentence"], row["label"].strip()


def _read_sst2(path: Path) -> Iterator[Example]:
    """Yield SST-2's sentences; ids are line numbers."""
    for number, raw, label in sst2_rows(path):
        sentence = raw.strip()
        answer = {"0": 0, "1": 1}.get(label, -1)
        question = "\nSentiment:" if sentence else ""
        text = f"Review: {sentence}" if sentence else ""
        yield Example(
            id=f"line {number}", text=text, question=question, choices=(" negative", " positive"), answer=answer
        )


def _read_boolq(path: Path) -> Iterator[Example]:
    """Yield BoolQ's questions in SuperGLUE's layout, the passage as text."""
    for number, record in records_of(path, "question", "passage", "label"):
        passage, question, label = record["passage"], record["question"], record["label"]
        if not isinstance(passage, str) or not isinstance(question, str):
            raise DataError(f'{path}, line {number}: "passage" and "question" must be text; got {shown(record)}')
        yield Example(
            id=str(record.get("idx", f"line {number}")),
            text=passage.strip(),
            question=f"\nQuestion: {question.strip()}?\nAnswer:",
            choices=(" no", " yes"),
            answer=int(label) if isinstance(label, bool) else -1,
        )


def _read_quality(path: Path) -> Iterator[Example]:
    """Yield QuALITY's questions, an article a line; the choices are the letters of its options, listed before them."""
    for number, record in records_of(path, "article", "questions"):
        if not isinstance(record["article"], str) or not isinstance(record["questions"], list):
            raise DataError(f'{path}, line {number}: "article" must be text, "questions" a list')
        for index, asked in enumerate(record["questions"]):
            where = f"line {number}, question {index + 1}"
            missing = {"question", "options", "gold_label"} - (asked.keys() if isinstance(asked, dict) else set())
            if missing:
                raise DataError(
                    f"{path}, {where}: lacks {sorted(missing)}; QuALITY's test file has no answers, give its dev file"
                )
            options, label = asked["options"], asked["gold_label"]
            if not _are_options(options) or type(label) is not int or not isinstance(asked["question"], str):
                raise DataError(
                    f'{path}, {where}: "question" must be text, "options" a list of at most {len(LETTERS)} texts, '
                    f'"gold_label" the number of one, from 1; got {shown(asked)}'
                )
            letters = LETTERS[: len(options)]
            listed = "".join(f"\n{letter}. {option.strip()}" for letter, option in zip(letters, options, strict=True))
            yield Example(
                id=str(asked.get("question_unique_id", where)),
                text=record["article"].strip(),
                question=f"\nQuestion: {asked['question'].strip()}{listed}\nAnswer:",
                choices=tuple(f" {letter}" for letter in letters),
                answer=label - 1,
            )


LETTERS = "ABCDEFGHIJ"
"""Of QuALITY's options, which are four; more are no QuALITY."""


def _are_options(value: Any) -> bool:
    """Return whether a value is a list of texts, as many as there are letters at most."""
    return isinstance(value, list) and len(value) <= len(LETTERS) and all(isinstance(one, str) for one in value)


FORMS: Mapping[str, Callable[[Path], Iterator[Example]]] = {
    "jsonl": _read_own,
    "sst2": _read_sst2,
    "boolq": _read_boolq,
    "quality": _read_quality,
}
"""What reads a file of examples, by the name of its layout."""


class Encoded(NamedTuple):
    """Hold an example as tokens."""

    example: Example
    prompt: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    shortened: bool
    """Whether text was taken away at its end."""

    @property
    def sequence(self) -> tuple[int, ...]:
        """Return the prompt with the right answer behind it."""
        return self.prompt + self.choices[self.example.answer]

    @property
    def longest(self) -> int:
        """Return the tokens that the model is given of its longest choice, whose last token is no input."""
        return len(self.prompt) + max(map(len, self.choices)) - 1


def encode_examples(found: Found, tokenizer: Tokenizer, *, limit: int, shorten: bool) -> Found:
    """Return the examples as `Encoded`, none longer than `limit` inputs of the model; begun by end-of-text.

    Prompt and choices are made tokens apart, so that a prompt is the same whatever follows. An example that is longer
    loses tokens at the end of its text with `shorten`, never of its question or a choice; without `shorten`, or where
    no text would be left, it is left out, and so is one whose choices this tokenizer cannot tell apart.
    """
    result = Found(left_out={reason: list(names) for reason, names in found.left_out.items()})
    examples: Sequence[Example] = found.examples
    texts = tokenizer.encode_batch([example.text for example in examples])
    wholes = tokenizer.encode_batch([example.text + example.question for example in examples])
    questions = tokenizer.encode_batch([example.question for example in examples])
    different = list({choice: None for example in examples for choice in example.choices})
    spelled = dict(zip(different, map(tuple, tokenizer.encode_batch(different)), strict=True))
    for example, text, whole, question in zip(examples, texts, wholes, questions, strict=True):
        choices = tuple(spelled[choice] for choice in example.choices)
        if len(set(choices)) < len(choices) or not all(choices):
            result.leave_out(ALIKE, example.id)
            continue
        room = limit - 1 - (max(map(len, choices)) - 1)  # end-of-text first; the last token of a choice is no input
        prompt, shortened = whole, False
        if len(whole) > room:
            left = room - len(question)
            if not shorten or left < 1 or not example.question:
                result.leave_out(LONG, example.id)
                continue
            prompt, shortened = text[:left] + question, True
        result.examples.append(Encoded(example, (tokenizer.eot_id, *prompt), choices, shortened))
    return result


def stratified(labels: Sequence[Any], share: float, *, seed: int) -> list[int]:
    """Return the places of a share of examples, in order, with as near as can be that share of every label.

    Each label gives its share rounded down; the places that are missing in all come from labels with the largest
    remainders. Which examples of a label, `seed` decides.

    >>> chosen = stratified(["a"] * 20 + ["b"] * 10, 0.1, seed=0)
    >>> len(chosen), sum(place < 20 for place in chosen)
    (3, 2)
    """
    own: dict[Any, list[int]] = {}
    for place, label in enumerate(labels):
        own.setdefault(label, []).append(place)
    names = sorted(own, key=str)
    exact = {name: len(own[name]) * share for name in names}
    take = {name: int(exact[name]) for name in names}
    missing = round(len(labels) * share) - sum(take.values())
    for name in sorted(names, key=lambda name: take[name] - exact[name])[: max(missing, 0)]:
        take[name] += 1
    draw = np.random.Generator(np.random.Philox(key=np.array([seed, 0x5A17], dtype=np.uint64)))
    places: list[int] = []
    for name in names:
        places += [own[name][int(place)] for place in draw.permutation(len(own[name]))[: take[name]]]
    return sorted(places)


def examples_hash(examples: Sequence[Encoded]) -> str:
    """Return the SHA-256 of encoded examples, in order: ids, tokens and answers."""
    digest = hashlib.sha256()
    for each in examples:
        said = [each.example.id, each.prompt, each.choices, each.example.answer]
        digest.update(json.dumps(said).encode() + b"\n")
    return digest.hexdigest()
