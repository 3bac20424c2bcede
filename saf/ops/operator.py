"""Operators `saf::*`: their registration, the devices on which they run as Triton kernels, and their precision."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from saf.errors import UnsupportedError

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# At import: a search while compiled code is traced breaks the graph.
_TRITON = find_spec("triton") is not None


def has_triton() -> bool:
    """Return whether Triton is installed; it is imported only when a kernel runs."""
    return _TRITON


def uses_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether operators on operands of `dtype` run as Triton kernels on this device."""
    return device.type == "cuda" and dtype in TRITON_DTYPES and has_triton()


def product_precision(dtype: torch.dtype) -> str:
    """Return how kernels multiply operands of `dtype` on CUDA: "tf32" for float32 where PyTorch's switches allow it.

    All else is exact, "ieee". `torch.set_float32_matmul_precision` sets the switch of matrix products; without it the
    general one counts.
    """
    if dtype != torch.float32:
        return "ieee"
    # Kernels follow PyTorch's switches, so that a frozen head is no less exact than the projections around it. "none"
    # means that nobody has set the switch of products.
    own = torch.backends.cuda.matmul.fp32_precision
    general = torch.backends.fp32_precision  # type: ignore[attr-defined]
    return "tf32" if "tf32" in (own, general if own == "none" else own) else "ieee"


def operator(
    name: str, *, fake: Callable[..., Any], gradient: Callable[..., Any] | None = None,
    context: Callable[..., None] | None = None, mutates: tuple[str, ...] = (),
) -> Callable[[Callable], Any]:  # fmt: skip
    """Register a function as the operator `saf::name`, for every device, and return the operator.

    `fake` returns empty tensors of the result's true shape, strides and dtype. `gradient(ctx, *gradients)` returns the
    gradients to its arguments, from what `context(ctx, inputs, output)` has put into `ctx`. The function may change
    only arguments that it `mutates`, and returns none of its arguments.
    """

    # As `torch.library.custom_op`, without its checks in every call: those take the host longer than all the rest of an
    # operator of one launch.
    def register(function: Callable) -> Any:
        torch.library.define(f"saf::{name}", torch.library.infer_schema(function, mutates_args=mutates))
        # "default" stands for every device: the function itself chooses between Triton and PyTorch by its operands.
        torch.library.impl(f"saf::{name}", "default", function)
        torch.library.register_fake(f"saf::{name}", fake)
        if gradient is not None:
            torch.library.register_autograd(f"saf::{name}", gradient, setup_context=context)
        return getattr(torch.ops.saf, name).default

    return register


def forbid_second_derivative() -> None:
    """Raise UnsupportedError in a backward pass that is recorded to be differentiated (`create_graph=True`)."""
    # PyTorch records a backward pass, with gradients enabled, only under create_graph=True. The operators called there
    # have no gradient of their own: the second derivative would lack their part.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UnsupportedError("this gradient cannot be differentiated again; leave create_graph out")


def has_tangent(*tensors: Tensor) -> bool:
    """Return whether a tensor has a tangent (`torch.func.jvp`): registered operators would drop it silently."""
    # Asking each tensor costs the host, so first whether any level of forward mode is open: -1 means none.
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on a device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
