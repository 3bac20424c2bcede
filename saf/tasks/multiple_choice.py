"""`FinetuneTask` trains on questions with choices: its settings, its files of examples, and examples as tokens.

The loss is that of the answer's tokens, the measure is accuracy. Where the paper leaves it open: a stratified share of
the training file is development, which no arm trains on. The rest is shuffled in each epoch by (seed, epoch), so that
all arms see the same examples in the same order.
"""

import hashlib
import json
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from saf.data import Tokenizer
from saf.data.loader import generator, shuffled_numbers
from saf.data.reading import read_json_lines, read_records
from saf.distributed import on_rank0
from saf.errors import DataError, InputError, SafWarning, check_name
from saf.machine import Execution
from saf.models import GPT
from saf.ops.loss_and_gelu import IGNORE_INDEX
from saf.records.run import absolute_path
from saf.tasks.base import ANSWERS, Answer, Continuation, Task, likelihoods, summary, write_answers

PATHS = ("test", "tokenizer")
"""Fields of `FinetuneSettings` that name files; a fingerprint covers their contents wherever they lie."""
Record = dict[str, Any]
LeftOut = defaultdict[str, list[str]]
"""The ids of examples that are not used, by reason."""
# Random streams of the order of examples and of the calibration draw, none of them one of `saf.data.loader`.
_ORDER, _CALIBRATION = 17, 18


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings:
    """What finetuning adds to the settings of a run, whose `data` is the file of training examples."""

    test: str = ""
    """Measure accuracy on this file of examples."""
    tokenizer: str = ""
    """Take the tokenizer of this folder, with which the parent was trained: its data folder."""
    max_tokens: int = 512
    """Allow this many tokens for an example with its answer."""
    too_long: Literal["leave_out", "shorten"] = "leave_out"
    """Leave longer examples out, or shorten their text (never question or answer) at its end. A user's own examples are
    shortened only where they have a "question"."""
    development: float = 0.1
    """Hold out this share of the training file, stratified by answer; it chooses epochs and decides during a run."""
    split_seed: int = 0
    """Random seed for that share, and for a part of the file; the run's own seed orders the rest."""
    most_examples: int | None = None
    """Use this many examples of the training file, stratified by answer, the same for every seed of a run."""
    judge: Literal["test", "development"] = "test"
    """Report on the test examples, or on development where epochs are chosen."""

    def __post_init__(self):
        check_name("too_long", self.too_long, ("leave_out", "shorten"))
        check_name("judge", self.judge, ("test", "development"))
        if not 0 < self.development < 1:
            raise InputError(f"development must be a share above 0 and below 1, got {self.development}")
        for name in PATHS:
            object.__setattr__(self, name, absolute_path(getattr(self, name)))


