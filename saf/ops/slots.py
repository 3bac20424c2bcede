"""Picking heads out of a tensor and putting them together, without indices that the host would have to send."""

from collections.abc import Iterable

import torch
from torch import Tensor


def take_heads(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Return the named heads of `x [B, H, T, D]`: a view when they are consecutive, a copy otherwise."""
    first, last = heads[0], heads[-1]
    if heads == tuple(range(first, last + 1)):
        return x[:, first : last + 1]
    apart = x.unbind(1)
    return torch.stack([apart[head] for head in heads], dim=1)


def put_together(parts: Iterable[tuple[tuple[int, ...], Tensor]]) -> Tensor:
    """Return one tensor of heads, stored as `[B, T, H, D]`, from parts `(their slots, [B, n, T, D])`."""
    by_slot = {slot: one for slots, part in parts for slot, one in zip(slots, part.unbind(1), strict=True)}
    return torch.stack([by_slot[slot] for slot in sorted(by_slot)], dim=2).transpose(1, 2)
