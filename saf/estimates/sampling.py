"""What sampled patterns share: a random stream for each head, and causal matrices."""

import operator

import numpy as np
import torch
from torch import Tensor

from saf.errors import InputError

Seed = int | torch.Generator
"""Where draws come from: a seed, or a generator that one is drawn from."""


def seed_of(seed: Seed) -> int:
    """Return the seed itself, or one that the generator draws, below 2**53 so that JSON keeps it.

    Raises InputError for anything else, and for a negative number.
    """
    if isinstance(seed, torch.Generator):
        return int(torch.randint(1 << 53, (), generator=seed, device=seed.device))
    number = operator.index(seed)
    if number < 0:
        raise InputError(f"a seed is an integer from 0 on, or a torch.Generator to draw one from; got {seed!r}")
    return number


def stream_of(seed: int, head: tuple[int, ...], number: int = 0) -> np.random.Generator:
    """Return a generator that depends on the seed, the head and a stream number alone.

    A head draws the same whatever else is frozen with it, at whatever rate and time. A query position may follow.
    """
    return np.random.default_rng([seed, *head, number])


def causal_softmax(logits: Tensor) -> Tensor:
    """Return the softmax of each row's causal entries, `[..., T, T]`; what lies above the diagonal has no say."""
    return logits.masked_fill(~causal_mask(logits.shape[-1]).to(logits.device), -torch.inf).softmax(-1)


def causal_mask(length: int) -> Tensor:
    """Return `[T, T]`, true on and below the diagonal."""
    return torch.ones(length, length, dtype=torch.bool).tril()
