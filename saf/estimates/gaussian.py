"""The Gaussian sample: every causal logit drawn from a normal distribution of its own (paper, section 3.2)."""

import torch
from torch import Tensor

from saf.estimates.sampling import causal_mask, causal_softmax, stream_of
from saf.heads import HeadSet
from saf.statistics import AttentionStatistics


def gaussian(statistics: AttentionStatistics, heads: HeadSet, *, seed: int = 0) -> Tensor:
    """Return one draw for each of `heads`, `[F, T, T]`: logits with their means and variances over sequences, softmax.

    With one sequence all variances are 0 and the draw is the sharp mean.
    """
    mean, variance = statistics.take("logit_mean", heads), statistics.take("logit_variance", heads)
    causal = causal_mask(mean.shape[-1])
    drawn = []
    for head, center, square in zip(heads, mean.double(), variance.double(), strict=True):
        noise = torch.from_numpy(stream_of(seed, head).standard_normal(int(causal.sum())))
        center[causal] += square[causal].sqrt() * noise
        drawn.append(causal_softmax(center).to(mean.dtype))
    return torch.stack(drawn)
