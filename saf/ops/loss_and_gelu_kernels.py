"""Triton kernels around a decoder's layers: the loss with its gradient over the logits, and GELU with its gradient.

A program of the loss takes a row. GELU uses Phi(-|x|) = exp(-x^2/2) P(t), t = 1 / (1 + 0.32 |x|), with a polynomial P
whose relative error is below 1.2e-5 for every x: a thirtieth of half a unit in float16's last place, and a
two-hundredth of bfloat16's. One exponential serves Phi and its derivative, where the C library's erf needs two branches
and its derivative an exponential of its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from saf.ops.launch import cdiv, launch

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# The device language's constants and ranges are not what their annotations say.

# Columns of logits read at once: with 8 warps the fastest of the sizes tried on an H200.
COLUMNS = 4096
# Blocks in flight. The buffers they take also keep fewer rows in flight, so that more of a row is still in the
# second-level cache when it is read again.
STAGES = 4


def softmax_gradient(logits: Tensor, labels: Tensor, count: Tensor, *, ignored: int) -> Tensor:
    """Run the kernel on `logits [N, V]` in place and return losses `[N]` float32; see `saf::softmax_gradient_`."""
    labels = labels.contiguous()
    losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
    launch(
        softmax_gradient_kernel, (logits.shape[0],), logits, labels, count, losses, logits.shape[1], logits.stride(0),
        IGNORED=ignored, BLOCK=COLUMNS, STAGES=STAGES, num_warps=8, device=logits.device,
    )  # fmt: skip
    return losses


@triton.jit
def softmax_gradient_kernel(
    logits_ptr, labels_ptr, count_ptr, loss_ptr, V, logits_stride,
    IGNORED: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write one row: `lse - logit[label]` to loss, `(softmax - onehot) / count` over the logits; zeros where ignored.

    A label that is no column makes the loss NaN and the gradients zero; nothing beyond the row is touched. Logits are
    held in units of log 2. Only the last block of columns is masked.
    """
    LOG2E: tl.constexpr = 1.4426950408889634  # type: ignore[assignment]
    row = tl.program_id(0).to(tl.int64)
    p_logits = logits_ptr + row * logits_stride
    label = tl.load(labels_ptr + row)
    is_token = (label >= 0) & (label < V)
    own_logit = tl.load(p_logits + tl.where(is_token, label, 0)).to(tl.float32) * LOG2E
    weight = tl.where(is_token, 1.0 / tl.load(count_ptr).to(tl.float32), 0.0)
    # The last block is read once and stays in registers for both passes; only it needs a mask.
    masked_from = V // BLOCK * BLOCK
    column = tl.arange(0, BLOCK)
    last = masked_from + column

    b_last = tl.load(p_logits + last, mask=last < V, other=-float("inf")).to(tl.float32) * LOG2E
    peak = tl.maximum(tl.max(b_last, 0), own_logit)
    total = tl.sum(tl.exp2(b_last - peak), 0)
    # First pass: the log-sum-exp, online, so that every logit is read once for it.
    for start in tl.range(0, masked_from, BLOCK, num_stages=STAGES):
        b_logits = tl.load(p_logits + start + column).to(tl.float32) * LOG2E
        new_peak = tl.maximum(peak, tl.max(b_logits, 0))
        total = total * tl.exp2(peak - new_peak) + tl.sum(tl.exp2(b_logits - new_peak), 0)
        peak = new_peak
    normaliser = peak + tl.log2(total)
    no_loss = tl.where(label == IGNORED, 0.0, float("nan"))
    tl.store(loss_ptr + row, tl.where(is_token, (normaliser - own_logit) / LOG2E, no_loss))

    # Second pass: the gradient, over the logits. Every thread has read the label's logit before one of them overwrites
    # it, and the label's own gradient is written last.
    tl.debug_barrier()
    for start in tl.range(0, masked_from, BLOCK, num_stages=STAGES):
        b_logits = tl.load(p_logits + start + column).to(tl.float32) * LOG2E
        gradient = tl.exp2(b_logits - normaliser) * weight
        tl.store(p_logits + start + column, gradient.to(logits_ptr.dtype.element_ty))
    gradient = tl.exp2(b_last - normaliser) * weight
    tl.store(p_logits + last, gradient.to(logits_ptr.dtype.element_ty), mask=last < V)
    tl.debug_barrier()
    gradient = (tl.exp2(own_logit - normaliser) - 1.0) * weight
    tl.store(p_logits + label, gradient.to(logits_ptr.dtype.element_ty), mask=is_token)


# --- GELU

# Elements of a program, and its warps of 32 threads: 16 elements a thread, two of the widest loads of 16 bits. Chosen,
# not measured against others; one pass over memory is bound by memory.
BLOCK = 2048
WARPS = 4


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


@triton.jit
def gelu_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Store x Phi(x)."""
    o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(x_ptr + o_n, mask=o_n < N, other=0.0).to(tl.float32)
    cumulative, _ = _gelu_parts(b_x)
    tl.store(y_ptr + o_n, (b_x * cumulative).to(y_ptr.dtype.element_ty), mask=o_n < N)


@triton.jit
def gelu_backward_kernel(x_ptr, gradient_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Multiply the gradient by Phi(x) + x phi(x), in place, and store x Phi(x)."""
    o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(x_ptr + o_n, mask=o_n < N, other=0.0).to(tl.float32)
    b_gradient = tl.load(gradient_ptr + o_n, mask=o_n < N, other=0.0).to(tl.float32)
    cumulative, bell = _gelu_parts(b_x)
    b_gradient = b_gradient * (cumulative + b_x * bell * 0.3989422804014327)  # 1 / sqrt(2 pi)
    tl.store(y_ptr + o_n, (b_x * cumulative).to(y_ptr.dtype.element_ty), mask=o_n < N)
    tl.store(gradient_ptr + o_n, b_gradient.to(gradient_ptr.dtype.element_ty), mask=o_n < N)


@triton.jit
def _gelu_parts(b_x):
    """Return Phi(x) and exp(-x^2 / 2) of float32 x."""
    t = 1.0 / (1.0 + 0.32 * tl.abs(b_x))
    # Horner's scheme; the coefficients are a fit of Phi(-|x|) exp(x^2/2) over t in (0, 1].
    poly = -0.06677556
    poly = poly * t + 0.13958845
    poly = poly * t + 0.04961156
    poly = poly * t + 0.12305239
    poly = poly * t + 0.12682795
    poly = poly * t + 0.12768972
    bell = tl.exp2(b_x * b_x * -0.7213475204444817)  # log2(e) / 2
    tail = poly * t * bell
    return tl.where(b_x < 0, tail, 1.0 - tail), bell
