"""Rank correlations: plain, and pooled over strata."""

from collections.abc import Iterable

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from saf.errors import InputError


def spearman(one: Tensor, other: Tensor) -> float:
    """Return Spearman's correlation of two equally shaped tensors, ties by average rank.

    Entries that are NaN in either are left out. NaN when one of them is constant; raises InputError for unequal shapes
    or fewer than two entries.
    """
    x, y = paired(one, other)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.asarray(stats.spearmanr(x, y))[0])


def stratified_spearman(strata: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the correlation of ranks taken and centred within each stratum, all strata pooled.

    What differs between strata has no say; with equally many entries and no ties it is the mean of the strata's own
    correlations. Raises InputError as `spearman` does.
    """
    left, right = [], []
    for one, other in strata:
        x, y = paired(one, other)
        left.append(centred_ranks(x))
        right.append(centred_ranks(y))
    return correlation(np.concatenate(left), np.concatenate(right)) if left else float("nan")


def paired(one: Tensor, other: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the entries, in float64, at which neither tensor is NaN."""
    if one.shape != other.shape:
        raise InputError(f"expected values of one shape; got {list(one.shape)} and {list(other.shape)}")
    x, y = (values.detach().to("cpu", torch.float64).flatten() for values in (one, other))
    kept = ~(x.isnan() | y.isnan())
    if int(kept.sum()) < 2:
        raise InputError(f"a correlation needs at least two pairs of numbers; got {int(kept.sum())}")
    return x[kept].numpy(), y[kept].numpy()


def centred_ranks(values: np.ndarray) -> np.ndarray:
    """Return average ranks less their mean."""
    ranks = stats.rankdata(values)
    return ranks - ranks.mean()


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Return the correlation of centred values; NaN when one of them is constant but for rounding."""
    # Residuals of a regression that explains everything are rounding errors, not zeros.
    if np.abs(x).max() < 1e-9 or np.abs(y).max() < 1e-9:
        return float("nan")
    return float(np.asarray(stats.pearsonr(x, y))[0])
