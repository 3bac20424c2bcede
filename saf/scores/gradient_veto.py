"""Gradient veto (paper, appendix A.3): variance decides, but heads with a large Q/K gradient go last."""

from torch import Tensor

from saf.scores.ranks import check_gradient, ranks
from saf.statistics import AttentionStatistics


def gradient_veto(statistics: AttentionStatistics, *, gradient: Tensor) -> Tensor:
    """Return ranks of the variance `[L, H]`, raised by L·H where the gradient lies above its median."""
    gradient = check_gradient(gradient, statistics.measured)
    vetoed = gradient > gradient.nanquantile(0.5)
    return ranks(statistics.variance) + gradient.numel() * vetoed
