"""Patterns, weights and inputs made up for measuring speed; shaped like those of trained models, never zeros."""

import torch
from torch import Tensor

from saf.models.rotary import BASE
from saf.patterns import CompactPattern


def synthetic_patterns(
    count: int, length: int, generator: torch.Generator, device: torch.device | str = "cpu"
) -> CompactPattern:
    """Return `count` compact patterns `[count, length]`: flat key logits with a sink, smooth decay, a rotary ripple.

    `generator` lives on the CPU; normalisers are computed on `device`.
    """
    # Round numbers that give this shape; no measured head has exactly these.
    position = torch.arange(length, dtype=torch.float64, device=device)
    slope, ripple, pair = torch.rand(3, count, 1, dtype=torch.float64, generator=generator).to(device)
    frequency = BASE ** -(0.05 + 0.4 * pair)
    rho = -(0.3 + 0.9 * slope) * torch.log1p(position) + 0.3 * ripple * torch.cos(frequency * position)
    alpha = 0.1 * torch.randn(count, length, dtype=torch.float64, generator=generator).to(device)
    alpha[:, 0] += 3.0
    return CompactPattern.from_parameters(alpha, rho)


def random_tokens(
    count: int, batch_size: int, length: int, vocab_size: int, generator: torch.Generator, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Return `count` micro-batches of inputs and targets, each `[batch_size, length]`, on the device."""
    windows = torch.randint(vocab_size, (count, batch_size, length + 1), generator=generator).to(device)
    return [(window[:, :-1], window[:, 1:]) for window in windows]
