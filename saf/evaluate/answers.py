"""A model's answers to questions with choices: measured, summarised, and written into a run's folder."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from saf.errors import InputError
from saf.evaluate.continuations import Continuation, likelihoods
from saf.records.files import check_file, file_hash, read_lines, write_lines
from saf.records.run import RecordedRun

NO_TARGET = -100
"""The target of a token that is left out of the loss."""
FILE = "answers.jsonl"
"""Name of a finished run's file of answers, a line a question."""


def answer_questions(
    model: nn.Module, questions: Sequence[Any], *, batch_size: int, precision: str
) -> list[dict[str, Any]]:
    """Answer questions, in order, by the choice of the largest log-probability.

    A question has `prompt` and `choices` as tokens, `shortened`, and `example.id` and `example.answer`. An answer has
    the `id`, the numbers of the right choice (`answer`) and the one taken (`taken`, the first of equal ones), `right`
    where they are the same, `shortened`, the log-probability of each choice in nats, summed over its tokens
    (`log_probs`), and the number of tokens of the right one (`answer_tokens`).

    Raises DivergenceError for a log-probability that is not finite.
    """
    pairs = [Continuation(each.prompt, choice) for each in questions for choice in each.choices]
    results = iter(likelihoods(model, pairs, batch_size=batch_size, precision=precision))
    records = []
    for each in questions:
        log_probs = [next(results).log_prob for _ in each.choices]
        right, taken = each.example.answer, max(range(len(log_probs)), key=log_probs.__getitem__)
        records.append(
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
    return records


def answer_loss(records: Sequence[Mapping[str, Any]]) -> float:
    """Average the loss of the tokens of right choices, nats per token."""
    total = -math.fsum(record["log_probs"][record["answer"]] for record in records)
    return total / sum(record["answer_tokens"] for record in records)


def summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute accuracy and its standard error over questions, and count how often each choice is right and is taken."""
    share, count = sum(record["right"] for record in records) / len(records), len(records)
    counts = {name: Counter(record[name] for record in records) for name in ("answer", "taken")}
    numbers = sorted(counts["answer"] | counts["taken"])
    return {
        "questions": count,
        "accuracy": share,
        "standard_error": math.sqrt(share * (1 - share) / count),
        "answers": {str(number): counts["answer"][number] for number in numbers},
        "taken": {str(number): counts["taken"][number] for number in numbers},
        "shortened": sum(record["shortened"] for record in records),
    }


def write_answers(folder: Path, records: Sequence[Mapping[str, Any]]) -> str:
    """Write answers.jsonl into a run's folder and return its SHA-256."""
    return file_hash(write_lines(folder / FILE, records))


def has_answers(run: RecordedRun) -> bool:
    """Whether a finished run was measured by its answers."""
    return "answers_sha256" in (run.result or {})


def read_answers(run: RecordedRun) -> list[dict[str, Any]]:
    """Read a finished run's answers; raise InputError where the file is not the one that its result names."""
    result = run.finished_result()
    if not has_answers(run):
        raise InputError(f"{run.folder} has no answers to questions; name a run finetuned on them")
    check_file(run.folder / FILE, sha256=result["answers_sha256"])
    return read_lines(run.folder / FILE)
