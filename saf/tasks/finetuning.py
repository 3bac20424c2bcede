"""Finetuning on questions with choices: the loss is that of the answer's tokens, the judgement is accuracy.

What the paper leaves open is settled here: of the training file a stratified share is development, which no arm trains
on; the rest is shuffled anew in each epoch by (seed, epoch), so that arms see the same examples in the same order.
"""

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from saf.data import Tokenizer
from saf.errors import CheckpointError, DataError, InputError, SafWarning, check_name
from saf.evaluate.answers import NO_TARGET, answer, loss_of, padded, summary, write_answers
from saf.machine.execution import Execution
from saf.machine.processes import done_once
from saf.models import GPT
from saf.records.paths import absolute_path
from saf.tasks.examples import Encoded, Found, encode_examples, examples_hash, read_examples, stratified
from saf.tasks.task import FetchedAhead, TaskSettings, inputs_and_targets

TooLong = Literal["leave_out", "shorten", "refuse"]
Judge = Literal["test", "development"]
_ORDER = 17
"""The random stream of the order of examples; `saf.data.loader` has others."""


PATHS = ("test", "tokenizer")
"""Fields of `FinetuneSettings` that name files, which a fingerprint knows wherever they lie."""


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings:
    """Hold what finetuning adds to the settings of a run, whose `data` is the file of training examples."""

    test: str = ""
    """File of the examples that accuracy is measured on."""
    tokenizer: str = ""
    """Folder of the tokenizer that the parent was trained with: its data folder."""
    max_tokens: int = 512
    """Most tokens of an example with its answer."""
    too_long: TooLong = "leave_out"
    """What becomes of longer examples: left out, their text (never question or answer) shortened at its end, or
    refused. Files other than the project's own layouts are shortened only where they have a "question"."""
    development: float = 0.1
    """Share of the training file, stratified by answer, that nothing is trained on: epochs are chosen and decisions
    during a run are made by it."""
    split_seed: int = 0
    """Of that share, and of a part of the file; the run's own seed orders the rest."""
    most_examples: int | None = None
    """Use a part of the training file of so many examples where it has more, stratified by answer, the same for every
    seed of a run; those of it that are too long are left out."""
    judge: Judge = "test"
    """Examples that the final report is of; development where epochs are chosen."""

    def __post_init__(self):
        """Raise InputError naming the first field that cannot be used."""
        check_name("too_long", self.too_long, get_args(TooLong))
        check_name("judge", self.judge, get_args(Judge))
        if self.max_tokens < 2:
            raise InputError(f"max_tokens must be at least 2, got {self.max_tokens}")
        if not 0 < self.development < 1:
            raise InputError(f"development must be a share above 0 and below 1, got {self.development}")
        if self.most_examples is not None and self.most_examples < 1:
            raise InputError(f"most_examples must be at least 1, got {self.most_examples}")
        for name in PATHS:
            object.__setattr__(self, name, absolute_path(getattr(self, name)))


