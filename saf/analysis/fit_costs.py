"""Two fits of the same heads, by what freezing each head alone with either costs on the same windows."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from saf.analysis.one_head import OneHeadCosts
from saf.errors import InputError
from saf.evaluate.paired import bootstrap_means
from saf.heads import Head, HeadSet

# Two forward passes of one model over the same windows agree far better, in nats; those of different windows do not.
_SAME_BASELINE = 1e-5


@dataclass(frozen=True, kw_only=True)
class FitDifference:
    """Mean loss changes of some heads under two fits, nats per token."""

    heads: int
    """How many heads both fits are accepted of, among those asked for."""
    first: float
    second: float
    difference: float
    """Second minus first: negative where the second fit costs less."""
    ci95: tuple[float, float]
    """Of the difference, over windows: each draw takes the same windows for both fits and all heads."""


def fit_difference(first: OneHeadCosts, second: OneHeadCosts, heads: Iterable[Head] | None = None) -> FitDifference:
    """Compare two fits over the heads that both accept, of `heads` if given: Eq. (S.27) of docs/method.md.

    Raises InputError for different windows, or no head to compare.
    """
    apart = abs(first.baseline - second.baseline)
    if first.by_window.shape != second.by_window.shape or apart > _SAME_BASELINE:
        raise InputError("the fits were measured on different windows or models; measure both with the same ones")
    both = first.eligible & second.eligible
    chosen = list(both if heads is None else both & HeadSet(heads))
    if not chosen:
        raise InputError("no head is accepted under both fits: there is nothing to compare; raise max_fit_kl")
    one, other = (torch.stack([costs.by_window[head] for head in chosen]) for costs in (first, second))
    by_window = (other - one).mean(0)
    low, high = bootstrap_means(by_window).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return FitDifference(
        heads=len(chosen),
        first=float(one.mean()),
        second=float(other.mean()),
        difference=float(by_window.mean()),
        ci95=(low, high),
    )