class FinetuneTask(Task):
    """Answer questions with choices; the settings' `task` names the format of their files.

    `length` is the longest example, training and test, and no more than the settings' or the model's tokens.
    """

    def __init__(self, settings: Any, *, length: int):
        """Read, check and split the examples; a warning names those that are left out.

        Raises DataError for a file that cannot be read or has too few examples.
        """
        self.name, self.settings = settings.task, settings
        options: FinetuneSettings | None = settings.finetuning
        if options is None or not options.test or not options.tokenizer:
            raise InputError(f"the task {self.name!r} needs a file of examples to test on (test) and a tokenizer")
        self.options = options
        self.tokenizer = Tokenizer.load(options.tokenizer)
        self.tokenizer_hash, self.vocab_size = self.tokenizer.fingerprint, self.tokenizer.vocab_size
        self.left_out: dict[str, LeftOut] = {}
        limit = min(options.max_tokens - 1, length)  # of inputs: the last token of an answer is only a target
        train = self._read("train", settings.data, limit, most=options.most_examples)
        self.test = self._read("test", options.test, limit)
        answers = [each.example.answer for each in train]
        drawn = set(stratified(answers, options.development, seed=options.split_seed))
        self.development = [each for at, each in enumerate(train) if at in drawn]
        self.examples = [each for at, each in enumerate(train) if at not in drawn]
        if not self.development or not self.examples:
            few = f"too few for a development share of {options.development:g}"
            remedy = "use more examples or another share (development)"
            raise DataError(f"{settings.data} has {len(train)} examples: {few}; {remedy}")
        # By their text: ids are numbers of lines in files without ids, and say nothing across files.
        trained = {(each.example.text, each.example.question) for each in train}
        self.shared = sum((each.example.text, each.example.question) in trained for each in self.test)
        """Number of test examples that are in the training file, too."""
        if self.shared:
            message = f"{options.test}: {self.shared} of {len(self.test)} examples are in {settings.data} too"
            warnings.warn(message, SafWarning, stacklevel=3)
        # Patterns are fitted for the longest of all, so that no example is refused once heads are frozen.
        self.length = max(each.longest for each in (*train, *self.test))
        self.fingerprint = self._hash()

    def _read(self, role: str, path: str, limit: int, *, most: int | None = None) -> "list[Encoded]":
        """Read at most `most` examples of a file as tokens; warn of those left out, refuse a file without any."""
        source, left_out = read_examples(path, self.name)
        if most is not None and len(source) > most:  # before tokenising, which takes longer than all else
            answers = [each.answer for each in source]
            drawn = stratified(answers, most / len(source), seed=self.options.split_seed)
            source = [source[number] for number in drawn]
        shorten = self.options.too_long == "shorten"
        encoded = encode_examples(source, left_out, self.tokenizer, limit=limit, shorten=shorten)
        self.left_out[role] = left_out
        count, words = len(encoded) + sum(map(len, left_out.values())), counted(left_out)
        if not encoded:
            raise DataError(f"{path}: examples that cannot be used: {words}; the limit is {limit + 1} tokens")
        if left_out:
            warnings.warn(f"{path}: {words} left out of {count} examples", SafWarning, stacklevel=4)
        if cut := sum(each.shortened for each in encoded):
            message = f"{path}: the text of {cut} of {count} examples is shortened to {limit + 1} tokens in all"
            warnings.warn(message, SafWarning, stacklevel=4)
        return encoded

    def _hash(self) -> str:
        """Return the SHA-256 of the tokenizer and of all examples, as they are split."""
        # Of tokens, not of files: a file may move or be compressed, and settings may change its tokens.
        parts = [self.tokenizer.fingerprint]
        for examples in (self.examples, self.development, self.test):
            digest = hashlib.sha256()
            for each in examples:
                entry = [each.example.id, each.prompt, each.choices, each.example.answer]
                digest.update(json.dumps(entry).encode() + b"\n")
            parts.append(digest.hexdigest())
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    @property
    def targets_per_update(self) -> int:
        """Tokens of the examples of one update on average, rounded; padding is not counted."""
        mean = sum(len(each.sequence) - 1 for each in self.examples) / len(self.examples)
        return round(self.windows_per_update * mean)

    def updates_of(self, epochs: int) -> int:
        """Return the updates of this number of epochs; the last one is filled from the next epoch."""
        return math.ceil(epochs * len(self.examples) / self.windows_per_update)

    def numbers(self, position: int, count: int) -> list[int]:
        """Return the numbers of the `count` examples from `position` on; each epoch has an order of its own."""
        return shuffled_numbers(_ORDER, self.settings.seed, position, count, total=len(self.examples))

    def batch(self, position: int, size: int) -> Tensor:
        """Return the examples from `position` on, padded to the longest of them; only answers are targets."""
        rows = [self.examples[number].row for number in self.numbers(position, size)]
        return torch.stack(pad(rows, padding=self.tokenizer.eot_id))

    def calibration(self) -> list[dict[str, Tensor]]:
        """Return training examples to calibrate on, drawn by the run's seed, in batches padded behind.

        Mappings with `input_ids`, `attention_mask` and, at the answers, `targets`, `[<= batch_size, longest of them]`.
        One sequence has all `length` tokens, since patterns reach no further than the longest.
        """
        size, padding = self.settings.batch_size, self.tokenizer.eot_id  # any token would do as padding
        batches, rows = [], self._calibration_rows()
        for part in (rows[first : first + size] for first in range(0, len(rows), size)):
            inputs, targets = pad(part, padding=padding)
            lengths = torch.tensor([len(tokens) - 1 for tokens, _, _ in part])[:, None]
            mask = (torch.arange(inputs.shape[1]) < lengths).long()
            batches.append({"input_ids": inputs, "attention_mask": mask, "targets": targets})
        return batches

    def _calibration_rows(self) -> "list[Row]":
        """Draw the sequences of calibration; raise DataError where there are too few examples, or too short ones."""
        count, examples = self.settings.calibration_sequences, self.examples
        if count > len(examples):
            raise DataError(f"calibration_sequences must be at most {len(examples)}, all that train, got {count}")
        order = generator(_CALIBRATION, self.settings.seed, 0).permutation(len(examples))
        drawn = [examples[number] for number in order[:count]]
        longest = max(examples, key=lambda each: len(each.sequence))
        if all(len(each.sequence) < len(longest.sequence) for each in drawn):
            drawn[-1] = longest
        rows = [each.row for each in drawn]
        # A test example or a wrong choice may be longer still: the longest row goes on with text of further examples.
        reach = max(range(count), key=lambda number: len(rows[number][0]))
        tokens, begin, end = rows[reach]
        further = (token for number in order[::-1] for token in examples[number].sequence)
        rows[reach] = ((*tokens, *further)[: self.length + 1], begin, end)
        if (reached := len(rows[reach][0]) - 1) < self.length:
            reason = f"the longest example, got {reached:,} in all training examples"
            raise DataError(f"patterns must reach {self.length:,} tokens, {reason}; use more of them")
        return rows

    def heldout(self) -> list[Tensor]:
        """Lay development examples end to end, cut into sequences of `length`; raise DataError for too few tokens."""
        # Output-aware scores compare query positions that every sequence has: all are of one length, without padding.
        ids = [token for each in self.development for token in each.sequence]
        count = self.settings.heldout_sequences
        if len(ids) < count * self.length:
            most = f"{len(ids) // self.length}, of {len(ids):,} development tokens with {self.length:,} each"
            raise DataError(f"heldout_sequences must be at most {most}, got {count}")
        return list(torch.tensor(ids[: count * self.length]).view(count, self.length).split(self.settings.batch_size))

    def answers(self, model: GPT, execution: Execution, examples: "Sequence[Encoded]") -> list[dict[str, Any]]:
        """Answer examples, in order, by the choice of the largest log-probability, the first of equal ones."""
        pairs = [Continuation(each.prompt, choice) for each in examples for choice in each.choices]
        size, precision = self.settings.batch_size, execution.precision
        results, answers = iter(likelihoods(model, pairs, batch_size=size, precision=precision)), []
        for each in examples:
            # Summed over tokens, not averaged as some benchmarks do: the most probable choice is taken.
            log_probs = [next(results).log_prob for _ in each.choices]
            right, taken = each.example.answer, max(range(len(log_probs)), key=log_probs.__getitem__)
            answers.append(
                {
                    "id": each.example.id,
                    "answer": right,
                    "taken": taken,
                    "right": taken == right,
                    "shortened": each.shortened,
                    "log_probs": log_probs,
                    "answer_tokens": len(each.choices[right]),
                }
            )
        return answers

    def controller_loss(self, model: GPT, execution: Execution, count: int) -> float:
        return answer_loss(self.answers(model, execution, self.development[:count]))

    def report(
        self, model: GPT, execution: Execution, *, folder: Path, checkpoints: dict[str, str | None]
    ) -> dict[str, Any]:
        """Return loss and accuracy on every example that is not left out, and write answers.jsonl."""
        answers = self.answers(model, execution, self.test if self.options.judge == "test" else self.development)
        return {
            "report_loss": answer_loss(answers),
            "judged_by": self.options.judge,
            **summary(answers),
            "left_out": {role: {why: len(ids) for why, ids in each.items()} for role, each in self.left_out.items()},
            "answers_sha256": on_rank0(lambda: write_answers(folder / ANSWERS, {self.name: answers})),
        }

    def description(self) -> dict[str, Any]:
        settings = {name: value for name, value in asdict(self.options).items() if name not in PATHS}
        facts = {
            "test": self.options.test,
            "task": self.name,
            "longest": self.length,
            "examples": {"train": len(self.examples), "development": len(self.development), "test": len(self.test)},
            "test_examples_trained_on": self.shared,
            "left_out": self.left_out,
        }
        return super().description() | facts | settings


