"""`Task` is what a run trains on and is measured by; the functions below it measure any model and write its answers.

The training loop knows no data: `Task` says where a run stands in them, and whether it may continue from a checkpoint.
Answers to questions have one form in all tasks, `TaskAnswers`: a summary, and a file with a line a question.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from saf.calibration import Batch
from saf.distributed import map_over_ranks, rank_and_size
from saf.errors import CheckpointError, DivergenceError, InputError
from saf.heads import EDITED
from saf.machine import Execution, autocast, resolve_precision
from saf.models import GPT
from saf.models.adapter import evaluation_mode, language_model, longest_input, unwrap
from saf.ops import FrozenHeads
from saf.records.files import check_file, file_hash, read_lines, write_lines
from saf.records.run import RecordedRun

PARENT = "parent"
"""In records each checkpoint has a role; the roles of those that a model was derived from begin with this."""
Progress = Callable[[int, int], None]
"""Called with (number done, number in all)."""
Tokens = tuple[int, ...]
Answer = Mapping[str, Any]
"""A model's answer to one question, by key.

- `id`: the question's;
- `answer`, `taken`, `right`: number of the right choice, number of the model's choice, whether they are the same;
- `shortened`: whether the context was cut to fit;
- `log_probs`: the log-probability of each choice in nats, summed over its tokens;
- `answer_tokens`: tokens of the right choice, in tasks of finetuning;
- `right_norm`: whether the right choice has the highest log-probability a character, in some zero-shot tasks.

An example of associative recall has no choices. Its keys are `id`, `queries`, and `right`: queries answered rightly.
"""
ANSWERS = "answers.jsonl"
"""Name of a run's file of answers, a line a question."""
In = TypeVar("In")
Out = TypeVar("Out")


