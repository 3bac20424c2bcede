"""Statistics of two models measured on the same windows, questions or examples: bootstrap, McNemar's test, Holm."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from saf.errors import CompareError

RESAMPLES = 10_000
"""Bootstrap draws behind an interval: 250 lie beyond each end of 95%. A round number, not from the paper."""
# Lags in a row without significant correlation that must follow the last significant lag (Politis and White).
_NOISE_LAGS = 5
# Blocks of a resample; fewer of them hardly differ from the whole.
_FEWEST_BLOCKS = 3
# Draws held in memory together, 8 bytes each.
_DRAWS_AT_ONCE = 4_194_304


# --- perplexity, over windows of text


def delta_of_windows(ordinary: Tensor, frozen: Tensor, *, resamples: int = RESAMPLES) -> dict[str, Any]:
    """Compute delta-PPL% with its 95% interval from mean losses of the same windows, `[windows]` float64 nats.

    Each draw takes windows with replacement, the same for both models, so that the hardness of a window cancels.
    Neighbours that go together are drawn in blocks (`block_length`). The interval says nothing about training seeds.
    Raises CompareError for different windows.
    """
    if ordinary.shape != frozen.shape:
        raise CompareError(f"the arms have {ordinary.numel()} and {frozen.numel()} windows; evaluate both on the same")
    loss_ordinary, loss_frozen = float(ordinary.mean()), float(frozen.mean())
    block = block_length(frozen - ordinary)
    draws = bootstrap_means(frozen - ordinary, block=block, resamples=resamples)
    low, high = torch.quantile(100.0 * torch.expm1(draws), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {
        "ppl_ordinary": math.exp(loss_ordinary),
        "ppl_frozen": math.exp(loss_frozen),
        "delta_ppl_percent": 100.0 * math.expm1(loss_frozen - loss_ordinary),
        "ci95": [low, high],
        "windows": ordinary.numel(),
        "block": block,
        "resamples": resamples,
    }


def block_length(values: Tensor) -> int:
    """Choose how many neighbours of a series `[n]` a bootstrap of its mean draws together; 1 if independent.

    Neighbouring windows come from one document, and neighbouring questions from one text. Where their values go
    together, single draws make an interval too narrow. This is the automatic length of the circular block bootstrap
    (Politis and White 2004, corrected by Patton, Politis and White 2009; Eq. S.30 of docs/method.md).
    """
    count = values.numel()
    deviations = values.detach().double().cpu() - values.double().cpu().mean()
    farthest = min(math.isqrt(count) + _NOISE_LAGS, count - 1)
    covariances = torch.stack([deviations[lag:] @ deviations[: count - lag] / count for lag in range(farthest + 1)])
    significant = (covariances.abs() > 2.0 * math.sqrt(math.log10(count) / count) * covariances[0]).tolist()
    # The smallest lag behind which none of the next five is significant.
    last = next(lag for lag in range(farthest + 1) if not any(significant[lag + 1 : lag + 1 + _NOISE_LAGS]))
    lags = torch.arange(1, min(2 * last, farthest) + 1, dtype=torch.float64)
    # The flat-top window: 1 up to lag `last`, then falling to 0 at twice that. 2.0 stands for both signs of a lag.
    window = (2.0 - 2.0 * lags / (2 * last or 1)).clamp(max=1.0)
    weighted = 2.0 * window * covariances[1 : len(lags) + 1]
    variance, own = float(covariances[0] + weighted.sum()), float(covariances[0])
    if variance <= own:  # independent or opposite neighbours: single draws have the wider interval
        return 1
    length = (1.5 * (float(lags @ weighted) / variance) ** 2 * count) ** (1 / 3)
    return max(1, min(math.ceil(length), count // _FEWEST_BLOCKS))


def bootstrap_means(values: Tensor, *, block: int = 1, resamples: int = RESAMPLES, seed: int = 0) -> Tensor:
    """Draw `values` `[..., windows]` with replacement and return the mean of each draw, `[..., resamples]` float64.

    With a larger `block` a draw takes that many neighbours; the first follow the last.
    """
    values = values.detach().double().cpu()
    count = values.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    means = []
    while resamples > 0:
        rows = min(resamples, max(1, _DRAWS_AT_ONCE // count))
        drawn = torch.randint(count, (rows, -(-count // block)), generator=generator)
        if block > 1:
            drawn = (drawn[..., None] + torch.arange(block)).flatten(1)[:, :count] % count
        # Counts of each window make the means a product, which serves many arms at once.
        places = (drawn + count * torch.arange(rows)[:, None]).flatten()
        counts = torch.bincount(places, minlength=rows * count).view(rows, count)
        means.append(values @ counts.double().mT / count)
        resamples -= rows
    return torch.cat(means, -1)


# --- accuracy, over questions or examples

Tasks = Mapping[str, tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]]
"""By task, the summary of a model's answers and the answers, as `saf.tasks.base` has them."""


