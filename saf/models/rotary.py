"""Rotary position embedding (base 10,000), applied to queries and keys before their product."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BASE = 10_000.0
"""The slowest rotation's wavelength over 2 pi, the usual choice for contexts of thousands of tokens."""


class Rotary(nn.Module):
    """Hold cosines and sines of every position, float32 whatever the model is cast to."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_length: int):
        """Compute them on the CPU, so that every device has the same, also one without float64."""
        super().__init__()
        exact = {"dtype": torch.float64, "device": "cpu"}
        frequency = BASE ** (-torch.arange(0, head_dim, 2, **exact) / head_dim)
        angle = torch.arange(max_length, **exact)[:, None] * frequency
        for name, table in (("cos", angle.cos()), ("sin", angle.sin())):
            self.register_buffer(name, table.float().to(torch.get_default_device()), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        """Follow the module to another device; in 16 bits the angles of late positions would be lost."""
        for name, table in list(self._buffers.items()):
            assert table is not None
            moved = fn(table)
            self._buffers[name] = moved if moved.dtype == table.dtype else table.to(moved.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[B or 1, T, 1, D/2]` of `positions [B or 1, T]`."""
        return self.cos[positions][:, :, None], self.sin[positions][:, :, None]


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the two halves of each head's channels, `x [B, T, H, D]`, in at least float32."""
    return _Rotate.apply(x, *rotation)


class _Rotate(torch.autograd.Function):
    """Turn the gradient back: no scattered slices, and no float32 copy in memory, in a compiled backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(gradients[0], cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of the channels by an angle's cosine and sine."""
    first, second = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([half.to(x.dtype) for half in turned], dim=-1)