class Task(ABC):
    """What a run trains on and is measured by.

    A task sets the attributes below, reads its sequences (`batch`, `calibration`, `heldout`), and measures a model on
    them (`controller_loss`, `report`). In a group of processes every one measures the same model: they divide the
    sequences among them, the first one writes, and all get the same result.
    """

    name: str
    """Its name in settings and in `TASKS`."""
    settings: Any
    """The run's `saf.train.TrainConfig`, whose module imports this one."""
    length: int
    """Tokens of a training sequence, or of the longest one."""
    vocab_size: int
    """Number of token ids of inputs and targets."""
    tokenizer_hash: str | None = None
    """SHA-256 of the tokenizer, where there is one."""
    fingerprint: str
    """SHA-256 of all data, for training and measuring."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the model reads, in training or for a report."""
        return self.length

    @property
    def windows_per_update(self) -> int:
        """Sequences of an update."""
        return self.settings.batch_size * self.settings.accumulation

    @property
    def targets_per_update(self) -> int:
        """Tokens of an update, including those that are left out of the loss."""
        return self.windows_per_update * self.length

    def check(self, *, calibrates: bool, scores_outputs: bool) -> None:
        """Raise DataError before training if there are too few data to calibrate on, or for output-aware scores."""
        # What is read is thrown away: at the event, halfway through training, it would be too late.
        if calibrates:
            self.calibration()
        if scores_outputs:
            self.heldout()

    @abstractmethod
    def batch(self, position: int, size: int) -> Tensor:
        """Return inputs and targets `[2, size, length]` of the training sequences from `position` on."""

    def training(
        self, update: int, device: torch.device, *, first: int = 0, every: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the micro-batches after `update` updates: number `first`, then every `every`-th.

        Rank r of n passes r and n, so that each trains on its own. The next one is fetched before this one is used.
        """
        size = self.settings.batch_size
        # Counted over all ranks: a run stopped on four processes goes on with two, on the same sequences.
        position = update * self.windows_per_update + first * size

        def fetch(position: int) -> Tensor:
            batch = self.batch(position, size)
            # Only from pinned memory does the copy run while the GPU computes on the batch before.
            return batch.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch

        pending = fetch(position)
        while True:
            position += every * size
            (inputs, targets), pending = pending, fetch(position)
            yield inputs, targets

    @abstractmethod
    def calibration(self) -> Sequence[Batch]:
        """Return calibration sequences, the same for every arm, in batches of at most `batch_size`."""

    @abstractmethod
    def heldout(self) -> list[Tensor]:
        """Return the sequences that output-aware scores read, LongTensors `[<= batch_size, length]`."""

    @abstractmethod
    def controller_loss(self, model: GPT, execution: Execution, count: int) -> float:
        """Return the loss by which schedules decide, nats per target, over the first `count` held-out sequences."""

    @abstractmethod
    def report(
        self, model: GPT, execution: Execution, *, folder: Path, checkpoints: dict[str, str | None]
    ) -> dict[str, Any]:
        """Measure the trained model and return the entries for result.json, `report_loss` among them.

        Writes the task's own files into `folder`; an evaluation names the hashes of `checkpoints`, by role.
        """

    def description(self) -> dict[str, Any]:
        """Return the entries of config.json about the data."""
        return {"folder": self.settings.data, "fingerprint": self.fingerprint, "tokenizer": self.tokenizer_hash}

    def state(self, update: int) -> dict[str, Any]:
        """Return the entries of a checkpoint's state.json about the data after `update` updates."""
        state = {
            "sampler_position": update * self.windows_per_update,
            "length": self.length,
            "data_fingerprint": self.fingerprint,
        }
        return state if self.tokenizer_hash is None else state | {"tokenizer": self.tokenizer_hash}

    def check_continues(self, state: dict[str, Any], path: Path) -> None:
        """Raise unless training can continue from the checkpoint at `path`, whose state.json is `state`."""
        if state["data_fingerprint"] != self.fingerprint:
            other = f"fingerprint {state['data_fingerprint'][:16]}, this run's is {self.fingerprint[:16]}"
            remedy = "use its data, settings and seed, or --fresh"
            raise CheckpointError(f"{path} was trained on other data: {other}; {remedy}")
        # Updates of another size would train on some sequences twice, or skip some. Windows of another length have
        # their own order, in which training goes on after as many tokens.
        used = state["sampler_position"] * state["length"]
        if used != state["update"] * self.windows_per_update * self.length:
            used //= max(state["update"], 1)
            sizes = f"{self.settings.batch_size} x {self.settings.accumulation} x {self.length}"
            raise InputError(f"batch_size x accumulation x length must be {used} as in {path}, got {sizes}")


# --- running a model to measure it


def run_batches(
    model: nn.Module,
    run: Callable[[In], Out],
    batches: Sequence[In],
    *,
    precision: str,
    sizes: Sequence[int] = (),
    progress: Progress | None = None,
) -> list[Out]:
    """Run batches in evaluation mode without gradients and return their results in order.

    Processes of a group divide the batches among them, and all get every result. `progress` counts the `sizes` of
    finished batches, by default each as one.
    """
    done = 0
    _, num_ranks = rank_and_size()
    sizes = sizes or [1] * len(batches)

    def run_one(number: int) -> Out:
        nonlocal done
        result = run(batches[number])
        done += num_ranks * sizes[number]  # the other ranks run as many at the same time
        if progress is not None:
            progress(min(done, sum(sizes)), sum(sizes))
        return result

    with evaluation_mode(model), torch.no_grad(), autocast(language_model(model).device, precision):
        return map_over_ranks(run_one, range(len(batches)))


def precision_in_use(model: nn.Module, precision: str) -> str:
    """Name the precision in which a model runs under `autocast(device, precision)`.

    For float32 weights that is "fp32" or "bf16". Weights of another dtype run in it and are named too: "bf16 weights",
    or "bf16 weights, bf16 autocast".

    Raises InputError where `precision` is "fp32" and weights are narrower.
    """
    computes_in = resolve_precision(language_model(model).device, precision)
    # Trainable patterns of frozen heads are float32 in every model, and say nothing about its weights.
    frozen = [module for module in model.modules() if isinstance(module, FrozenHeads)]
    patterns = {parameter for module in frozen for parameter in module.parameters()}
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter not in patterns}
    abbreviations = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    names = sorted(abbreviations.get(dtype, str(dtype).removeprefix("torch.")) for dtype in dtypes)
    if names in ([], ["fp32"]):
        return computes_in
    weights = f"{' and '.join(names)} weights"
    if precision == "fp32" and any(dtype.itemsize < torch.float32.itemsize for dtype in dtypes):
        raise InputError(f"precision fp32 needs a model in float32, got {weights}; convert it by model.float()")
    return weights if computes_in == "fp32" else f"{weights}, {computes_in} autocast"


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Describe a model's shape and, where its attention is known, count its frozen and pruned heads."""
    language, config = language_model(model), getattr(unwrap(model), "config", None)
    facts: dict[str, Any] = {
        "architecture": getattr(config, "model_type", None),
        "vocab_size": language.vocab_size,
        "hidden_size": getattr(config, "hidden_size", None),
    }
    if sites := language.sites():
        facts["heads_by_layer"] = [site.layout.num_heads for site in sites]
        facts["head_dim"] = sites[0].head_dim
        facts |= {kind: len(language.heads(kind)) for kind in EDITED}
    return facts


# --- log-probabilities of choices


class Continuation(NamedTuple):
    """Tokens whose log-probability is to be computed, and the tokens before them."""

    context: Tokens
    tokens: Tokens

    @property
    def inputs(self) -> Tokens:
        """The model's inputs: all but the last token, which is only a target."""
        return (*self.context, *self.tokens)[:-1]


class Likelihood(NamedTuple):
    """The log-probability of a continuation."""

    log_prob: float
    """Nats, summed over its tokens."""
    greedy: bool
    """Whether each of its tokens is the most likely one after those before it."""


