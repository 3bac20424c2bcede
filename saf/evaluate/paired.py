"""Paired perplexity differences: two models, the same held-out windows."""

import math
import sys
from typing import Any

import torch
from torch import Tensor

from saf.errors import CompareError, DivergenceError, InputError

RESAMPLES = 10_000
"""Draws of windows behind an interval: 250 lie beyond each end of 95%, so that the ends are known to a hundredth of
the interval's width. A round number; the paper does not say its own."""
_QUIET = 5
"""Lags in a row whose correlations are noise behind the last one that is not (Politis and White)."""
_FEWEST_BLOCKS = 3
"""Of a resample: fewer of them hardly differ from the whole."""
_RESAMPLES_AT_ONCE = 4_194_304  # window draws held in memory together
_LARGEST_LOSS = math.log(sys.float_info.max)  # 709.8 nats


def paired_delta_ppl(
    log_probs_ordinary: Tensor,
    log_probs_frozen: Tensor,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Any]:
    """Return delta-PPL% = 100 (p_frozen / p_ordinary - 1) with its 95% interval over windows.

    Each resample draws windows with replacement, the same draw for both models, so what a window costs both of them
    cancels; where windows go together with their neighbours, whole blocks of neighbours (`block_length`). The interval
    speaks of held-out text, not of training seeds.

    Args:
        log_probs_ordinary: Log-probability of each target token, `[windows, T]`, nats, windows in the text's order.
        log_probs_frozen: The same windows under the other model, `[windows, T]`, nats.
        resamples: How many bootstrap draws.
        seed: Seed of the draws' own generator.

    Raises:
        CompareError: Different windows.
        InputError: Empty or non-finite log-probabilities, fewer than one resample.
        DivergenceError: A loss whose perplexity is past the largest float.
    """
    if log_probs_ordinary.shape != log_probs_frozen.shape or log_probs_ordinary.ndim != 2:
        raise CompareError(
            "log-probabilities must both be [windows, T] of the same windows; "
            f"got {list(log_probs_ordinary.shape)} and {list(log_probs_frozen.shape)}"
        )
    ordinary, frozen = window_losses(log_probs_ordinary), window_losses(log_probs_frozen)
    return delta_of_windows(ordinary, frozen, resamples=resamples, seed=seed)


def delta_of_windows(ordinary: Tensor, frozen: Tensor, *, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, Any]:
    """Return what `paired_delta_ppl` does, from the mean losses of the same windows, `[windows]` float64 nats.

    Raises:
        CompareError: Not as many windows.
        DivergenceError: A loss whose perplexity is past the largest float.
    """
    if ordinary.shape != frozen.shape:
        raise CompareError(f"the arms have {ordinary.numel()} and {frozen.numel()} windows; evaluate both on the same")
    loss_ordinary, loss_frozen = float(ordinary.mean()), float(frozen.mean())
    for arm, loss in (("ordinary", loss_ordinary), ("frozen", loss_frozen)):
        if loss > _LARGEST_LOSS:
            raise DivergenceError(
                f"the {arm} model's loss is {loss:.1f} nats per token; its perplexity is past the largest float "
                f"(losses up to {_LARGEST_LOSS:.1f}), so there is nothing to compare"
            )
    block = block_length(frozen - ordinary)
    draws = bootstrap_means(frozen - ordinary, block=block, resamples=resamples, seed=seed)
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


def window_losses(log_probs: Tensor) -> Tensor:
    """Return the mean loss of each window, `[windows]` float64 nats, from log-probabilities `[windows, T]`.

    Raises:
        InputError: Nothing to average, or a value that is not finite.
    """
    if log_probs.numel() == 0:
        raise InputError(f"no log-probabilities to average; got shape {list(log_probs.shape)}")
    losses = -log_probs.mean(dim=1, dtype=torch.float64)
    bad = int((~torch.isfinite(losses)).sum())
    if bad:
        raise InputError(f"{bad} of {losses.numel()} windows hold log-probabilities that are not finite")
    return losses


def block_length(values: Tensor) -> int:
    """Return how many neighbours of a series `[n]` a bootstrap of its mean must draw together; 1 where they are apart.

    Neighbouring windows are of one document, or of like ones, and questions of one text: where their values go
    together, single draws make an interval too narrow. It is the automatic length of the circular block bootstrap
    (Politis and White 2004, corrected by Patton, Politis and White 2009; Eq. S.30 of docs/method.md).
    """
    count = values.numel()
    apart = values.detach().double().cpu() - values.double().cpu().mean()
    farthest = min(math.isqrt(count) + _QUIET, count - 1)
    together = torch.stack([apart[lag:] @ apart[: count - lag] / count for lag in range(farthest + 1)])
    loud = (together.abs() > 2.0 * math.sqrt(math.log10(count) / count) * together[0]).tolist()
    last = next(lag for lag in range(farthest + 1) if not any(loud[lag + 1 : lag + 1 + _QUIET]))
    lags = torch.arange(1, min(2 * last, farthest) + 1, dtype=torch.float64)
    weighted = 2.0 * (2.0 - 2.0 * lags / (2 * last or 1)).clamp(max=1.0) * together[1 : len(lags) + 1]
    variance, own = float(together[0] + weighted.sum()), float(together[0])
    if variance <= own:  # neighbours that are apart, or differ: single draws have the wider interval
        return 1
    length = (1.5 * (float(lags @ weighted) / variance) ** 2 * count) ** (1 / 3)
    return max(1, min(math.ceil(length), count // _FEWEST_BLOCKS))


def bootstrap_means(values: Tensor, *, block: int = 1, resamples: int = RESAMPLES, seed: int = 0) -> Tensor:
    """Return the means `[resamples]` of `values` `[windows]` drawn with replacement, float64.

    With a `block` of several a draw takes so many neighbours; behind the last ones come the first.
    """
    if resamples < 1:
        raise InputError(f"resamples must be at least 1; got {resamples}")
    values = values.detach().double().cpu()
    count = values.numel()
    generator = torch.Generator().manual_seed(seed)
    means = []
    while resamples > 0:
        rows = min(resamples, max(1, _RESAMPLES_AT_ONCE // count))
        drawn = torch.randint(count, (rows, -(-count // block)), generator=generator)
        if block > 1:
            drawn = (drawn[..., None] + torch.arange(block)).flatten(1)[:, :count] % count
        means.append(values[drawn].mean(dim=1))
        resamples -= rows
    return torch.cat(means)


def mean_and_standard_error(values: list[float]) -> dict[str, Any]:
    """Return the mean over seeds of paired differences and its standard error, sd / sqrt(n); None for one seed."""
    if not values:
        raise InputError("a mean over seeds needs at least one value; got none")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return {"mean": mean, "standard_error": None, "seeds": 1}
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return {"mean": mean, "standard_error": math.sqrt(variance / len(values)), "seeds": len(values)}
