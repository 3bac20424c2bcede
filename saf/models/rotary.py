"""Rotary position embedding (base 10,000), applied to queries and keys before their product."""

import torch
from torch import Tensor, nn

BASE = 10_000.0


class Rotary(nn.Module):
    """Cosines and sines of every position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_length: int):
        super().__init__()
        frequency = BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angle = torch.arange(max_length, dtype=torch.float64)[:, None] * frequency
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[B or 1, 1, T, D/2]` of `positions [B or 1, T]`."""
        return self.cos[positions][:, None], self.sin[positions][:, None]


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the two halves of each head's channels, `x [B, H, T, D]`, in at least float32."""
    cos, sin = rotation
    first, second = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
