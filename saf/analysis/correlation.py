"""Rank correlations of values by layer and head: plain, pooled over strata, and partial."""

from collections.abc import Iterable, Sequence

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


def partial_spearman(one: Tensor, other: Tensor, *, layers: bool = True, covariates: Sequence[Tensor] = ()) -> float:
    """Return the correlation of ranked values `[L, H]` after regressing out layers and ranked covariates.

    Both are ranked over all heads that have every value, then regressed by least squares on a constant, with `layers`
    on an indicator of each layer, and on the ranks of each covariate `[L, H]`; the residuals are correlated. NaN when
    nothing is left of one of them. Raises InputError for shapes that differ or fewer than three heads.
    """
    values = [one, other, *covariates]
    if one.ndim != 2 or any(each.shape != one.shape for each in values):
        raise InputError(f"expected values [L, H] of one shape; got {[list(each.shape) for each in values]}")
    stacked = torch.stack([each.detach().to("cpu", torch.float64) for each in values])
    kept = ~stacked.isnan().any(0)
    if int(kept.sum()) < 3:
        raise InputError(f"a partial correlation needs at least three heads; got {int(kept.sum())}")
    ranks = stats.rankdata(stacked[:, kept].numpy(), axis=1)
    at = kept.nonzero()[:, 0].numpy()
    indicators = (at[:, None] == np.unique(at)).astype(float) if layers else np.ones((len(at), 1))
    design = np.concatenate([indicators, ranks[2:].T], axis=1)
    left, right = (rank - design @ np.linalg.lstsq(design, rank, rcond=None)[0] for rank in ranks[:2])
    return correlation(left, right)


def matrix(rows: Sequence[Sequence[float | None]]) -> Tensor:
    """Return values by layer and head, `[L, H]` float64, as JSON has them: null for NaN."""
    filled = [[torch.nan if value is None else value for value in row] for row in rows]
    return torch.tensor(filled, dtype=torch.float64)


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


_ROUNDING = 1e-9
"""What is smaller is constant: residuals of a regression that explains everything are rounding errors, not zeros.

Centred ranks are half at least where they are not zero; a round number far below that."""


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Return the correlation of centred values; NaN when one of them is constant but for rounding."""
    if np.abs(x).max() < _ROUNDING or np.abs(y).max() < _ROUNDING:
        return float("nan")
    return float(np.asarray(stats.pearsonr(x, y))[0])
