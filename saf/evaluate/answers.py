"""Answers to questions with choices: how a model answers each, and what two models' answers to the same differ by."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saf.adapters import language_model
from saf.calibration.capture import evaluation_mode
from saf.errors import CompareError, DivergenceError, InputError
from saf.machine.execution import autocast
from saf.machine.processes import shared_out
from saf.models import GPT
from saf.records.events import heads_in_words
from saf.records.files import check_file, file_hash, read_lines, write_json, write_lines
from saf.records.quantities import signed
from saf.records.result import result_header
from saf.records.run import RecordedRun
from saf.records.table import Table

NO_TARGET = -100
"""The target of a token that is left out of the loss."""
FILE = "answers.jsonl"
"""Name of a finished run's file of answers, a line a question."""


def padded(rows: Sequence[tuple[Sequence[int], int]], *, padding: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, int64 `[rows, longest - 1]`, of token sequences with where their answer begins.

    Only tokens from there on are targets. Padding stands behind a sequence, where causal attention does not look.

    >>> padded([([7, 8, 9], 2), ([5, 6], 1)], padding=0)
    (tensor([[7, 8],
            [5, 0]]), tensor([[-100,    9],
            [   6, -100]]))
    """
    width = max(len(tokens) for tokens, _ in rows) - 1
    inputs = torch.full((len(rows), width), padding)
    targets = torch.full((len(rows), width), NO_TARGET)
    for row, (tokens, begin) in enumerate(rows):
        ids = torch.tensor(tokens)
        inputs[row, : len(ids) - 1] = ids[:-1]
        targets[row, begin - 1 : len(ids) - 1] = ids[begin:]
    return inputs, targets


def answer(
    model: GPT, questions: Sequence[Any], *, padding: int, batch_size: int, precision: str
) -> list[dict[str, Any]]:
    """Return how a model answers questions, in their order: it takes the choice with the largest log-probability.

    Processes of a group share the batches out, and all return the same records.

    A record has the example's `id`, the numbers of the right choice (`answer`) and the one taken (`taken`), whether
    they are the same (`right`), whether text was `shortened`, the log-probability of each choice in nats, summed over
    its tokens (`log_probs`), and the tokens of the right choice (`answer_tokens`). Of equal ones the first is taken.

    Args:
        model: Left in the mode that it had.
        questions: Examples as tokens: `prompt`, `choices`, `example.id` and `example.answer` of each, and `shortened`.
        padding: The token behind shorter sequences.
        batch_size: Sequences in a forward pass, each a question with one choice.
        precision: "fp32", "bf16" or "auto".

    Raises:
        DivergenceError: A log-probability that is not finite.
    """
    asked = [(place, number) for place, each in enumerate(questions) for number in range(len(each.choices))]
    # Sequences of like length share a batch; records do not depend on the order.
    asked.sort(key=lambda at: -len(questions[at[0]].prompt) - len(questions[at[0]].choices[at[1]]))
    language = language_model(model)

    def sums(some: Sequence[tuple[int, int]]) -> list[float]:
        """Return the log-probability of each choice of a batch."""
        rows = [
            (questions[place].prompt + questions[place].choices[number], len(questions[place].prompt))
            for place, number in some
        ]
        inputs, targets = (part.to(language.device) for part in padded(rows, padding=padding))
        return language.token_log_probs(inputs, targets).double().sum(1).tolist()

    batches = [asked[first : first + batch_size] for first in range(0, len(asked), batch_size)]
    with evaluation_mode(model), torch.no_grad(), autocast(language.device, precision):
        found = dict(zip(asked, chain.from_iterable(shared_out(sums, batches)), strict=True))
    records = []
    for place, each in enumerate(questions):
        log_probs = [found[place, number] for number in range(len(each.choices))]
        if not all(map(math.isfinite, log_probs)):
            raise DivergenceError(f"the log-probabilities of example {each.example.id} are {log_probs}, not finite")
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


def loss_of(records: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean loss of the tokens of right choices, nats per token."""
    total = -math.fsum(record["log_probs"][record["answer"]] for record in records)
    return total / sum(record["answer_tokens"] for record in records)


def summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the accuracy, its standard error over questions, and how often each choice was right and was taken."""
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


def mcnemar(gained: int, lost: int) -> float:
    """Return the exact two-sided p-value of McNemar's test, from questions that one model alone answers rightly.

    >>> round(mcnemar(1, 6), 4), mcnemar(0, 0)
    (0.125, 1.0)
    """
    from scipy.stats import binomtest  # half a second to load, which no training needs

    return 1.0 if gained + lost == 0 else float(binomtest(gained, gained + lost).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's step-down method for how many tests there are, in the order given.

    >>> [round(value, 3) for value in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for place, number in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[number]))
        corrected[number] = largest
    return corrected


def paired_answers(ordinary: Sequence[Mapping[str, Any]], frozen: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what two models' answers to the same questions differ by.

    `difference` is the second model's accuracy minus the first's; its standard error and 95% interval are over the
    questions, paired. `gained` and `lost` are questions that the second or the first alone answers rightly; `p_value`
    is McNemar's, exact. Raises CompareError for other questions.
    """
    asked = [[(record["id"], record["answer"]) for record in records] for records in (ordinary, frozen)]
    if asked[0] != asked[1]:
        raise CompareError(
            f"different questions were answered ({len(asked[0])} and {len(asked[1])}); judge both by the same file"
        )
    changes = [int(b["right"]) - int(a["right"]) for a, b in zip(ordinary, frozen, strict=True)]
    count, gained, lost = len(changes), changes.count(1), changes.count(-1)
    mean = (gained - lost) / count
    error = paired_error(gained + lost, gained - lost, count)
    # Half a question more in each of the four cells (Agresti and Min, 2005): where few or none change, the plain
    # interval is too narrow, or has no width at all.
    middle, reach = (gained - lost) / (count + 2), 1.96 * paired_error(gained + lost + 1, gained - lost, count + 2)
    return {
        "difference": mean,
        "standard_error": error,
        "ci95": [middle - reach, middle + reach],
        "gained": gained,
        "lost": lost,
        "p_value": mcnemar(gained, lost),
    }


def paired_error(changed: float, gain: float, count: float) -> float:
    """Return the standard error of a paired difference of shares, from questions that changed and their net gain."""
    return math.sqrt(max(changed / count - (gain / count) ** 2, 0.0) / count)


def write_answers(folder: Path, records: Sequence[Mapping[str, Any]]) -> str:
    """Write answers.jsonl into a run's folder and return its SHA-256."""
    return file_hash(write_lines(folder / FILE, records))


def has_answers(run: RecordedRun) -> bool:
    """Return whether a finished run was judged by its answers."""
    return "answers_sha256" in (run.result or {})


def read_answers(run: RecordedRun) -> list[dict[str, Any]]:
    """Return a finished run's answers; raise InputError where the file is not the one that its result tells of."""
    result = run.finished_result()
    if not has_answers(run):
        raise InputError(f"{run.folder} was not judged by answers; compare it with runs of its own task")
    check_file(run.folder / FILE, sha256=result["answers_sha256"])
    return read_lines(run.folder / FILE)


def compare_answers(
    ordinary: RecordedRun, frozen: RecordedRun, *, out: Path | str | None = None, allow_differences: bool = False
) -> dict[str, Any]:
    """Return what two finetuned runs answer differently, paired by question; written to `out`/compare.json if given.

    `difference` is the second run's accuracy minus the first's; its standard error and 95% interval are over the
    questions, paired, and say nothing of seeds. `p_value` is McNemar's, exact.

    Raises:
        CompareError: Other questions, or runs that differ in how they were finetuned (`allow_differences` passes that).
        InputError: A run that has not ended, or has no answers, or others than its result tells of.
    """
    pair = [read_answers(run) for run in (ordinary, frozen)]
    changes = paired_answers(*pair)
    found = training_differences(ordinary, frozen)
    check_alike(found, allow_differences=allow_differences)
    results = [run.finished_result() for run in (ordinary, frozen)]
    record = {
        **pair_header("answers_comparison", ordinary, frozen, allow_differences=allow_differences),
        "questions": len(pair[0]),
        "accuracy": [one["accuracy"] for one in results],
        "taken": [one["taken"] for one in results],
        "answers": results[0]["answers"],
        **changes,
        "differences": found,
    }
    if out is not None:
        write_json(Path(out) / "compare.json", record)
    return record


def check_alike(differences: Sequence[str], *, allow_differences: bool) -> None:
    """Raise CompareError, listing them, for runs of a task that differ in how they were trained, unless allowed."""
    if differences and not allow_differences:
        listed = "\n  ".join(differences)
        raise CompareError(
            f"these runs were trained differently:\n  {listed}\n"
            "Train both with the same settings, or allow the differences explicitly (--allow-differences)"
        )


def pair_header(kind: str, ordinary: RecordedRun, frozen: RecordedRun, *, allow_differences: bool) -> dict[str, Any]:
    """Return what the record of a comparison tells of two runs of a task, whatever they were judged by."""
    pair = {"ordinary": ordinary, "frozen": frozen}
    results = {name: run.finished_result() for name, run in pair.items()}
    finals = {name: one["provenance"]["checkpoints"].get("final") for name, one in results.items()}
    return {
        **result_header(kind, {"allow_differences": allow_differences}, checkpoints=finals),
        **{name: str(run.folder) for name, run in pair.items()},
        "arms": [run.arm for run in pair.values()],
        "heads": [len(run.edited_heads) for run in pair.values()],
        "heads_by_kind": [run.head_counts for run in pair.values()],
        "update_seconds": [(one["update_seconds"] or {}).get("median") for one in results.values()],
    }


def training_differences(ordinary: RecordedRun, frozen: RecordedRun, *, without: Collection[str] = ()) -> list[str]:
    """Return what runs do not share of model shape, training and examples; parents are what is compared.

    Places of files, and the settings named in `without`, are left out.
    """
    lines = []
    for section in ("model", "train", "data"):
        left, right = (run.config.get(section) or {} for run in (ordinary, frozen))
        for key in sorted(left.keys() | right.keys()):
            if key not in ("folder", "test", *without) and left.get(key) != right.get(key):
                lines.append(f"{section}.{key}: {left.get(key)!r} in the first run, {right.get(key)!r} in the second")
    return lines


def answers_comparison_tables(record: Mapping[str, Any]) -> list[Table]:
    """Return the one table of what `compare_answers` found."""
    choices = sorted(record["answers"], key=int)
    rows = []
    for place, name in enumerate(("ordinary", "frozen")):
        taken = ", ".join(f"{number}: {record['taken'][place].get(number, 0):,}" for number in choices)
        seconds = record["update_seconds"][place]
        update = None if seconds is None else f"{1000 * seconds:.1f} ms"
        heads = heads_in_words(record["heads_by_kind"][place]) if record["heads"][place] else "0"
        rows.append([record[name], heads, f"{100 * record['accuracy'][place]:.2f}%", taken, update])
    low, high = (100 * end for end in record["ci95"])
    right = ", ".join(f"{number}: {record['answers'][number]:,}" for number in choices)
    notes = [
        f"Accuracy changes by {signed(100 * record['difference'], 2, '')} points (standard error over questions "
        f"{100 * record['standard_error']:.2f}, 95% interval {signed(low, 2, '')} to {signed(high, 2, '')}): "
        "the second run alone answers "
        f"{record['gained']:,} questions rightly, the first alone {record['lost']:,} "
        f"(McNemar's exact test: p = {record['p_value']:.3g}).",
        f"Right answers by choice: {right}. Both runs have one seed each: nothing here is over seeds. Error, interval "
        "and p take questions of one text for independent.",
        *(f"Difference of the runs: {line}" for line in record["differences"]),
    ]
    columns = ("run", "heads frozen or pruned", "accuracy", "taken, by choice", "median update")
    return [Table.of(f"Answers to the same {record['questions']:,} questions", columns, rows, notes)]