def answer_loss(answers: Sequence[Answer]) -> float:
    """Average the loss of the tokens of right choices, nats per token."""
    total = -math.fsum(each["log_probs"][each["answer"]] for each in answers)
    return total / sum(each["answer_tokens"] for each in answers)


# --- files of examples


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
        except (KeyError, TypeError, AttributeError) as error:
            problem = f"no example of {task} ({type(error).__name__}: {error}): {str(record)[:160]}"
            raise DataError(f"{path}, {place}: {problem}") from error
    if not examples:
        raise DataError(f"{path} has no example that can be used: {counted(left_out) or 'it is empty'}")
    return examples, left_out


def counted(left_out: LeftOut) -> str:
    """Count the examples that were left out by reason, and name the first three of each."""
    counts = []
    for reason, ids in left_out.items():
        more = ", ..." if len(ids) > 3 else ""
        counts.append(f"{len(ids)} {reason} ({', '.join(ids[:3])}{more})")
    return "; ".join(counts)


def _own_example(place: str, record: Record) -> Iterator[Example]:
    """Yield a user's own example; null is the same as no "id" or "question"."""
    choices, answer = record["choices"], record["answer"]
    if not isinstance(choices, list):
        raise TypeError(f"choices must be a list, got {str(choices)[:40]}")
    if type(answer) is not int:  # not isinstance: True would be choice 1
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
            # Letters, since long options would be less probable for their length alone.
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


