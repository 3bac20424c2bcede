"""Cases of the causal convolution kernel; `run` compares one with sums over all pairs in float64."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """Heads and positions: below, at and beyond the kernel's blocks."""

    heads: int
    length: int
    dtype: str = "float64"


CASES = {
    "one position": Case(1, 1),
    "below a block": Case(2, 31),
    "a block": Case(3, 128),
    "blocks and a rest": Case(2, 301),
    "float32": Case(2, 130, dtype="float32"),
}


def run(case: Case, device: str) -> dict:
    """Return the largest error of a sum of signed terms, relative to the sum of their sizes; inputs not contiguous."""
    from saf.ops.toeplitz.kernels import convolve

    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)
    shape = (2, case.heads, case.length + 5)
    left, right = torch.randn(shape, generator=generator, device=device, dtype=torch.float64).to(dtype)[:, :, 5:]
    lag = torch.arange(case.length, device=device)
    lag = lag[:, None] - lag
    matrix = right.double()[:, lag.clamp(min=0)] * (lag >= 0)
    exact = (matrix @ left.double()[..., None])[..., 0]
    size = (matrix.abs() @ left.double().abs()[..., None])[..., 0]
    return {"error": ((convolve(left, right).double() - exact).abs() / size).max().item()}
