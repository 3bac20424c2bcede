"""Gradients of key and distance logits of every spread: at most twice the error of autograd of the dense formula."""

import itertools

import pytest
import torch

from saf.errors import UnsupportedError
from saf.ops import BACKENDS
from tests.ops.kernels.logits import NAMES, SPREADS, Case, dense_gradients, drawn, errors

SHAPES = {"short": {"length": 16, "batch": 1}, "blocks": {"length": 150, "heads": 2}}
KINDS = list(itertools.product(("bfloat16", "float32"), SHAPES, SPREADS))


@pytest.mark.parametrize("common", [0.0, 3.0])
@pytest.mark.parametrize(("dtype", "shape", "spread"), KINDS)
def test_products_in_pytorch(dtype, shape, spread, common):
    """On a CPU, of values with and without a part that cancels."""
    case = Case(spread, dtype=dtype, common=common, **SHAPES[shape])
    value, upstream, alpha, rho = drawn(case, "cpu")
    expected = dense_gradients(value.double(), upstream.double(), alpha.double(), rho.double())
    plain = errors(dense_gradients(value, upstream, alpha, rho), expected)
    inputs = [x.requires_grad_() for x in (value, alpha, rho)]
    output = BACKENDS["toeplitz"].forward_trainable(*inputs)
    found = errors(torch.autograd.grad(output, inputs, upstream), expected)
    for name in NAMES:
        assert found[name] <= 2 * plain[name], (name, found, plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_tables_cannot_hold_is_refused(dtype):
    """Beyond a spread of 64 nats a factor, or any in float16, there is a reason and no number."""
    alpha, rho = 40 * torch.randn(2, 1, 60, generator=torch.Generator().manual_seed(0))
    toeplitz = BACKENDS["toeplitz"]
    assert "range" in toeplitz.untrainable(alpha, rho, dtype) or "cannot hold" in toeplitz.untrainable(
        alpha, rho, dtype
    )
    if dtype != torch.float16:
        with pytest.raises(UnsupportedError, match="cannot hold a pattern"):
            toeplitz.forward_trainable(torch.zeros(1, 1, 60, 4, dtype=dtype), alpha, rho)
