"""Answers to questions with choices: how likely each choice is, which one a model takes, and the zero-shot record.

Sequences that share a forward pass have one length, and no token of padding enters: patterns of frozen heads count
positions from a sequence's first token (paper, Appendix on pretrained models).
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from saf.errors import DivergenceError, InputError
from saf.models.adapter import language_model, longest_input
from saf.records.files import check_file, file_hash, read_lines, write_json, write_lines
from saf.records.result import read_result, result_header
from saf.records.table import Table
from saf.tasks.base import Progress, run_batches

ZERO_SHOT_FILES = ("zero_shot.json", "zero_shot.jsonl")
"""Files of an evaluation by zero-shot tasks: its record, and every question's answer, a line each."""
TooLong = Literal["refuse", "cut"]
"""What happens to a question that is longer than the model takes: refused, or its context cut at its beginning."""
Tokens = tuple[int, ...]
Answer = Mapping[str, Any]
"""How one question is answered.

Its `id`, the numbers of the right choice (`answer`) and the one taken (`taken`), `right` where they are the same,
`shortened`, and the log-probability of each choice in nats, summed over its tokens (`log_probs`). Questions of a run
have the number of tokens of the right choice (`answer_tokens`); where a zero-shot task has it, `right_norm` goes by
log-probabilities over the characters of choices.
"""


# --- likelihoods


class Continuation(NamedTuple):
    """Tokens whose log-probability is to be computed, and the tokens before them."""

    context: Tokens
    tokens: Tokens

    @property
    def inputs(self) -> Tokens:
        """The model's inputs: all but the last token, which is only a target."""
        return (*self.context, *self.tokens)[:-1]


class Likelihood(NamedTuple):
    """How likely a continuation is."""

    log_prob: float
    """Nats, summed over its tokens."""
    greedy: bool
    """Whether each of its tokens is the most likely one behind those before it."""


def likelihoods(
    model: nn.Module,
    continuations: Sequence[Continuation],
    *,
    batch_size: int = 8,
    precision: str = "auto",
    progress: Progress | None = None,
) -> list[Likelihood]:
    """Compute how likely each continuation is, in order; processes of a group divide the batches among them.

    Equal inputs are computed once: choices that differ in their last token alone. Logits are computed at the
    continuations' positions, their softmax in float32. Raises InputError for an empty context or continuation or one
    longer than the model takes, DivergenceError for a log-probability that is not finite.
    """
    longest, language = longest_input(model), language_model(model)
    for each in continuations:
        if not each.context or not each.tokens:
            raise InputError(f"context and continuation must have a token or more, got {each}")
        if longest is not None and len(each.inputs) > longest:
            raise InputError(f"inputs must be at most {longest} tokens, got {len(each.inputs)}; shorten the context")

    def measure(batch: tuple[list[Tokens], list[list[int]]]) -> dict[int, Likelihood]:
        """Return the likelihoods of the continuations of a batch by their numbers."""
        rows, members = batch
        width = max(len(continuations[number].tokens) for numbers in members for number in numbers)
        logits = language.last_logits(language.model, torch.tensor(rows, device=language.device), width)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return {
            number: _likelihood(wide[row], continuations[number].tokens)
            for row, numbers in enumerate(members)
            for number in numbers
        }

    if progress is not None:
        progress(0, len(continuations))
    batches = list(_batches(continuations, batch_size))
    sizes = [sum(map(len, members)) for _, members in batches]
    results = run_batches(model, measure, batches, precision=precision, sizes=sizes, progress=progress)
    by_number = {number: likelihood for batch in results for number, likelihood in batch.items()}
    return [by_number[number] for number in range(len(continuations))]


def _batches(continuations: Sequence[Continuation], batch_size: int) -> Iterator[tuple[list[Tokens], list[list[int]]]]:
    """Yield different inputs of one length, and the numbers of the continuations that have them; longest first."""
    by_length: dict[int, dict[Tokens, list[int]]] = {}
    for number, each in enumerate(continuations):
        by_length.setdefault(len(each.inputs), {}).setdefault(each.inputs, []).append(number)
    for length in sorted(by_length, reverse=True):
        rows = list(by_length[length].items())
        for first in range(0, len(rows), batch_size):
            inputs, numbers = zip(*rows[first : first + batch_size], strict=True)
            yield list(inputs), list(numbers)


def _likelihood(logits: Tensor, tokens: Tokens) -> Likelihood:
    """Return the likelihood of `tokens`; `logits [W, V]` are of its inputs' last W positions, W >= len(tokens)."""
    own, ids = logits[-len(tokens) :], torch.tensor(tokens, device=logits.device)
    log_probs = own.log_softmax(-1).gather(1, ids[:, None])
    total = float(log_probs.double().sum())
    if not torch.isfinite(log_probs).all():
        raise DivergenceError(f"a continuation of {len(tokens)} tokens has the log-probability {total}, not finite")
    return Likelihood(total, bool((own.argmax(-1) == ids).all()))


