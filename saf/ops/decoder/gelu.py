"""`gelu_linear`: GELU and the product after it, whose backward pass computes the GELU again instead of keeping it.

In training on CUDA, 16-bit inputs go through two registered operators (`saf::gelu`, `saf::gelu_backward_`): PyTorch's
own GELU is bound by the arithmetic of erf there, these by memory. Elsewhere PyTorch's runs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saf.ops.operator import forbid_second_derivative, operator, uses_triton


def gelu_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return `gelu(x) weight^T`: `x [..., I]`, `weight [O, I]` to `[..., O]`; the exact GELU, x Phi(x).

    Under autocast the product runs in the autocast dtype, as `F.linear` would.
    """
    if not recomputes(x):
        return F.linear(F.gelu(x), weight)
    return _GeluLinear.apply(x, weight.to(x.dtype))


def recomputes(x: Tensor) -> bool:
    """Return whether the backward pass computes the GELU again: in training, where operators have a kernel for it."""
    trains = torch.is_grad_enabled() and x.requires_grad
    return trains and x.dtype != torch.float32 and uses_triton(x.device, x.dtype)


class _GeluLinear(torch.autograd.Function):
    """Keep the input of the GELU and the weight, nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(gelu(x), weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the input and the weight; the activation is computed again."""
        forbid_second_derivative()
        x, weight = ctx.saved_tensors
        slope = gradients[0] @ weight
        activated = gelu_backward_(x, slope)
        return slope, gradients[0].flatten(0, -2).t() @ activated.flatten(0, -2)


@operator("saf::gelu")
def gelu(x: Tensor) -> Tensor:
    """Return `x Phi(x)` in the dtype of `x`, contiguous."""
    if uses_triton(x.device, x.dtype):
        from saf.ops.decoder.gelu_kernel import gelu as kernel

        return kernel(x.contiguous())
    return F.gelu(x).contiguous()


@torch.library.register_fake("saf::gelu")
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("saf::gelu_backward_", mutates_args={"gradient"})
def gelu_backward_(x: Tensor, gradient: Tensor) -> Tensor:
    """Multiply `gradient` (contiguous) by `Phi(x) + x phi(x)` and return `x Phi(x)`; shapes and dtypes as `x`."""
    if uses_triton(x.device, x.dtype):
        from saf.ops.decoder.gelu_kernel import gelu_backward as kernel

        return kernel(x.contiguous(), gradient)
    gradient.copy_(torch.ops.aten.gelu_backward(gradient, x))
    return F.gelu(x).contiguous()


@gelu_backward_.register_fake
def _(x: Tensor, gradient: Tensor) -> Tensor:
    return x.new_empty(x.shape)
