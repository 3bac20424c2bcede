"""Gradients of logits through the product kernel, and the convolution of normalisers, beside float64."""

from contextlib import ExitStack
from dataclasses import dataclass
from unittest.mock import patch

import torch

SPREADS = (0.5, 1.0, 2.0, 5.0, 8.0)
"""Standard deviations of key and distance logits."""
NAMES = ("value", "alpha", "rho")


@dataclass(frozen=True)
class Case:
    """Shape and dtype of values, the spread of logits, and what all values have in common, which cancels."""

    spread: float
    dtype: str = "bfloat16"
    length: int = 40
    batch: int = 2
    heads: int = 3
    dim: int = 16
    common: float = 3.0


@dataclass(frozen=True)
class Convolution:
    """Heads and positions of a causal convolution: below, at and beyond the kernel's blocks."""

    heads: int
    length: int
    dtype: str = "float64"


CASES: dict[str, Case | Convolution] = {
    "one position": Convolution(1, 1),
    "a block": Convolution(3, 128),
    "blocks and a rest": Convolution(2, 301),
    "float32": Convolution(2, 130, dtype="float32"),
    **{f"trained-bfloat16-{spread}": Case(spread) for spread in SPREADS[::4]},
    **{f"trained-float16-{spread}": Case(spread, dtype="float16") for spread in SPREADS[1:2]},
    "trained-two-blocks": Case(5.0, length=150, batch=1, heads=1),
}


def drawn(case: Case, device: str) -> tuple[torch.Tensor, ...]:
    """Return values and gradients of outputs `[B, F, T, D]`, alpha and rho `[F, T]` float32."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, case.batch, case.heads, case.length, case.dim)
    value, upstream = torch.randn(shape, generator=generator)
    alpha, rho = case.spread * torch.randn(2, case.heads, case.length, generator=generator)
    dtype = getattr(torch, case.dtype)
    return tuple(x.to(device) for x in ((value + case.common).to(dtype), upstream.to(dtype), alpha, rho))


def dense_gradients(value, upstream, alpha, rho) -> tuple[torch.Tensor, ...]:
    """Return the gradients to values, alpha and rho by autograd: softmax in the logits' dtype, else in `value`'s."""
    inputs = [x.detach().clone().requires_grad_() for x in (value, alpha, rho)]
    position = torch.arange(value.shape[2], device=value.device)
    lag = position[:, None] - position
    scores = inputs[1][:, None, :] + inputs[2][:, lag.clamp(min=0)]
    weights = scores.masked_fill(lag < 0, -torch.inf).softmax(-1)
    return torch.autograd.grad(weights.to(value.dtype) @ inputs[0], inputs, upstream)


def errors(actual, expected) -> dict[str, float]:
    """Return relative L2 errors by name; 1e30 for NaN."""
    each = [((x.double() - y).norm() / y.norm()).item() for x, y in zip(actual, expected, strict=True)]
    return {name: error if error == error else 1e30 for name, error in zip(NAMES, each, strict=True)}


def run(case: Case | Convolution, device: str) -> list[str]:
    """Return which limits break."""
    return _gradients(case, device) if isinstance(case, Case) else _convolution(case, device)


def _gradients(case: Case, device: str) -> list[str]:
    """At most twice the error of plain autograd; the interpreter multiplies bfloat16 numbers as float32 ones."""
    import saf.ops.toeplitz as module
    import saf.ops.toeplitz_kernels as kernels
    from saf.ops.toeplitz import compact_tables, level_logits

    value, upstream, alpha, rho = drawn(case, device)
    expected = dense_gradients(value.double(), upstream.double(), alpha.double(), rho.double())
    plain = errors(dense_gradients(value, upstream, alpha, rho), expected)
    tables = compact_tables(*level_logits(alpha, rho), value.dtype)
    with ExitStack() as patched:
        if device == "cpu":
            exact = _exact_product(kernels.toeplitz_matmul)
            patched.enter_context(patch.object(module, "uses_triton", lambda device, dtype: True))
            patched.enter_context(patch.object(kernels, "toeplitz_matmul", exact))
        ours = errors(module.pattern_gradient(upstream, value, *tables, case.length), expected)
    return [f"{name} {ours[name]:.2e} > 2 {plain[name]:.2e}" for name in NAMES if not ours[name] <= 2 * plain[name]]


def _exact_product(kernel):
    """Return a launcher that gives the interpreter bfloat16 operands as float32: those products it takes right."""

    def product(x, table, *rest, **more):
        operands = (x.float(), table.float()) if x.dtype == torch.bfloat16 else (x, table)
        return kernel(*operands, *rest, **more)

    return product


def _convolution(case: Convolution, device: str) -> list[str]:
    """Some hundred signed terms, added in blocks: a few roundings of the sum of their sizes; inputs not contiguous."""
    from saf.ops.toeplitz_kernels import convolve

    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)
    shape = (2, case.heads, case.length + 5)
    left, right = torch.randn(shape, generator=generator, device=device, dtype=torch.float64).to(dtype)[:, :, 5:]
    lag = torch.arange(case.length, device=device)
    lag = lag[:, None] - lag
    matrix = right.double()[:, lag.clamp(min=0)] * (lag >= 0)
    exact = (matrix @ left.double()[..., None])[..., 0]
    size = (matrix.abs() @ left.double().abs()[..., None])[..., 0]
    error = ((convolve(left, right).double() - exact).abs() / size).max().item()
    limit = {"float64": 2.0**-50, "float32": 2.0**-21}[case.dtype]
    return [] if error <= limit else [f"error {error:.2e} > {limit:.2e}"]
