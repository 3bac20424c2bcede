"""Random heads: the control. `select(..., match=...)` takes as many from each layer as another set has."""

import torch
from torch import Tensor

from saf.estimates.sampling import Seed, seed_of
from saf.statistics import AttentionStatistics


def random(statistics: AttentionStatistics, *, seed: Seed = 0) -> Tensor:
    """Return uniform random numbers `[L, H]`, of a seed or of one that a generator draws.

    All heads draw, frozen or not, so a head's number does not depend on what was frozen before. Raises InputError for
    what is no seed.
    """
    generator = torch.Generator().manual_seed(seed_of(seed))
    return torch.rand(statistics.variance.shape, generator=generator, dtype=torch.float64)