# --- examples as tokens


class Encoded(NamedTuple):
    """An example as tokens."""

    example: Example
    prompt: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    shortened: bool
    """Whether the end of its text was cut off."""

    @property
    def sequence(self) -> tuple[int, ...]:
        """The prompt with the right answer behind it."""
        return self.prompt + self.choices[self.example.answer]

    @property
    def row(self) -> "Row":
        """The sequence, and where its answer begins and ends."""
        return self.sequence, len(self.prompt), len(self.sequence)

    @property
    def longest(self) -> int:
        """Inputs of its longest choice, whose last token is only a target."""
        return len(self.prompt) + max(map(len, self.choices)) - 1


def encode_examples(
    examples: Sequence[Example], left_out: LeftOut, tokenizer: Tokenizer, *, limit: int, shorten: bool
) -> list[Encoded]:
    """Return the examples as tokens, none longer than `limit` inputs of the model; end-of-text comes first.

    With `shorten` a longer example loses tokens at the end of its text, never of its question or a choice. Without
    `shorten`, or where no text would remain, its id goes to `left_out`; so does that of one whose choices have the same
    tokens.
    """
    result, encode = [], tokenizer.encode_batch
    prompts = encode([each.text + each.question for each in examples])
    # Separately, for the examples that are shortened: tokens of the whole may span the end of the text.
    texts, questions = encode([each.text for each in examples]), encode([each.question for each in examples])
    # Choices without the prompt, so that its tokens are the same whatever follows; once each, as most tasks have few.
    different = list(dict.fromkeys(choice for each in examples for choice in each.choices))
    tokens_of = dict(zip(different, map(tuple, encode(different)), strict=True))
    for example, text, question, prompt in zip(examples, texts, questions, prompts, strict=True):
        choices = tuple(tokens_of[choice] for choice in example.choices)
        room = limit - max(map(len, choices))  # end-of-text comes first; the last token of a choice is no input
        if len(set(choices)) < len(choices) or not all(choices):
            left_out["choices of the same tokens"].append(example.id)
        elif len(prompt) <= room:
            result.append(Encoded(example, (tokenizer.eot_id, *prompt), choices, shortened=False))
        elif shorten and question and room > len(question):
            short = (tokenizer.eot_id, *text[: room - len(question)], *question)
            result.append(Encoded(example, short, choices, shortened=True))
        else:
            left_out["too long"].append(example.id)
    return result


def stratified(labels: Sequence[Any], share: float, *, seed: int) -> list[int]:
    """Draw a share of examples with as near as can be that share of every label; return their numbers in order.

    Each label gives its share rounded down; missing ones come from the labels with the largest remainders.

    >>> chosen = stratified(["a"] * 20 + ["b"] * 10, 0.1, seed=0)
    >>> len(chosen), sum(place < 20 for place in chosen)
    (3, 2)
    """
    names = sorted(set(labels), key=str)
    members = {name: [number for number, label in enumerate(labels) if label == name] for name in names}
    exact = {name: len(members[name]) * share for name in names}
    take = {name: int(exact[name]) for name in names}
    missing = round(len(labels) * share) - sum(take.values())
    for name in sorted(names, key=lambda name: take[name] - exact[name])[: max(missing, 0)]:
        take[name] += 1
    draw = generator(0, seed, 0x5A17)  # the number makes this draw differ from others of the seed
    drawn = {name: draw.permutation(len(members[name]))[: take[name]] for name in names}
    return sorted(members[name][place] for name in names for place in drawn[name])


Row = tuple[Sequence[int], int, int]
"""Tokens of a sequence, and where the answer in them begins and ends."""


def pad(rows: Sequence[Row], *, padding: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, int64 `[rows, longest - 1]`: only the tokens of answers are targets.

    Padding stands behind a sequence, where causal attention does not look.

    >>> pad([([7, 8, 9], 2, 3), ([5, 6], 1, 2)], padding=0)
    (tensor([[7, 8],
            [5, 0]]), tensor([[-100,    9],
            [   6, -100]]))
    """
    width = max(len(tokens) for tokens, _, _ in rows) - 1
    inputs, targets = torch.full((len(rows), width), padding), torch.full((len(rows), width), IGNORE_INDEX)
    for row, (tokens, begin, end) in enumerate(rows):
        ids = torch.tensor(tokens)
        inputs[row, : len(ids) - 1] = ids[:-1]
        targets[row, begin - 1 : end - 1] = ids[begin:end]  # the token before predicts each
    return inputs, targets
