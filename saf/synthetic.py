"""Heads and patterns drawn at random in the shape of trained ones, for benchmarks and tests that train nothing.

`draw_heads` chooses as many heads of each layer as selection does; `draw_patterns` draws their patterns, compact ones
(`synthetic_patterns`) or those of linear time (`exponential_patterns`).
"""

from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import expit, logit

from saf.heads import HeadSet
from saf.models.gpt import BASE
from saf.patterns import CompactPattern, ExponentialPattern

# --- which heads

MEASURED_SHARES = np.array((8, 7, 3, 5, 2, 4, 2, 2, 1, 2, 0, 0)) / 12
"""Share of each layer's heads that variance selection takes at 25% in a trained 124M model with rotary positions."""
SMALLEST_SHARE = 0.01
"""A layer of which selection takes no head, or all, counts as this far from 0 or 1: its log odds are then finite."""


def heads_per_layer(*, num_layers: int, num_heads: int, rate: float) -> list[int]:
    """Choose how many heads of each layer are frozen; they add up to `round(rate * num_layers * num_heads)`.

    They follow `MEASURED_SHARES` over relative depth, its log odds shifted to the rate.
    """
    total = round(rate * num_layers * num_heads)
    shares = np.full(num_layers, rate)
    # Where no head or every head is frozen, there is nothing to choose, and the log odds would be infinite. Otherwise
    # counts differ: at 25%, selection takes two thirds of the first layer and none of the last two.
    if 0 < total < num_layers * num_heads:
        depth = (np.arange(num_layers) + 0.5) / num_layers * len(MEASURED_SHARES) - 0.5
        measured = np.interp(depth, np.arange(len(MEASURED_SHARES)), MEASURED_SHARES)
        odds = logit(measured.clip(SMALLEST_SHARE, 1 - SMALLEST_SHARE))
        shares = expit(odds + brentq(lambda shift: expit(odds + shift).sum() - total / num_heads, -50, 50))
    # Round down, then add the rest by largest remainders. 1e-6 is more than the errors of `brentq` and floating point,
    # which may leave a count just below a whole number.
    counts = shares * num_heads
    whole = np.minimum((counts + 1e-6).astype(int), num_heads)
    order = np.argsort(whole - counts, kind="stable")
    while whole.sum() < total:
        for layer in order:
            if whole.sum() < total and whole[layer] < num_heads:
                whole[layer] += 1
    return whole.tolist()


def draw_heads(num_layers: int, num_heads: int, *, rate: float, seed: int) -> HeadSet:
    """Draw the heads of every layer at random, in the counts of `heads_per_layer`."""
    generator = torch.Generator().manual_seed(seed)
    counts = heads_per_layer(num_layers=num_layers, num_heads=num_heads, rate=rate)
    by_layer = [torch.randperm(num_heads, generator=generator)[:count].tolist() for count in counts]
    return HeadSet((layer, head) for layer, heads in enumerate(by_layer) for head in heads)


# --- their patterns


def draw_patterns(backend: str | None, count: int, length: int, seed: int, device: torch.device) -> Any:
    """Draw patterns for a backend: exponential ones for "linear", compact ones for others."""
    generator = torch.Generator().manual_seed(seed)
    if backend == "linear":
        return exponential_patterns(count, length, generator)
    return synthetic_patterns(count, length, generator, device)


def synthetic_patterns(
    count: int, length: int, generator: torch.Generator, device: torch.device | str = "cpu"
) -> CompactPattern:
    """Draw `count` compact patterns `[count, length]`: flat key logits with a sink, smooth decay, a rotary ripple.

    `generator` lives on the CPU; normalisers are computed on `device`.
    """
    # Round numbers that give this shape, not measured ones.
    position = torch.arange(length, dtype=torch.float64, device=device)
    slope, ripple, pair = torch.rand(3, count, 1, dtype=torch.float64, generator=generator).to(device)
    frequency = BASE ** -(0.05 + 0.4 * pair)
    rho = -(0.3 + 0.9 * slope) * torch.log1p(position) + 0.3 * ripple * torch.cos(frequency * position)
    alpha = 0.1 * torch.randn(count, length, dtype=torch.float64, generator=generator).to(device)
    alpha[:, 0] += 3.0  # the attention sink: each key gets exp(alpha), the first one twenty times as much
    return CompactPattern.from_parameters(alpha, rho)


BAND, PAIRS = 128, 16
"""Width of the band and number of damped cosines of drawn exponential patterns: the defaults of `fit_exponential`."""


def exponential_patterns(count: int, length: int, generator: torch.Generator) -> ExponentialPattern:
    """Draw `count` exponential patterns: a sink, a band, two decays and damped cosines of a third of their weight."""
    damping, frequency, cosine, sine = torch.rand(4, count, PAIRS, dtype=torch.float64, generator=generator)
    damping, frequency = damping / 400 + 1 / 4000, 0.4 * frequency
    cosine, sine = (0.2 / PAIRS) * (2 * cosine - 1), (0.2 / PAIRS) * (2 * sine - 1)
    # The first two pairs do not oscillate: decays over 4,000 and over 40 positions.
    damping[:, 0], damping[:, 1], frequency[:, :2], sine[:, :2] = 1 / 4000, 1 / 40, 0, 0
    cosine[:, :2] = torch.tensor([0.3, 0.7])
    near = 3 - (torch.arange(min(BAND, length)) / 8).clamp(max=3).double()
    alpha = 0.1 * torch.randn(count, min(16, length), dtype=torch.float64, generator=generator)
    alpha[:, 0] += 3.0
    trend, trend_damping = alpha.new_zeros(count, 1), alpha.new_ones(count, 1)
    band = near.repeat(count, 1)
    return ExponentialPattern(alpha, band, damping, frequency, cosine, sine, length, trend, trend_damping)
