"""Row-wise forward KL, paper Eq. (2): input dependence in probability space."""

from torch import Tensor

from saf.statistics import AttentionStatistics


def forward_kl(statistics: AttentionStatistics) -> Tensor:
    """Return the row-averaged KL from each sequence's pattern to the mean pattern, in nats, `[L, H]`."""
    return statistics.forward_kl