class FinetuneTask:
    """Answer questions with choices; a subclass names the layout of its files.

    `length` is the longest example, training and test, and no more than the settings' or the model's tokens.
    """

    name: ClassVar[str]

    def __init__(self, settings: TaskSettings, *, length: int):
        """Read, check and split the examples; a warning names those that are left out.

        Raises:
            DataError: A file that cannot be read or gives too few examples, or, with too_long="refuse", long ones.
            InputError: No settings of finetuning.
        """
        if settings.finetuning is None or not settings.finetuning.test or not settings.finetuning.tokenizer:
            raise InputError(f"the task {self.name!r} needs a file of examples to test on (test) and a tokenizer")
        self.settings = settings
        self.own: FinetuneSettings = settings.finetuning
        self.tokenizer = Tokenizer.load(self.own.tokenizer)
        limit = min(self.own.max_tokens - 1, length)
        given = self._read(settings.data, limit, most=self.own.most_examples)
        tested = self._read(self.own.test, limit)
        self.left_out = {"train": given.left_out, "test": tested.left_out}
        labels = [each.example.answer for each in given.examples]
        places = set(stratified(labels, self.own.development, seed=self.own.split_seed))
        self.development: list[Encoded] = [each for at, each in enumerate(given.examples) if at in places]
        self.examples: list[Encoded] = [each for at, each in enumerate(given.examples) if at not in places]
        self.test: list[Encoded] = tested.examples
        if not self.development or not self.examples:
            raise DataError(
                f"{settings.data} gives {len(given.examples)} examples: too few for a development share of "
                f"{self.own.development:g} beside training; give more examples or another share (development)"
            )
        self._tell_of_shared()
        self.length = max(each.longest for each in (*self.examples, *self.development, *self.test))

    def _read(self, path: str, limit: int, *, most: int | None = None) -> Found:
        """Return a file's examples as tokens, at most so many of them; warn of those left out, or refuse them."""
        found = read_examples(path, self.name)
        if most is not None and len(found.examples) > most:
            # Before any is made tokens, which takes longer than all else.
            labels = [each.answer for each in found.examples]
            places = stratified(labels, most / len(labels), seed=self.own.split_seed)
            found.examples = [found.examples[place] for place in places]
        encoded = encode_examples(found, self.tokenizer, limit=limit, shorten=self.own.too_long == "shorten")
        if words := encoded.words():
            if self.own.too_long == "refuse" or not encoded.examples:
                raise DataError(
                    f"{path}: examples that cannot be used: {words}; at most {limit + 1} tokens are allowed"
                )
            warnings.warn(f"{path}: {words} left out of {_count(encoded)} examples", SafWarning, stacklevel=4)
        if cut := sum(each.shortened for each in encoded.examples):
            told = f"{path}: the text of {cut} of {_count(encoded)} examples is shortened to {limit + 1} tokens in all"
            warnings.warn(told, SafWarning, stacklevel=4)
        return encoded

    def _tell_of_shared(self) -> None:
        """Warn of test examples whose text and question are trained on."""
        trained = {(each.example.text, each.example.question) for each in (*self.examples, *self.development)}
        self.shared = sum((each.example.text, each.example.question) in trained for each in self.test)
        if self.shared:
            told = f"{self.own.test}: {self.shared} of {len(self.test)} examples are in {self.settings.data} too"
            warnings.warn(told, SafWarning, stacklevel=4)

    @property
    def vocab_size(self) -> int:
        """Return how many token ids the tokenizer has."""
        return self.tokenizer.vocab_size

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the tokenizer and of all examples, as they are split."""
        parts = (self.tokenizer.fingerprint, *map(examples_hash, (self.examples, self.development, self.test)))
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    @property
    def windows_per_update(self) -> int:
        """Return how many examples one update consumes."""
        return self.settings.batch_size * self.settings.accumulation

    @property
    def targets_per_update(self) -> int:
        """Return how many tokens the examples of one update have on average, rounded; padding is not counted."""
        mean = sum(len(each.sequence) - 1 for each in self.examples) / len(self.examples)
        return round(self.windows_per_update * mean)

    def updates_of(self, epochs: int) -> int:
        """Return the updates of so many epochs; the last one takes up the next epoch's first examples to be full."""
        return -(-epochs * len(self.examples) // self.windows_per_update)

    def check(self, *, calibrates: bool, scores_outputs: bool) -> None:
        """Raise DataError now, not in the middle of training, for too few tokens to calibrate on."""
        if calibrates:
            self.calibration()
        if scores_outputs:
            self.heldout()

    def training(self, update: int, device: torch.device, *, first: int = 0, every: int = 1) -> FetchedAhead:
        """Return the micro-batches that follow `update` updates; number `first`, and then each `every`.

        Each is as long as its longest example; only answers are targets.
        """
        size, padding = self.settings.batch_size, self.tokenizer.eot_id
        position = update * self.windows_per_update + first * size

        def make(place: int) -> Tensor:
            some = [self.examples[number] for number in self.numbers(place, size)]
            return torch.stack(padded([(each.sequence, len(each.prompt)) for each in some], padding=padding))

        return FetchedAhead(make, inputs_and_targets, position=position, step=every * size, device=device)

    def numbers(self, position: int, count: int) -> list[int]:
        """Return which examples come next where `position` were consumed; each epoch has an order of its own."""
        places = (divmod(position + row, len(self.examples)) for row in range(count))
        return [int(_order(self.settings.seed, epoch, len(self.examples))[place]) for epoch, place in places]

    def calibration(self) -> list[dict[str, Tensor]]:
        """Return training examples to calibrate on, each with its answer, in batches padded behind.

        They are drawn by the run's seed, the same for every arm; the last one gives its place to the longest example
        where none as long was drawn, since patterns reach as far as the longest sequence. Where examples that are not
        trained on, or other choices, are longer still, the longest goes on with the text of further examples.

        Returns:
            Mappings with `input_ids`, `attention_mask` and, at the examples' answers, `targets`,
            `[<= batch_size, longest of them]`.

        Raises:
            DataError: There are fewer training examples, or too few tokens for the longest.
        """
        count, size = self.settings.calibration_sequences, self.settings.batch_size
        if count > len(self.examples):
            raise DataError(
                f"calibration_sequences={count} examples are asked for, {len(self.examples)} are trained on; ask for "
                "fewer, or give more"
            )
        order = _order(self.settings.seed, 0, len(self.examples), stream=_ORDER + 1)
        chosen = [self.examples[place] for place in order[:count]]
        longest = max(self.examples, key=lambda each: len(each.sequence))
        if all(len(each.sequence) < len(longest.sequence) for each in chosen):
            chosen[-1] = longest
        reach = max(chosen, key=lambda each: len(each.sequence))
        further = [token for place in order[::-1] for token in self.examples[place].sequence]
        batches = []
        for first in range(0, count, size):
            some = chosen[first : first + size]
            sequences = [each.sequence for each in some]
            if reach in some:
                sequences[some.index(reach)] = (*reach.sequence, *further)[: self.length + 1]
            batches.append(_calibration_batch(some, sequences, padding=self.tokenizer.eot_id))
        if (given := max(batch["input_ids"].shape[1] for batch in batches)) < self.length:
            raise DataError(
                f"patterns must reach {self.length:,} tokens, the longest example, and all training examples together "
                f"have {given:,}; give more of them"
            )
        return batches

    def heldout(self) -> list[Tensor]:
        """Return development examples laid end to end, which output-aware scores read at the longest's last positions.

        They are cut into sequences of `length` tokens, LongTensors `[<= batch_size, length]`: these scores compare rows
        that every sequence has. Raises DataError for too few tokens.
        """
        ids = [token for each in self.development for token in each.sequence]
        count = self.settings.heldout_sequences
        if len(ids) < count * self.length:
            raise DataError(
                f"heldout_sequences={count} sequences of {self.length:,} tokens need {count * self.length:,} tokens, "
                f"{len(ids):,} are there; ask for at most {len(ids) // self.length}"
            )
        return list(torch.tensor(ids[: count * self.length]).view(count, self.length).split(self.settings.batch_size))

    def controller_loss(self, model: GPT, execution: Execution, *, batches: int | None = None) -> float:
        """Return the loss of development answers, nats per token: of the first `eval_windows`, or of batches."""
        size = self.settings.batch_size
        some = self.development[: self.settings.eval_windows if batches is None else batches * size]
        return loss_of(self._answer(model, execution, some))

    def report(
        self, model: GPT, execution: Execution, *, folder: Path, checkpoints: dict[str, str | None]
    ) -> dict[str, Any]:
        """Return loss and accuracy on every example that is not left out, and write answers.jsonl, a line each."""
        records = self._answer(model, execution, self.test if self.own.judge == "test" else self.development)
        return {
            "report_loss": loss_of(records),
            "judged_by": self.own.judge,
            **summary(records),
            "left_out": {name: {why: len(ids) for why, ids in parts.items()} for name, parts in self.left_out.items()},
            "answers_sha256": done_once(lambda: write_answers(folder, records)),
        }

    def _answer(self, model: GPT, execution: Execution, some: Sequence[Encoded]) -> list[dict[str, Any]]:
        size, padding = self.settings.batch_size, self.tokenizer.eot_id
        return answer(model, some, padding=padding, batch_size=size, precision=execution.precision)

    def description(self) -> dict[str, Any]:
        """Return the files, their fingerprint, how many examples serve for what, and which are left out."""
        return {
            "folder": self.settings.data,
            "fingerprint": self.fingerprint,
            "tokenizer": self.tokenizer.fingerprint,
            "test": self.own.test,
            "task": self.name,
            "longest": self.length,
            "examples": {"train": len(self.examples), "development": len(self.development), "test": len(self.test)},
            "test_examples_trained_on": self.shared,
            "left_out": self.left_out,
            **{name: value for name, value in asdict(self.own).items() if name not in ("test", "tokenizer")},
        }

    def state(self, update: int) -> dict[str, Any]:
        """Return how many examples were consumed, and which they are."""
        return {
            "sampler_position": update * self.windows_per_update,
            "data_fingerprint": self.fingerprint,
            "tokenizer": self.tokenizer.fingerprint,
        }

    def check_continues(self, state: dict[str, Any], path: Path) -> None:
        """Raise CheckpointError for a checkpoint of other examples, InputError for updates of another size."""
        if state["data_fingerprint"] != self.fingerprint:
            raise CheckpointError(
                f"{path} was trained on other examples than these, or on another split; use the files that it was "
                "trained on, or take its weights alone (fresh)"
            )
        if state["sampler_position"] != state["update"] * self.windows_per_update:
            raise InputError(
                f"the parent used {state['sampler_position'] // max(state['update'], 1)} examples an update, this run "
                f"{self.windows_per_update}; keep batch_size x accumulation"
            )


class OwnTask(FinetuneTask):
    """Answer the questions of a user's own JSONL."""

    name: ClassVar[str] = "jsonl"


class SST2Task(FinetuneTask):
    """Say whether a sentence of SST-2 is negative or positive."""

    name: ClassVar[str] = "sst2"


class BoolQTask(FinetuneTask):
    """Answer BoolQ's questions about a passage with yes or no."""

    name: ClassVar[str] = "boolq"


class QualityTask(FinetuneTask):
    """Choose the option that answers a question of QuALITY about an article."""

    name: ClassVar[str] = "quality"


def _count(found: Found) -> int:
    """Return how many examples a file had."""
    return len(found.examples) + sum(map(len, found.left_out.values()))


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int, *, stream: int = _ORDER) -> np.ndarray:
    """Return the order of examples in an epoch: a pure function of its arguments, kept for the next micro-batch."""
    key, counter = np.array([seed, epoch], dtype=np.uint64), np.array([0, 0, 0, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).permutation(count)


def _calibration_batch(
    examples: Sequence[Encoded], sequences: Sequence[Sequence[int]], *, padding: int
) -> dict[str, Tensor]:
    """Return a batch to calibrate on of examples whose tokens are `sequences`, which may go on behind the answer."""
    rows = [(tokens, len(each.prompt)) for each, tokens in zip(examples, sequences, strict=True)]
    inputs, targets = padded(rows, padding=padding)
    places = torch.arange(inputs.shape[1])
    answered = torch.tensor([len(each.sequence) - 1 for each in examples])[:, None]
    counted = torch.tensor([len(tokens) - 1 for tokens in sequences])[:, None]
    return {
        "input_ids": inputs,
        "attention_mask": (places < counted).long(),
        "targets": targets.masked_fill(places >= answered, NO_TARGET),
    }
