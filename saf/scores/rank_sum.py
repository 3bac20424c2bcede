"""Rank sum (paper, appendix A.3): variance and Q/K gradient count alike."""

from torch import Tensor

from saf.scores.ranks import check_gradient, ranks
from saf.statistics import AttentionStatistics


def rank_sum(statistics: AttentionStatistics, *, gradient: Tensor) -> Tensor:
    """Return `rank(variance) + rank(gradient)`, `[L, H]`, ranks from 0 over all measured heads."""
    return ranks(statistics.variance) + ranks(check_gradient(gradient, statistics.measured))