def paired_tasks(ordinary: Tasks, frozen: Tasks) -> dict[str, Any]:
    """Compute the paired change of each task that both models answered, as `paired_answers` does, and the mean change.

    Questions have p-values corrected over tasks, too (`p_holm`). Raises CompareError where no task is of both.
    """
    tasks: dict[str, Any] = {}
    for name, (before, answers_before) in ordinary.items():
        if name in frozen:
            after, answers_after = frozen[name]
            task = {key: before[key] for key in ("labels", "answers") if key in before}
            task |= {key: [before[key], after[key]] for key in ("accuracy", "taken") if key in before}
            tasks[name] = task | paired_answers(answers_before, answers_after)
    if not tasks:
        raise CompareError(f"both models must answer the same tasks, got {list(ordinary)} and {list(frozen)}")
    tested = [task for task in tasks.values() if "p_value" in task]
    for task, value in zip(tested, holm([task["p_value"] for task in tested]), strict=True):
        task["p_holm"] = value
    return {"tasks": tasks, "mean_difference": math.fsum(task["difference"] for task in tasks.values()) / len(tasks)}


def paired_answers(ordinary: Sequence[Mapping[str, Any]], frozen: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare two models' answers (`saf.tasks.base`) to the same questions, or examples with several queries each.

    `difference` is the second model's accuracy minus the first's, with its standard error and 95% interval over
    examples, paired: queries of one example may go together. `gained` and `lost` count the examples in which the second
    model answers more, or fewer. `p_value`, of questions alone, is McNemar's, exact. Raises CompareError for other
    questions.
    """
    queries = [record.get("queries", 1) for record in ordinary]
    questions = [[(record["id"], record.get("answer")) for record in records] for records in (ordinary, frozen)]
    if questions[0] != questions[1]:
        counts = " and ".join(str(len(each)) for each in questions)
        raise CompareError(f"both models must answer the same questions, got different questions ({counts})")
    pairs = zip(ordinary, frozen, queries, strict=True)
    changes = [(int(after["right"]) - int(before["right"])) / num_queries for before, after, num_queries in pairs]
    count, gain, squares = len(changes), math.fsum(changes), math.fsum(change**2 for change in changes)
    # Half a unit more that is gained, half that is lost, one unchanged (Agresti and Min, 2005): where few or none
    # change, the plain interval is too narrow, or has no width at all.
    middle, reach = gain / (count + 2), 1.96 * _standard_error(squares + 1, gain, count + 2)
    gained, lost = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    record = {
        "questions": sum(queries),
        "difference": gain / count,
        "standard_error": _standard_error(squares, gain, count),
        "ci95": [middle - reach, middle + reach],
        "gained": gained,
        "lost": lost,
    }
    # McNemar's test counts pairs that are right or wrong; an example of recall may be right in part.
    return record | {"p_value": mcnemar(gained, lost)} if set(queries) == {1} else record


def _standard_error(squares: float, gain: float, count: float) -> float:
    # Rounding may leave a variance of zero below zero.
    return math.sqrt(max(squares / count - (gain / count) ** 2, 0.0) / count)


def mcnemar(gained: int, lost: int) -> float:
    """Compute the exact two-sided p-value of McNemar's test, from the questions that one model alone answers rightly.

    >>> round(mcnemar(1, 6), 4), mcnemar(0, 0)
    (0.125, 1.0)
    """
    from scipy.stats import binomtest  # half a second to load, which no training needs

    return 1.0 if gained + lost == 0 else float(binomtest(gained, gained + lost).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for the number of tests by Holm's step-down method; the order stays.

    >>> [round(value, 3) for value in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, number in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[number]))
        corrected[number] = largest
    return corrected
