"""`MQARTask` trains on multi-query associative recall and counts the queries that a model answers.

A sequence of T tokens begins with k pairs, `key value key value ...`. Every key comes once more among the tokens that
follow, as a query, and there its value is the target. The distribution is that of Zoology's generator (Arora et al.,
"Zoology: Measuring and improving recall in efficient language models"), which the paper uses.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from saf.data.loader import generator
from saf.distributed import on_rank0
from saf.errors import DivergenceError, InputError
from saf.machine import Execution
from saf.models import GPT
from saf.ops.loss_and_gelu import IGNORE_INDEX
from saf.records.table import Table
from saf.tasks.base import ANSWERS, Answer, Task, run_batches, write_answers

GATE = 0.8
"""The paper compares arms only where the ordinary one answers this share of the development queries."""
TEST_SEED = 800_001
"""The paper's examples of a condition have the seed 800001 + tokens + pairs."""
TEST_BATCH = 4
"""Sequences of a test in a forward pass."""


class Stream(IntEnum):
    """The random streams of one seed: no use sees the examples of another."""

    TRAINING = 0
    DEVELOPMENT = 1
    TEST = 2
    CALIBRATION = 3
    HELDOUT = 4


@dataclass(frozen=True, kw_only=True)
class MQARSettings:
    """Settings of associative recall; the defaults are the paper's."""

    length: int = 512
    """Train on sequences of this number of tokens. Tests and calibration may fill the whole context of the run."""
    pairs: int = 8
    """Put this number of pairs of a key and a value into a training sequence."""
    vocabulary: int = 8_192
    """Draw tokens from this vocabulary: keys from its first half but 0, values from its second, others from all."""
    power: float = 0.01
    """Draw the distance d of a query from its pair with probability d ** (power - 1); 1 is uniform."""
    random_fill: bool = True
    """Put random tokens at places without a pair or query; otherwise token 0 stands there."""
    test_lengths: tuple[int, ...] = (512, 512, 512, 512, 512, 512, 2_048, 4_096)
    """Test on sequences of these numbers of tokens, one test a number."""
    test_pairs: tuple[int, ...] = (8, 16, 24, 32, 48, 64, 8, 8)
    """Put these numbers of pairs into the sequences of the tests, one for each test length."""
    test_examples: int = 512
    """Test on this number of sequences in each test."""
    development: int = 256
    """Evaluate a run on this number of development sequences, which are the same for every seed."""

    def __post_init__(self):
        for name in ("test_lengths", "test_pairs"):  # lists, where they come from JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.test_lengths) != len(self.test_pairs) or len(set(self.tests)) < len(self.tests):
            tests = f"{self.test_lengths} and {self.test_pairs}"
            raise InputError(f"mqar.test_lengths and test_pairs must name equally many different tests, got {tests}")
        if not 0 < self.power < float("inf"):
            raise InputError(f"mqar.power must be a finite number above 0, got {self.power}")
        for length, pairs in ((self.length, self.pairs), *self.tests):
            self.check_fits(length, pairs)

    def check_fits(self, length: int, pairs: int) -> None:
        """Raise InputError for a sequence that cannot hold the pairs and their queries."""
        if pairs < 1 or length < 4 * pairs or length % 2:
            raise InputError(f"mqar needs an even length of at least 4 tokens a pair, got {length} for {pairs} pairs")
        if self.vocabulary <= length or self.vocabulary // 2 - 1 < pairs:
            least = f"larger than the length, {length}, and twice the pairs"
            raise InputError(f"mqar.vocabulary must be {least}, got {self.vocabulary}")

    @property
    def tests(self) -> tuple[tuple[int, int], ...]:
        """The tests as (tokens, pairs)."""
        return tuple(zip(self.test_lengths, self.test_pairs, strict=False))

    def within(self, context: int) -> "MQARSettings":
        """Return the settings with only the tests whose sequences have at most `context` tokens."""
        tests = [(length, pairs) for length, pairs in self.tests if length <= context]
        return replace(
            self, test_lengths=tuple(length for length, _ in tests), test_pairs=tuple(pairs for _, pairs in tests)
        )

    def examples(
        self, stream: Stream, numbers: Sequence[int], *, seed: int, length: int | None = None, pairs: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the examples by their numbers, int64 `[examples, length]`; -100 is no target.

        An example is a pure function of the settings, seed, stream and number; length and pairs are by default
        training's. Pairs fill the first `2 pairs` tokens. The query of distance d stands `2 (d - 1)` tokens behind
        them; distances are drawn without replacement by weights `d ** (power - 1)`, in order of the keys.

        >>> inputs, targets = MQARSettings().examples(Stream.TEST, [0], seed=0, length=16, pairs=2)
        >>> inputs.shape, int((targets != -100).sum())
        (torch.Size([1, 16]), 2)
        """
        length, pairs = length or self.length, pairs or self.pairs
        self.check_fits(length, pairs)
        inputs = np.empty((len(numbers), length), dtype=np.int64)
        targets = np.full((len(numbers), length), IGNORE_INDEX, dtype=np.int64)
        for row, number in enumerate(numbers):
            self._write(inputs[row], targets[row], pairs, generator(stream, seed, number))
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _write(self, inputs: np.ndarray, targets: np.ndarray, pairs: int, draw: np.random.Generator) -> None:
        # Checkpoints resume by the number of an example: another order of these draws would change their data.
        length, half, context = len(inputs), self.vocabulary // 2, 2 * pairs
        keys = 1 + draw.choice(half - 1, size=pairs, replace=False)  # 0 is no key: it may fill the other places
        values = half + draw.choice(self.vocabulary - half, size=pairs, replace=False)
        distances = np.arange(1, (length - context) // 2 + 1)
        # The order of exponential arrival times, of rates proportional to the weights, is a draw without replacement.
        arrivals = draw.exponential(size=len(distances)) * distances ** (1 - self.power)
        queries = context + 2 * np.argsort(arrivals, kind="stable")[:pairs]
        inputs[:] = draw.integers(self.vocabulary, size=length) if self.random_fill else 0
        inputs[0:context:2], inputs[1:context:2] = keys, values
        # The value is the target at its query, not the token behind it, which is drawn like any other.
        inputs[queries], targets[queries] = keys, values


class MQARTask(Task):
    """Answer the queries of associative recall; nothing else is a target.

    The run's `length` is the model's context. Training and development have the settings' own length; calibration fills
    the context, so that patterns cover every test. Training reads the stream of the run's seed; all else is the same
    for every seed.
    """

    name = "mqar"

    def __init__(self, settings: Any, *, length: int):
        """Raise InputError for sequences or tests longer than the model's context, `length`."""
        self.settings = settings
        self.mqar: MQARSettings = settings.mqar
        self.length, self.vocab_size = self.mqar.length, self.mqar.vocabulary
        # Tokens and pairs of a sequence, as in `MQARSettings.tests`: in training, and where it fills the context.
        self._trained, self._context = (self.length, self.mqar.pairs), (length // 2 * 2, self.mqar.pairs)
        if self.longest > length:
            has = f"mqar has sequences of {self.longest:,} tokens, the model's context is {length:,}"
            raise InputError(f"{has}; shorten mqar.length and mqar.test_lengths, or lengthen the run's sequences")
        # All that decides the examples, and the first one, in case their generator changes.
        text = json.dumps({"task": self.name, "seed": settings.seed, **asdict(self.mqar)}, sort_keys=True)
        first = self.batch(0, 1)[0].numpy().astype("<i8").tobytes()
        self.fingerprint = hashlib.sha256(text.encode() + first).hexdigest()

    @property
    def longest(self) -> int:
        return max((self.length, *self.mqar.test_lengths))

    def batch(self, position: int, size: int) -> Tensor:
        numbers = range(position, position + size)
        return torch.stack(self.mqar.examples(Stream.TRAINING, numbers, seed=self.settings.seed))

    def calibration(self) -> list[Mapping[str, Tensor]]:
        """Sequences of the model's context, with `targets` at queries alone, by which gates on heads are measured."""
        inputs, targets = self._fixed(Stream.CALIBRATION, self.settings.calibration_sequences, self._context)
        size = self.settings.batch_size
        batches = zip(inputs.split(size), targets.split(size), strict=True)
        return [{"input_ids": ids, "targets": answers} for ids, answers in batches]

    def heldout(self) -> list[Tensor]:
        inputs, _ = self._fixed(Stream.HELDOUT, self.settings.heldout_sequences, self._context)
        return list(inputs.split(self.settings.batch_size))

    def controller_loss(self, model: GPT, execution: Execution, count: int) -> float:
        count = min(count, self.mqar.development)
        record, _ = self._answers(model, execution, Stream.DEVELOPMENT, count, self._trained)
        return record["loss"]

    def report(
        self, model: GPT, execution: Execution, *, folder: Path, checkpoints: dict[str, str | None]
    ) -> dict[str, Any]:
        """Return loss and accuracy by test, and write how many queries of each example are answered."""
        settings, tests, answers = self.mqar, [], {}
        development, _ = self._answers(model, execution, Stream.DEVELOPMENT, settings.development, self._trained)
        for shape in settings.tests:
            test, answered = self._answers(model, execution, Stream.TEST, settings.test_examples, shape)
            tests.append(test)
            answers[test["task"]] = answered
        return {
            "report_loss": development["loss"],
            "recall": {"development": development, "tests": tests},
            "answers_sha256": on_rank0(lambda: write_answers(folder / ANSWERS, answers)),
        }

    def description(self) -> dict[str, Any]:
        return super().description() | {"folder": None, "mqar": asdict(self.mqar)}

    def _fixed(self, stream: Stream, count: int, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return examples of (tokens, pairs) that are the same for every seed of training."""
        length, pairs = shape
        return self.mqar.examples(stream, range(count), seed=TEST_SEED + length + pairs, length=length, pairs=pairs)

    def _answers(
        self, model: GPT, execution: Execution, stream: Stream, count: int, shape: tuple[int, int]
    ) -> tuple[dict[str, Any], list[Answer]]:
        """Answer `count` fixed examples of (tokens, pairs); return the summary, and each."""
        length, pairs = shape
        size = TEST_BATCH if stream is Stream.TEST else self.settings.batch_size
        inputs, targets = self._fixed(stream, count, shape)
        record = answer_queries(model, inputs, targets, batch_size=size, precision=execution.precision)
        hits, answers = record.pop("hits"), list[Answer]()
        for row, hit in zip(inputs, hits, strict=True):
            # Two runs are paired by the examples themselves, whatever generated them.
            name = hashlib.sha256(row.numpy().astype("<i8").tobytes()).hexdigest()[:16]
            answers.append({"id": name, "right": hit, "queries": pairs})
        return {"task": f"{length:,} tokens, {pairs} pairs", "length": length, "pairs": pairs, **record}, answers


# --- answers


def answer_queries(
    model: GPT, inputs: Tensor, targets: Tensor, *, batch_size: int = 4, precision: str = "auto"
) -> dict[str, Any]:
    """Answer the queries of `inputs [N, T]`, whose answers are `targets [N, T]`, -100 elsewhere.

    An answer is the most likely of all output classes, whichever of them a task uses (paper, appendix on associative
    recall). Processes of a group divide the batches. Returns `accuracy` over all queries, `loss` (nats per query), the
    numbers of `examples` and `queries`, and `hits`, the number of queries of each example that are answered rightly.
    """
    device = model.embed.weight.device

    def answer(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        ids, answers = (part.to(device) for part in batch)
        where = answers != IGNORE_INDEX
        # At queries alone: all logits of a sequence of 4,096 tokens and 50,304 classes are 0.8 GB in float32.
        logits = F.linear(model.hidden(ids)[where], model.embed.weight).float()
        right = torch.zeros_like(where)
        right[where] = logits.argmax(1) == answers[where]
        return right.sum(1).cpu(), F.cross_entropy(logits, answers[where], reduction="none").double().cpu()

    batches = list(zip(inputs.split(batch_size), targets.split(batch_size), strict=True))
    hits, losses = map(torch.cat, zip(*run_batches(model, answer, batches, precision=precision), strict=True))
    loss, count = float(losses.mean()), len(losses)
    if not math.isfinite(loss):
        raise DivergenceError(f"the loss at queries is {loss}: the model's outputs are not finite")
    record = {"accuracy": int(hits.sum()) / count, "loss": loss, "examples": len(hits), "queries": count}
    return {**record, "hits": hits.tolist()}


def recall_tables(result: Mapping[str, Any]) -> list[Table]:
    """Tabulate a run of recall: its tests at the end, and by updates where it was measured in between."""
    if "recall" not in result:
        return []
    rows = [
        [f"{test['length']:,}", test["pairs"], f"{100 * test['accuracy']:.2f}", f"{test['loss']:.4f}", test["queries"]]
        for test in result["recall"]["tests"]
    ]
    tables = [Table.of("queries answered", ("tokens", "pairs", "accuracy, %", "loss, nats", "queries"), rows)]
    if reports := {update: report["recall"]["tests"] for update, report in result["reports"].items()}:
        columns = ("tokens / pairs", *(f"{int(update):,} updates" for update in reports))
        rows = [
            [f"{test[0]['length']:,} / {test[0]['pairs']}", *(f"{100 * each['accuracy']:.2f}" for each in test)]
            for test in zip(*reports.values(), strict=True)  # one test, after each number of updates
        ]
        tables.append(Table.of("queries answered, %, by updates", columns, rows))
    return tables
