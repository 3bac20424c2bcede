"""Loss and gradient of softmax cross-entropy in one launch: a program a row, the gradient over the logits."""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# The device language's constants and ranges are not what their annotations say.

import torch
import triton
import triton.language as tl
from torch import Tensor

from saf.ops.triton.launch import launch

BLOCK = 4096


@triton.jit
def softmax_gradient_kernel(
    logits_ptr, labels_ptr, count_ptr, loss_ptr, V, logits_stride, IGNORED: tl.constexpr, BLOCK: tl.constexpr
):
    """One row: `lse - logit[label]` to loss, `(softmax - onehot) / count` over the logits; zeros where ignored."""
    row = tl.program_id(0).to(tl.int64)
    p_logits = logits_ptr + row * logits_stride
    top = -float("inf")
    total = 0.0
    for start in tl.range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        b_logits = tl.load(p_logits + column, mask=column < V, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(b_logits, 0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(b_logits - new_top), 0)
        top = new_top
    normaliser = top + tl.log(total)
    label = tl.load(labels_ptr + row)
    kept = label != IGNORED
    chosen = tl.load(p_logits + tl.where(kept, label, 0)).to(tl.float32)
    tl.store(loss_ptr + row, tl.where(kept, normaliser - chosen, 0.0))
    share = tl.where(kept, 1.0 / tl.load(count_ptr).to(tl.float32), 0.0)
    # Every thread has read the label's logit before one of them overwrites it.
    tl.debug_barrier()
    for start in tl.range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        b_logits = tl.load(p_logits + column, mask=column < V, other=0.0).to(tl.float32)
        gradient = (tl.exp(b_logits - normaliser) - tl.where(column == label, 1.0, 0.0)) * share
        tl.store(p_logits + column, gradient.to(logits_ptr.dtype.element_ty), mask=column < V)


def softmax_gradient(logits: Tensor, labels: Tensor, count: Tensor, *, ignored: int) -> Tensor:
    """Run the kernel on `logits [N, V]` in place and return losses `[N]` float32; see `saf::softmax_gradient_`."""
    losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
    launch(
        softmax_gradient_kernel, (logits.shape[0],), logits, labels, count, losses, logits.shape[1], logits.stride(0),
        IGNORED=ignored, BLOCK=BLOCK, num_warps=8, device=logits.device,
    )  # fmt: skip
    return losses
