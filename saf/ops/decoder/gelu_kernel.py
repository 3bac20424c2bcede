"""GELU and its gradient, one pass over memory each; products around them read what these write.

Phi(-|x|) = exp(-x^2/2) P(t), t = 1 / (1 + 0.32 |x|), with a polynomial P whose relative error is below 1.2e-5 for
every x: a thirtieth of half a unit in float16's last place, and a two-hundredth of bfloat16's. One exponential serves
Phi and its derivative, where the C library's erf needs two branches and its derivative an exponential of its own.
"""

import triton
import triton.language as tl
from torch import Tensor

from saf.ops.launch import cdiv, launch

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# The device language's constants and ranges are not what their annotations say.


BLOCK = 2048
WARPS = 4
"""Numbers of one program and its warps of 32 threads: 16 a thread, two of the widest loads of a 16-bit dtype, and few
programs. Chosen by this, not measured against others; one pass over memory is bound by memory."""


@triton.jit
def _gelu_parts(b_x):
    """Return Phi(x) and exp(-x^2 / 2) of float32 x."""
    t = 1.0 / (1.0 + 0.32 * tl.abs(b_x))
    poly = -0.06677556
    poly = poly * t + 0.13958845
    poly = poly * t + 0.04961156
    poly = poly * t + 0.12305239
    poly = poly * t + 0.12682795
    poly = poly * t + 0.12768972
    bell = tl.exp2(b_x * b_x * -0.7213475204444817)  # log2(e) / 2
    tail = poly * t * bell
    return tl.where(b_x < 0, tail, 1.0 - tail), bell


@triton.jit
def gelu_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Store x Phi(x)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(x_ptr + place, mask=place < N, other=0.0).to(tl.float32)
    cumulative, _ = _gelu_parts(b_x)
    tl.store(y_ptr + place, (b_x * cumulative).to(y_ptr.dtype.element_ty), mask=place < N)


@triton.jit
def gelu_backward_kernel(x_ptr, gradient_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Multiply the gradient by Phi(x) + x phi(x), in place; store x Phi(x) again, so that nothing else need keep it."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(x_ptr + place, mask=place < N, other=0.0).to(tl.float32)
    b_gradient = tl.load(gradient_ptr + place, mask=place < N, other=0.0).to(tl.float32)
    cumulative, bell = _gelu_parts(b_x)
    b_gradient = b_gradient * (cumulative + b_x * bell * 0.3989422804014327)  # 1 / sqrt(2 pi)
    tl.store(y_ptr + place, (b_x * cumulative).to(y_ptr.dtype.element_ty), mask=place < N)
    tl.store(gradient_ptr + place, b_gradient.to(gradient_ptr.dtype.element_ty), mask=place < N)


def gelu(x: Tensor) -> Tensor:
    """Return GELU of a dense 16-bit tensor, in the same memory order."""
    y = x.new_empty(x.shape)
    size = x.numel()
    launch(gelu_kernel, (cdiv(size, BLOCK),), x, y, size, BLOCK=BLOCK, num_warps=WARPS, device=x.device)
    return y


def gelu_backward(x: Tensor, gradient: Tensor) -> Tensor:
    """Multiply `gradient` by GELU's slope at `x`, in place, and return GELU(x)."""
    y = x.new_empty(x.shape)
    size = x.numel()
    launch(
        gelu_backward_kernel, (cdiv(size, BLOCK),), x, gradient, y, size,
        BLOCK=BLOCK, num_warps=WARPS, device=x.device,
    )  # fmt: skip
    return y
