"""Random heads: the control. `select(..., match=...)` takes as many from each layer as another set has."""

import torch
from torch import Tensor

from saf.statistics import AttentionStatistics


def random(statistics: AttentionStatistics, *, seed: int = 0, generator: torch.Generator | None = None) -> Tensor:
    """Return uniform random numbers `[L, H]` from a generator, or from one of `seed`.

    All heads draw, frozen or not, so a head's number does not depend on what was frozen before.
    """
    generator = torch.Generator().manual_seed(seed) if generator is None else generator
    drawn = torch.rand(statistics.variance.shape, generator=generator, dtype=torch.float64, device=generator.device)
    return drawn.cpu()
