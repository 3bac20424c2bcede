"""Multi-query associative recall: pairs of a key and a value, and later queries, each a key whose value is the answer.

A sequence of T tokens begins with k pairs, `key value key value ...`; every key comes up once more among the tokens
that follow, and there its value is the next token to predict. The distribution is that of Zoology's generator (Arora et
al., "Zoology: Measuring and improving recall in efficient language models"), with which the paper's examples are made.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from saf.errors import CheckpointError, InputError, SafWarning
from saf.evaluate.recall import NO_TARGET, RECALL, Recalled, answer_queries, not_learnt, recall_conditions
from saf.machine.execution import Execution, device_name
from saf.machine.processes import done_once
from saf.models import GPT
from saf.records.files import read_json, write_json
from saf.records.result import result_header
from saf.tasks.task import FetchedAhead, TaskSettings, inputs_and_targets

TEST_SEED = 800_001
"""The paper's examples of a condition have the seed 800001 + tokens + pairs."""


class _Stream(IntEnum):
    """Name the separate random streams of one seed: the uses never see each other's examples."""

    TRAINING = 0
    DEVELOPMENT = 1
    TEST = 2
    CALIBRATION = 3
    HELDOUT = 4


@dataclass(frozen=True, kw_only=True)
class MQARSettings:
    """Hold the settings of associative recall; the defaults are the paper's."""

    length: int = 512
    """Tokens of a training sequence; the run's length is the model's context, which tests and calibration may fill."""
    pairs: int = 8
    """Pairs of a key and a value in a training sequence."""
    vocabulary: int = 8_192
    """Tokens that sequences are made of: keys from its first half but 0, values from its second, others from all."""
    power: float = 0.01
    """Exponent of the distribution of distances, p(d) as d to the power of this minus 1; 1 is uniform."""
    random_fill: bool = True
    """Put random tokens where there is neither pair nor query; token 0 otherwise."""
    test_lengths: tuple[int, ...] = (512, 512, 512, 512, 512, 512, 2_048, 4_096)
    """Tokens of the sequences of each test."""
    test_pairs: tuple[int, ...] = (8, 16, 24, 32, 48, 64, 8, 8)
    """Pairs of the sequences of each test, as many numbers as of lengths."""
    test_examples: int = 512
    """Sequences of each test."""
    development: int = 256
    """Sequences of training's length and pairs that are watched during a run, the same for every seed."""
    gate: float = 0.8
    """Share of the development queries that the ordinary arm must answer before arms are compared."""
    ordinary: str = ""
    """Finished run of the ordinary arm, whose answers the gate is of; this run's own are where none is named."""

    def __post_init__(self):
        """Raise InputError naming the first setting that cannot be used."""
        for name in ("test_examples", "development"):
            if getattr(self, name) < 1:
                raise InputError(f"mqar.{name} must be at least 1; got {getattr(self, name)}")
        if len(self.test_lengths) != len(self.test_pairs):
            raise InputError(
                "mqar.test_lengths and mqar.test_pairs must name equally many tests; "
                f"got {len(self.test_lengths)} and {len(self.test_pairs)}"
            )
        if len(set(self.tests)) < len(self.tests):
            raise InputError(f"each test of mqar must be named once; got {list(self.tests)}")
        if not 0 <= self.gate <= 1:
            raise InputError(f"mqar.gate must be a share in [0, 1]; got {self.gate}")
        for length, pairs in ((self.length, self.pairs), *self.tests):
            self.source(0, length=length, pairs=pairs)

    @property
    def tests(self) -> tuple[tuple[int, int], ...]:
        """Return the tests as (tokens, pairs)."""
        return tuple(zip(self.test_lengths, self.test_pairs, strict=False))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    def within(self, context: int) -> "MQARSettings":
        """Return the settings with those tests alone whose sequences a model of so many tokens takes."""
        kept = [test for test in self.tests if test[0] <= context]
        lengths, pairs = (tuple(test[part] for test in kept) for part in (0, 1))
        return replace(self, test_lengths=lengths, test_pairs=pairs)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "MQARSettings":
        """Build from `to_dict`'s form; raise TypeError for unknown names."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**given)

    def source(self, seed: int, *, length: int | None = None, pairs: int | None = None) -> "MQARSource":
        """Return the source of examples of one seed; of training's length and pairs unless others are given."""
        return MQARSource(
            seed=seed,
            length=self.length if length is None else length,
            pairs=self.pairs if pairs is None else pairs,
            vocabulary=self.vocabulary,
            power=self.power,
            random_fill=self.random_fill,
        )


