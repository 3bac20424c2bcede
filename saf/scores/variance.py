"""Attention variance, paper Eq. (1): the error of the best fixed pattern, per entry."""

from torch import Tensor

from saf.statistics import AttentionStatistics


def variance(statistics: AttentionStatistics) -> Tensor:
    """Return `1/((N-1) T^2) sum_n ||A_n - mean||_F^2` per head, `[L, H]`."""
    return statistics.variance