def likelihoods(
    model: nn.Module,
    continuations: Sequence[Continuation],
    *,
    batch_size: int = 8,
    precision: str = "auto",
    progress: Progress | None = None,
) -> list[Likelihood]:
    """Compute the log-probability of each continuation, in order; processes of a group divide the batches among them.

    A forward pass has inputs of one length, without padding (paper, appendix on pretrained models). Logits are computed
    at the continuations' positions, their softmax in float32.

    Raises InputError for an empty context or continuation or one longer than the model takes, DivergenceError for a
    log-probability that is not finite.
    """
    longest, language = longest_input(model), language_model(model)
    for each in continuations:
        if not each.context or not each.tokens:
            raise InputError(f"context and continuation must have a token or more, got {each}")
        if longest is not None and len(each.inputs) > longest:
            raise InputError(f"inputs must be at most {longest} tokens, got {len(each.inputs)}; shorten the context")

    # Choices of one token have equal inputs, their context: a question with four of them is one row, not four.
    numbers = defaultdict[Tokens, list[int]](list)  # of the continuations with these inputs
    for number, each in enumerate(continuations):
        numbers[each.inputs].append(number)
    # One length a batch: padding would shift the positions that patterns of frozen heads are fitted to. Longest first:
    # what does not fit into memory fails at once.
    batches = list[list[Tokens]]()
    for _, rows in groupby(sorted(numbers, key=len, reverse=True), len):
        same_length = list(rows)
        batches += (same_length[first : first + batch_size] for first in range(0, len(same_length), batch_size))

    def measure(rows: list[Tokens]) -> dict[int, Likelihood]:
        members = [(row, number) for row, inputs in enumerate(rows) for number in numbers[inputs]]
        width = max(len(continuations[number].tokens) for _, number in members)
        logits = language.last_logits(language.model, torch.tensor(rows, device=language.device), width)
        # A log-softmax in bfloat16 has three digits, and choices often differ by less.
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return {number: _likelihood(wide[row], continuations[number].tokens) for row, number in members}

    if progress is not None:
        progress(0, len(continuations))
    sizes = [sum(len(numbers[inputs]) for inputs in rows) for rows in batches]
    results = run_batches(model, measure, batches, precision=precision, sizes=sizes, progress=progress)
    by_number = {number: likelihood for batch in results for number, likelihood in batch.items()}
    return [by_number[number] for number in range(len(continuations))]


def _likelihood(logits: Tensor, tokens: Tokens) -> Likelihood:
    """Return the likelihood of `tokens`; `logits [W, V]` are of its inputs' last W positions, W >= len(tokens)."""
    rows, ids = logits[-len(tokens) :], torch.tensor(tokens, device=logits.device)
    log_probs = rows.log_softmax(-1).gather(1, ids[:, None])
    total = float(log_probs.double().sum())
    if not torch.isfinite(log_probs).all():
        raise DivergenceError(f"a continuation of {len(tokens)} tokens has the log-probability {total}, not finite")
    return Likelihood(total, bool((rows.argmax(-1) == ids).all()))


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Compute accuracy and its standard error over questions, and count how often each choice is right and is taken."""
    count = len(answers)
    accuracy = sum(each["right"] for each in answers) / count
    counts = {name: Counter(each[name] for each in answers) for name in ("answer", "taken")}
    numbers = sorted(counts["answer"] | counts["taken"])
    return {
        "questions": count,
        "accuracy": accuracy,
        "standard_error": math.sqrt(accuracy * (1 - accuracy) / count),
        "answers": {str(number): counts["answer"][number] for number in numbers},
        "taken": {str(number): counts["taken"][number] for number in numbers},
        "shortened": sum(each["shortened"] for each in answers),
    }


# --- answers on the disk


class TaskAnswers(NamedTuple):
    """A model's answers to one task."""

    record: Mapping[str, Any]
    """The summary of the answers, and facts about the task."""
    answers: Sequence[Answer]


def write_answers(path: Path, tasks: Mapping[str, Sequence[Answer]]) -> str:
    """Write the answers of all tasks, a line each with the task's name; return the file's SHA-256."""
    lines = [{"task": name, **each} for name, answers in tasks.items() for each in answers]
    return file_hash(write_lines(path, lines))


def read_answers(path: Path, records: Mapping[str, Mapping[str, Any]], sha256: str) -> dict[str, TaskAnswers]:
    """Read the answers to the tasks in `records`; raise InputError if the file's hash is another one."""
    check_file(path, sha256=sha256)
    lines = read_lines(path)  # of all tasks, a few MB
    return {
        name: TaskAnswers(record, [line for line in lines if line["task"] == name]) for name, record in records.items()
    }


def answers_of_run(run: RecordedRun) -> dict[str, TaskAnswers]:
    """Read a finished run's answers by task, or by test of recall; raise InputError where its file was changed."""
    result = run.finished_result()
    tests = result["recall"]["tests"] if "recall" in result else [result | {"task": run.config["data"]["task"]}]
    records = {test["task"]: test for test in tests}
    return read_answers(run.folder / ANSWERS, records, result["answers_sha256"])
