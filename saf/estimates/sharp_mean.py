"""The sharp mean: the softmax of the mean logits (paper, section 3.2), the reverse-KL barycentre of Eq. (16)."""

from torch import Tensor

from saf.estimates.sampling import causal_softmax
from saf.estimates.target import Target
from saf.heads import HeadSet
from saf.statistics import AttentionStatistics

SHARP_MARGINALS = ("sharp_eta_abs", "sharp_eta_rel", "sharp_row_entropy")


def sharp_mean(statistics: AttentionStatistics, heads: HeadSet) -> Target:
    """Return marginals and row entropy of the floored sharp mean of `heads`."""
    return Target(*(statistics.take(name, heads) for name in SHARP_MARGINALS))


def dense_sharp_mean(statistics: AttentionStatistics, heads: HeadSet) -> Tensor:
    """Return the sharp mean of `heads`, `[F, T, T]`."""
    return causal_softmax(statistics.take("logit_mean", heads))
