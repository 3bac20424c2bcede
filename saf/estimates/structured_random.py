"""The structured-random control: key and distance logits from the standard normal distribution (paper, section 3.2)."""

import numpy as np
import torch
from torch import Tensor

from saf.estimates.sampling import stream_of
from saf.heads import HeadSet
from saf.patterns import CompactPattern
from saf.statistics import AttentionStatistics


def structured_random(statistics: AttentionStatistics, heads: HeadSet, *, seed: int = 0) -> CompactPattern:
    """Return the pattern of each head, over `[F, T]`, float64; a shorter T gives a prefix of the same draw."""
    alpha, rho = (
        np.stack([stream_of(seed, head, stream).standard_normal(statistics.length) for head in heads])
        for stream in (0, 1)
    )
    return CompactPattern.from_parameters(torch.from_numpy(alpha), torch.from_numpy(rho))


def dense_structured_random(statistics: AttentionStatistics, heads: HeadSet, *, seed: int = 0) -> Tensor:
    """Return the same patterns entry by entry, `[F, T, T]`."""
    return structured_random(statistics, heads, seed=seed).dense()