# --- answers to a task


class TaskAnswers(NamedTuple):
    """A model's answers to one task."""

    record: Mapping[str, Any]
    """The summary of the answers, and facts about the task."""
    answers: Sequence[Answer]

    @classmethod
    def of(cls, answers: Sequence[Answer], **facts: Any) -> "TaskAnswers":
        """Summarise answers; `facts` are a task's `version`, the `source` of its questions, and `labels` of choices."""
        record = {**facts, **summary(answers)}
        if all("right_norm" in answer for answer in answers):
            record["accuracy_norm"] = sum(answer["right_norm"] for answer in answers) / len(answers)
        return cls(record, answers)


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Compute accuracy and its standard error over questions, and count how often each choice is right and is taken."""
    share, count = sum(each["right"] for each in answers) / len(answers), len(answers)
    counts = {name: Counter(each[name] for each in answers) for name in ("answer", "taken")}
    numbers = sorted(counts["answer"] | counts["taken"])
    return {
        "questions": count,
        "accuracy": share,
        "standard_error": math.sqrt(share * (1 - share) / count),
        "answers": {str(number): counts["answer"][number] for number in numbers},
        "taken": {str(number): counts["taken"][number] for number in numbers},
        "shortened": sum(each["shortened"] for each in answers),
    }


# --- the record of zero-shot tasks


def zero_shot_record(
    tasks: Mapping[str, TaskAnswers],
    settings: Mapping[str, Any],
    *,
    out: Path | None = None,
    facts: Mapping[str, Any],
    **header: Any,
) -> dict[str, Any]:
    """Return the record of an evaluation by zero-shot tasks; `out` is a folder for it and every answer.

    `facts` are `longest`, the most tokens of an input, the `precision`, and `of`, the model's `model_facts`.
    """
    records = {name: record for name, (record, _) in tasks.items()}
    written = {**result_header("zero_shot", settings, **header), **facts, "tasks": records}
    if out is not None:
        lines = [{"task": name, **answer} for name, (_, answers) in tasks.items() for answer in answers]
        written["answers_sha256"] = file_hash(write_lines(out / ZERO_SHOT_FILES[1], lines))
        write_json(out / ZERO_SHOT_FILES[0], written)
    return written


def read_zero_shot(folder: Path | str) -> tuple[dict[str, Any], dict[str, TaskAnswers]]:
    """Read an evaluation's record, and its answers by task; raise InputError for a file missing or damaged."""
    table, answers = (Path(folder) / name for name in ZERO_SHOT_FILES)
    record = read_result(table)
    check_file(answers, sha256=record.get("answers_sha256"))
    lines = read_lines(answers)
    return record, {
        name: TaskAnswers(task, [line for line in lines if line["task"] == name])
        for name, task in record["tasks"].items()
    }


def zero_shot_tables(record: Mapping[str, Any]) -> list[Table]:
    """Tabulate one evaluation: accuracies, and how often each choice is taken, a row a task."""
    rows = []
    for name, task in record["tasks"].items():
        norm = task.get("accuracy_norm")
        accuracy = f"{100 * task['accuracy']:.2f} ± {100 * task['standard_error']:.2f}"
        rows.append([name, f"{task['questions']:,}", accuracy, None if norm is None else f"{100 * norm:.2f}"])
    notes = ["± is the standard error over questions. Accuracy is lm-eval's acc, that by characters its acc_norm."]
    if cut := sum(task["shortened"] for task in record["tasks"].values()):
        notes.append(f"Questions longer than {record['longest']:,} tokens, cut at the beginning: {cut:,}.")
    columns = ["task", "questions", "accuracy, %", "by characters, %"]
    taken = {"the model": {name: task["taken"] for name, task in record["tasks"].items()}}
    return [Table.of("Zero-shot tasks", columns, rows, notes).used(), choices_table(record["tasks"], taken)]


def choices_table(tasks: Mapping[str, Mapping[str, Any]], taken: Mapping[str, Mapping[str, Any]]) -> Table:
    """Tabulate how often each choice is right, and how often models take it: `taken` by model, then by task."""
    rows = []
    for name, task in tasks.items():
        counts = (task["answers"], *(of[name] for of in taken.values()))
        rows.append([name, *(counts_text(each, task["labels"]) for each in counts)])
    return Table.of("How often each choice is right, and is taken", ["task", "right", *taken], rows)


def counts_text(counts: Mapping[str, int], labels: Sequence[str]) -> str:
    """Show how often each choice was taken, by its name, else by its letter.

    >>> counts_text({"0": 3, "1": 1}, ("no", "yes")), counts_text({"0": 3, "3": 1}, ())
    ('no 3, yes 1', 'A 3, D 1')
    """
    names = labels or "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return ", ".join(f"{names[int(number)]} {count:,}" for number, count in counts.items())
