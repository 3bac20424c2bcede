"""Answers to questions with choices: how a model answers each, and how two models' answers to the same differ."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from saf.errors import CompareError, InputError
from saf.evaluate.continuations import Continuation, likelihoods
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


def answer_questions(
    model: nn.Module, questions: Sequence[Any], *, batch_size: int, precision: str
) -> list[dict[str, Any]]:
    """Record how a model answers questions, in their order: with the choice of the largest log-probability.

    A question has `prompt` and `choices` as tokens, `shortened`, and `example.id` and `example.answer`. A record has
    the `id`, the numbers of the right choice (`answer`) and the one taken (`taken`, the first of equal ones), whether
    they are the same (`right`), whether text was `shortened`, the log-probability of each choice in nats, summed over
    its tokens (`log_probs`), and the number of tokens of the right one (`answer_tokens`).

    Raises DivergenceError for a log-probability that is not finite.
    """
    pairs = [Continuation(each.prompt, choice) for each in questions for choice in each.choices]
    found = iter(likelihoods(model, pairs, batch_size=batch_size, precision=precision))
    records = []
    for each in questions:
        log_probs = [next(found).log_prob for _ in each.choices]
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
    """Mean loss of the tokens of right choices, nats per token."""
    total = -math.fsum(record["log_probs"][record["answer"]] for record in records)
    return total / sum(record["answer_tokens"] for record in records)


def summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracy, its standard error over questions, and how often each choice was right and was taken."""
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
    """The exact two-sided p-value of McNemar's test, from questions that one model alone answers rightly.

    >>> round(mcnemar(1, 6), 4), mcnemar(0, 0)
    (0.125, 1.0)
    """
    from scipy.stats import binomtest  # half a second to load, which no training needs

    return 1.0 if gained + lost == 0 else float(binomtest(gained, gained + lost).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected by Holm's step-down method for the number of tests, in the order given.

    >>> [round(value, 3) for value in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for place, number in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[number]))
        corrected[number] = largest
    return corrected


def paired_answers(ordinary: Sequence[Mapping[str, Any]], frozen: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How two models' answers to the same questions differ.

    `difference` is the second model's accuracy minus the first's; its standard error and 95% interval are over the
    questions, paired. `gained` and `lost` are questions that the second or the first alone answers rightly; `p_value`
    is McNemar's, exact. Raises CompareError for other questions.
    """
    questions = [[(record["id"], record["answer"]) for record in records] for records in (ordinary, frozen)]
    if questions[0] != questions[1]:
        counts = " and ".join(str(len(each)) for each in questions)
        raise CompareError(f"different questions were answered ({counts}); test both on the same file")
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
    """Standard error of a paired difference of shares, from the questions that changed and their net gain."""
    return math.sqrt(max(changed / count - (gain / count) ** 2, 0.0) / count)


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
        raise InputError(f"{run.folder} was not judged by answers; compare it with runs of its own task")
    check_file(run.folder / FILE, sha256=result["answers_sha256"])
    return read_lines(run.folder / FILE)


def compare_answers(
    ordinary: RecordedRun, frozen: RecordedRun, *, out: Path | str | None = None, allow_differences: bool = False
) -> dict[str, Any]:
    """Compare the answers of two finetuned runs, paired by question; written to `out`/compare.json if given.

    The record has what `paired_answers` returns; nothing in it is over seeds.

    Raises:
        CompareError: Other questions, or runs that differ in how they were finetuned (`allow_differences` passes that).
        InputError: A run that has not ended, or has no answers, or others than its result names.
    """
    pair = [read_answers(run) for run in (ordinary, frozen)]
    changes = paired_answers(*pair)
    differences = training_differences(ordinary, frozen)
    check_alike(differences, allow_differences=allow_differences)
    results = [run.finished_result() for run in (ordinary, frozen)]
    record = {
        **pair_header("answers_comparison", ordinary, frozen, allow_differences=allow_differences),
        "questions": len(pair[0]),
        "accuracy": [one["accuracy"] for one in results],
        "taken": [one["taken"] for one in results],
        "answers": results[0]["answers"],
        **changes,
        "differences": differences,
    }
    if out is not None:
        write_json(Path(out) / "compare.json", record)
    return record


def check_alike(differences: Sequence[str], *, allow_differences: bool) -> None:
    """Raise CompareError, listing the differences in how two runs were trained, unless they are allowed."""
    if differences and not allow_differences:
        listed = "\n  ".join(differences)
        raise CompareError(
            f"these runs were trained differently:\n  {listed}\n"
            "Train both with the same settings, or allow the differences (--allow-differences)"
        )


def pair_header(kind: str, ordinary: RecordedRun, frozen: RecordedRun, *, allow_differences: bool) -> dict[str, Any]:
    """The part of a comparison's record that is the same for every task: header, folders, heads, update times."""
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
    """Differences of model shape, training and examples, a line each; parents are what is compared.

    Paths of files, and the settings named in `without`, are left out.
    """
    lines = []
    for section in ("model", "train", "data"):
        left, right = (run.config.get(section) or {} for run in (ordinary, frozen))
        for key in sorted(left.keys() | right.keys()):
            if key not in ("folder", "test", *without) and left.get(key) != right.get(key):
                lines.append(f"{section}.{key}: {left.get(key)!r} in the first run, {right.get(key)!r} in the second")
    return lines


def answers_comparison_tables(record: Mapping[str, Any]) -> list[Table]:
    """The one table of a record of `compare_answers`."""
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
