"""Cases of the GELU kernels; `run` compares one with float64."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class Case:
    """Values of a scale, and how many; counts below, at and beyond a program's block."""

    count: int
    dtype: str = "float16"
    scale: float = 3.0


CASES = {
    "few": Case(7),
    "block": Case(2048),
    "beyond": Case(5000),
    "tails": Case(4096, scale=30.0),
    "bfloat16": Case(5000, dtype="bfloat16"),
}


def run(case: Case, device: str) -> dict:
    """Return relative L2 errors of values and gradients, those of rounding alone, and whether both values agree."""
    from saf.ops.decoder.gelu_kernel import gelu, gelu_backward

    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)
    x = (case.scale * torch.randn(case.count, generator=generator, device=device)).to(dtype)
    gradient = torch.randn(case.count, generator=generator, device=device).to(dtype)
    wide = x.double().requires_grad_()
    expected = F.gelu(wide)
    expected.backward(gradient.double())
    slope = gradient.clone()
    value, again = gelu(x), gelu_backward(x, slope)

    def error(found: torch.Tensor, exact: torch.Tensor) -> float:
        return ((found.double() - exact).norm() / exact.norm()).item()

    return {
        "value": error(value, expected.detach()),
        "gradient": error(slope, wide.grad),
        "rounded value": error(expected.detach().to(dtype), expected.detach()),
        "rounded gradient": error(wide.grad.to(dtype), wide.grad),
        "same": torch.equal(value, again),
    }
