"""Tensors inside memory of NaN: a kernel that reads or writes past its input shows."""

from collections.abc import Callable

import torch
from torch import Tensor


def surrounded(
    batch: int, heads: int, length: int, dim: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return a `[B, heads, T, D]` view inside NaN-filled memory, and a function that returns the memory around it."""
    buffer = torch.full((batch, length + 5, heads + 2, dim + 4), float("nan"), dtype=dtype).to(device)
    inside = torch.zeros(buffer.shape, dtype=torch.bool, device=device)
    inside[:, :length, 1:-1, :dim] = True
    return buffer[:, :length, 1:-1, :dim].transpose(1, 2), lambda: buffer[~inside]
