"""Partial rank correlation: what two quantities share beyond the layer and other measurements of a head."""

from collections.abc import Sequence

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from saf.analysis.correlation import correlation
from saf.errors import InputError


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
