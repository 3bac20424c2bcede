"""Exponential patterns with poles like those of trained heads."""

import torch

from saf.patterns import ExponentialPattern


def exponential_patterns(
    heads: int, length: int, *, band: int = 128, poles: int = 6, sinks: int | None = None, seed: int = 0
) -> ExponentialPattern:
    """Return random patterns `[heads]`: two decays and damped cosines of a third of their weight.

    Every key has a logit of its own, or the first `sinks` have, and the others a trend.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(heads, *shape, dtype=torch.float64, generator=generator)

    band = min(band, length)
    keys = length if sinks is None else sinks
    frequency = 3 * torch.rand(heads, poles, dtype=torch.float64, generator=generator)
    frequency[:, :2] = 0
    damping = torch.rand(heads, poles, dtype=torch.float64, generator=generator) / 400
    damping[:, 1] = 1 / 40
    # All together stay below the slowest decay, so the sum is positive.
    cosine, sine = (0.2 / poles) * normal(poles).clamp(-1, 1), (0.2 / poles) * normal(poles).clamp(-1, 1)
    cosine[:, :2] = torch.tensor([0.3, 0.7])
    # No cosine falls more slowly than that decay.
    damping[:, 2:] += damping[:, :1]
    sine[:, :2] = 0
    alpha = 0.3 * normal(keys)
    alpha[:, 0] += 2
    near = -(torch.arange(band, dtype=torch.float64) / 8).clamp(max=3) + 3 + 0.1 * normal(band)
    rates = torch.tensor([1 / 24, 1 / 96], dtype=torch.float64).expand(heads, 2)
    trend = 0.5 * normal(2) if sinks is not None else alpha[:, :0]
    return ExponentialPattern(
        alpha, near, damping, frequency, cosine, sine, length, trend, rates if sinks is not None else alpha[:, :0]
    )
