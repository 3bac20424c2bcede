"""The post-softmax mean: attention averaged over the calibration sequences (paper, section 3.2)."""

from torch import Tensor

from saf.estimates.target import Target
from saf.heads import HeadSet
from saf.statistics import AttentionStatistics


def mean(statistics: AttentionStatistics, heads: HeadSet) -> Target:
    """Return marginals and row entropy of the floored mean pattern of `heads`: all that a compact fit needs."""
    layers, ids = [layer for layer, _ in heads], [head for _, head in heads]
    return Target(
        statistics.eta_abs[layers, ids],
        statistics.eta_rel[layers, ids],
        statistics.row_entropy[layers, ids],
    )


def dense_mean(statistics: AttentionStatistics, heads: HeadSet) -> Tensor:
    """Return the mean pattern of `heads`, `[F, T, T]`."""
    return statistics.take("mean", heads)
