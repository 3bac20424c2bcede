"""Loss and gradient of softmax cross-entropy in one launch: a program a row, the gradient over the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from saf.ops.launch import launch

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# The device language's constants and ranges are not what their annotations say.


BLOCK = 4096
"""Columns read at once: with 8 warps the fastest of the sizes tried on an H200 (docs/log.md)."""
STAGES = 4
"""Blocks in flight. The buffers they take also keep fewer rows in flight, so that more of a row is still in the
second-level cache when it is read again (docs/log.md)."""


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
    known = (label >= 0) & (label < V)
    chosen = tl.load(p_logits + tl.where(known, label, 0)).to(tl.float32) * LOG2E
    share = tl.where(known, 1.0 / tl.load(count_ptr).to(tl.float32), 0.0)
    whole = V // BLOCK * BLOCK
    column = tl.arange(0, BLOCK)
    last = whole + column

    b_last = tl.load(p_logits + last, mask=last < V, other=-float("inf")).to(tl.float32) * LOG2E
    top = tl.maximum(tl.max(b_last, 0), chosen)
    total = tl.sum(tl.exp2(b_last - top), 0)
    for start in tl.range(0, whole, BLOCK, num_stages=STAGES):
        b_logits = tl.load(p_logits + start + column).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, tl.max(b_logits, 0))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(b_logits - new_top), 0)
        top = new_top
    normaliser = top + tl.log2(total)
    other = tl.where(label == IGNORED, 0.0, float("nan"))
    tl.store(loss_ptr + row, tl.where(known, (normaliser - chosen) / LOG2E, other))

    # Every thread has read the label's logit before one of them overwrites it, and its gradient is written last.
    tl.debug_barrier()
    for start in tl.range(0, whole, BLOCK, num_stages=STAGES):
        b_logits = tl.load(p_logits + start + column).to(tl.float32) * LOG2E
        gradient = tl.exp2(b_logits - normaliser) * share
        tl.store(p_logits + start + column, gradient.to(logits_ptr.dtype.element_ty))
    gradient = tl.exp2(b_last - normaliser) * share
    tl.store(p_logits + last, gradient.to(logits_ptr.dtype.element_ty), mask=last < V)
    tl.debug_barrier()
    gradient = (tl.exp2(chosen - normaliser) - 1.0) * share
    tl.store(p_logits + label, gradient.to(logits_ptr.dtype.element_ty), mask=known)


def softmax_gradient(logits: Tensor, labels: Tensor, count: Tensor, *, ignored: int) -> Tensor:
    """Run the kernel on `logits [N, V]` in place and return losses `[N]` float32; see `saf::softmax_gradient_`."""
    labels = labels.contiguous()
    losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
    launch(
        softmax_gradient_kernel, (logits.shape[0],), logits, labels, count, losses, logits.shape[1], logits.stride(0),
        IGNORED=ignored, BLOCK=BLOCK, STAGES=STAGES, num_warps=8, device=logits.device,
    )  # fmt: skip
    return losses