@dataclass(frozen=True, kw_only=True)
class MQARSource:
    """Make examples of associative recall; each is a pure function of seed, stream and number.

    Pairs fill the first `2 pairs` tokens. A query stands an even number of tokens behind them: distances 1, 2, ... are
    drawn without replacement by weights `distance ** (power - 1)`, in the order of the keys, so that none coincide.

    >>> source = MQARSource(seed=0, length=16, pairs=2, vocabulary=32)
    >>> inputs, targets = source.examples(_Stream.TEST, [0])
    >>> inputs.shape, int((targets != -100).sum())
    (torch.Size([1, 16]), 2)
    """

    seed: int
    length: int
    """Tokens of a sequence, an even number."""
    pairs: int
    vocabulary: int = 8_192
    power: float = 0.01
    random_fill: bool = True

    def __post_init__(self):
        """Raise InputError for sequences that cannot hold the pairs and their queries, or settings out of range."""
        if self.seed < 0:
            raise InputError(f"a seed of mqar must be at least 0; got {self.seed}")
        if self.pairs < 1 or self.length < 2 or self.length % 2:
            raise InputError(
                f"mqar needs at least 1 pair and an even length; got {self.pairs} pairs, {self.length} tokens"
            )
        if 4 * self.pairs > self.length:
            raise InputError(
                f"{self.length} tokens of mqar cannot hold {self.pairs} pairs: with their queries they take "
                f"{4 * self.pairs}; ask for {self.length // 4} pairs or fewer, or longer sequences"
            )
        if self.vocabulary <= self.length or self.vocabulary // 2 - 1 < self.pairs:
            raise InputError(
                f"a vocabulary of mqar must be larger than the length, {self.length}, and its first half without token "
                f"0 must hold {self.pairs} keys; got {self.vocabulary}"
            )
        if not 0 < self.power < float("inf"):
            raise InputError(f"mqar.power must be a finite number above 0; got {self.power}")

    def examples(self, stream: int, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the examples with these numbers: inputs and targets, int64 `[examples, length]`; -100 is no target."""
        inputs = np.empty((len(numbers), self.length), dtype=np.int64)
        targets = np.full((len(numbers), self.length), NO_TARGET, dtype=np.int64)
        for row, number in enumerate(numbers):
            self._write(inputs[row], targets[row], self._generator(stream, number))
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _generator(self, stream: int, number: int) -> np.random.Generator:
        """Return the generator of one example: the same numbers wherever it is made."""
        key = np.array([self.seed, number], dtype=np.uint64)
        counter = np.array([0, 0, 0, stream], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))

    def _write(self, inputs: np.ndarray, targets: np.ndarray, draw: np.random.Generator) -> None:
        """Fill a row of inputs and targets with an example."""
        half, context = self.vocabulary // 2, 2 * self.pairs
        keys = 1 + draw.choice(half - 1, size=self.pairs, replace=False)
        values = half + draw.choice(self.vocabulary - half, size=self.pairs, replace=False)
        distances = np.arange(1, (self.length - context) // 2 + 1)
        # Arrival times of rates proportional to the weights: who comes first is a draw without replacement, in order.
        arrivals = draw.exponential(size=len(distances)) * distances ** (1 - self.power)
        queries = context + 2 * np.argsort(arrivals, kind="stable")[: self.pairs]
        inputs[:] = draw.integers(self.vocabulary, size=self.length) if self.random_fill else 0
        inputs[0:context:2], inputs[1:context:2] = keys, values
        inputs[queries], targets[queries] = keys, values


class MQARTask:
    """Answer the queries of associative recall; nothing else is a target.

    The run's `length` is the model's context. Training and development have the settings' own length; calibration fills
    the context, so that patterns cover every test. Training reads the stream of the run's seed; all else is the same
    for every seed. Data folders and samplers play no part.
    """

    name: ClassVar[str] = "mqar"

    def __init__(self, settings: TaskSettings, *, length: int):
        """Take the settings; raise InputError for sequences or tests longer than the model's context, `length`."""
        self.settings = settings
        self.mqar: MQARSettings = settings.mqar
        self.context = length
        self.length = self.mqar.length
        self._tell_of_left_out()
        longest = max((self.length, *self.mqar.test_lengths))
        if longest > length:
            raise InputError(
                f"mqar has sequences of {longest:,} tokens, the model's context is {length:,}; name shorter ones with "
                "mqar.length and mqar.test_lengths, or give the run a length that holds them"
            )

    def _tell_of_left_out(self) -> None:
        """Warn where the tests are the paper's but for those that the context does not hold."""
        paper = MQARSettings()
        within = paper.within(self.context)
        if self.mqar.tests == within.tests != paper.tests:
            left = sorted({length for length, _ in paper.tests} - {length for length, _ in within.tests})
            words = " and ".join(f"{length:,}" for length in left)
            told = f"the tests of {words} tokens are left out: the model's context is {self.context:,}"
            warnings.warn(told, SafWarning, stacklevel=4)

    @property
    def vocab_size(self) -> int:
        """Return how many tokens sequences are made of."""
        return self.mqar.vocabulary

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of everything that examples are made from, and of the first training example."""
        made = {name: value for name, value in self.mqar.to_dict().items() if name not in ("gate", "ordinary")}
        first, _ = self._training_source.examples(_Stream.TRAINING, [0])
        said = json.dumps({"task": self.name, "seed": self.settings.seed, **made}, sort_keys=True)
        return hashlib.sha256(said.encode() + first.numpy().astype("<i8").tobytes()).hexdigest()

    @property
    def windows_per_update(self) -> int:
        """Return how many sequences one update consumes."""
        return self.settings.batch_size * self.settings.accumulation

    @property
    def targets_per_update(self) -> int:
        """Return how many tokens one update reads; of each sequence as many as it has pairs are counted in the loss."""
        return self.windows_per_update * self.length

    @property
    def _training_source(self) -> MQARSource:
        return self.mqar.source(self.settings.seed)

    def check(self, *, calibrates: bool, scores_outputs: bool) -> None:
        """Raise InputError when the context, which calibration sequences fill, cannot hold the pairs.

        So it does when the ordinary arm that settings name has no answers yet.
        """
        if calibrates or scores_outputs:
            self._fixed(_Stream.CALIBRATION, 1, length=self._whole_context)
        if self.mqar.ordinary and not (Path(self.mqar.ordinary) / RECALL).is_file():
            raise InputError(
                f"mqar.ordinary names {self.mqar.ordinary}, which holds no {RECALL}; expected a finished run of recall"
            )

    def training(self, update: int, device: torch.device, *, first: int = 0, every: int = 1) -> FetchedAhead:
        """Return the micro-batches that follow `update` updates; number `first`, and then each `every`."""
        size = self.settings.batch_size
        position = update * self.windows_per_update + first * size

        def make(place: int) -> Tensor:
            return torch.stack(self._training_source.examples(_Stream.TRAINING, range(place, place + size)))

        return FetchedAhead(make, inputs_and_targets, position=position, step=every * size, device=device)

    def calibration(self) -> list[Mapping[str, Tensor]]:
        """Return sequences of the model's context, `[<= batch_size, context]`, the same for every arm.

        Their `targets`, at queries alone, are what gates on heads are measured by.
        """
        batches = self._batches(_Stream.CALIBRATION, self.settings.calibration_sequences)
        return [{"input_ids": inputs, "targets": targets} for inputs, targets in batches]

    def heldout(self) -> list[Tensor]:
        """Return the sequences that output-aware scores read, as LongTensors `[<= batch_size, context]`."""
        return [inputs for inputs, _ in self._batches(_Stream.HELDOUT, self.settings.heldout_sequences)]

    def controller_loss(self, model: GPT, execution: Execution, *, batches: int | None = None) -> float:
        """Return the loss at the queries of development sequences, nats per query: `eval_windows` of them, or batches.

        There are no more than the settings name.
        """
        size = self.settings.batch_size
        return self._develop(model, execution, self.settings.eval_windows if batches is None else batches * size).loss

    def report(
        self, model: GPT, execution: Execution, *, folder: Path, checkpoints: dict[str, str | None]
    ) -> dict[str, Any]:
        """Return loss and accuracy by test, and write recall.json with the hits of every example.

        Warns where the ordinary arm answers its development examples too seldom for a comparison to mean anything.
        """
        developed = self._develop(model, execution, self.mqar.development)
        tests = {
            (length, pairs): self._fixed(_Stream.TEST, self.mqar.test_examples, length=length, pairs=pairs)
            for length, pairs in self.mqar.tests
        }
        records = recall_conditions(model, execution, tests)
        judged = developed.accuracy
        if self.mqar.ordinary:
            judged = read_json(Path(self.mqar.ordinary) / RECALL)["development"]["accuracy"]
        recall = {
            "development": {"length": self.length, "pairs": self.mqar.pairs, **developed.to_dict()},
            "gate": self.mqar.gate,
            "gate_of": self.mqar.ordinary or None,
            "gate_accuracy": judged,
            "gate_passed": judged >= self.mqar.gate,
            "tests": records,
        }
        device = device_name(execution.device)
        head = result_header("recall", self.mqar.to_dict(), device=device, checkpoints=checkpoints)
        done_once(lambda: write_json(folder / RECALL, {**head, **recall}))
        if words := not_learnt(recall):
            warnings.warn(words, SafWarning, stacklevel=2)
        short = [{name: value for name, value in one.items() if name != "hits"} for one in records]
        development = {name: value for name, value in recall["development"].items() if name != "hits"}
        return {"report_loss": developed.loss, "recall": {**recall, "development": development, "tests": short}}

    def description(self) -> dict[str, Any]:
        """Return the task's settings and fingerprint."""
        return {"folder": None, "fingerprint": self.fingerprint, "tokenizer": None, "mqar": self.mqar.to_dict()}

    def state(self, update: int) -> dict[str, Any]:
        """Return how many sequences were consumed, and what they are made from."""
        return {"sampler_position": update * self.windows_per_update, "data_fingerprint": self.fingerprint}

    def check_continues(self, state: dict[str, Any], path: Path) -> None:
        """Raise CheckpointError for a checkpoint of other examples, InputError for updates of another size."""
        if state["data_fingerprint"] != self.fingerprint:
            raise CheckpointError(
                f"{path} was not trained on these examples: their settings or seed are others. Keep mqar's settings "
                "and the seed, or start from its weights alone"
            )
        position, update = state["sampler_position"], state["update"]
        if position != update * self.windows_per_update:
            raise InputError(
                f"the parent used {position // max(update, 1)} sequences an update, this run "
                f"{self.settings.batch_size} x {self.settings.accumulation}; keep their product so that the examples "
                "go on where they stopped"
            )

    @property
    def _whole_context(self) -> int:
        """Return the longest even length within the model's context."""
        return self.context // 2 * 2

    def _fixed(self, stream: _Stream, count: int, *, length: int, pairs: int | None = None) -> tuple[Tensor, Tensor]:
        """Return examples that are the same for every seed of training."""
        pairs = self.mqar.pairs if pairs is None else pairs
        source = self.mqar.source(TEST_SEED + length + pairs, length=length, pairs=pairs)
        return source.examples(stream, range(count))

    def _batches(self, stream: _Stream, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return examples that fill the context, in batches."""
        inputs, targets = self._fixed(stream, count, length=self._whole_context)
        size = self.settings.batch_size
        return list(zip(inputs.split(size), targets.split(size), strict=True))

    def _develop(self, model: GPT, execution: Execution, count: int) -> Recalled:
        """Return how the model answers the first development sequences."""
        inputs, targets = self._fixed(_Stream.DEVELOPMENT, min(count, self.mqar.development), length=self.length)
        size = self.settings.batch_size
        return answer_queries(model, inputs, targets, batch_size=size, precision=execution.precision)
