"""The registered operator `saf::softmax_gradient_`: cross-entropy and its gradient from logits, in one reading."""

import torch
from torch import Tensor

from saf.ops.toeplitz_operator import uses_triton

IGNORED = -100


@torch.library.custom_op("saf::softmax_gradient_", mutates_args={"logits"})
def softmax_gradient_(logits: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    """Return `-log softmax(logits)[label]` by row and overwrite the logits with `(softmax - onehot) / count`.

    `logits [N, V]` contiguous, `labels [N]`, `count` a scalar tensor; rows labelled -100 give zeros. Losses are
    float32 or wider, as is all arithmetic between reading and writing the logits.
    """
    if uses_triton(logits.device, logits.dtype):
        from saf.ops.triton.softmax_gradient import softmax_gradient

        return softmax_gradient(logits, labels, count, ignored=IGNORED)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    kept, target = labels != IGNORED, labels.clamp(min=0)[:, None]
    normaliser = wide.logsumexp(1, keepdim=True)
    losses = (normaliser - wide.gather(1, target))[:, 0].where(kept, 0)
    slope = (wide - normaliser).exp()
    slope.scatter_add_(1, target, slope.new_full(target.shape, -1))
    logits.copy_(slope.where(kept[:, None], 0) / count)
    return losses


@softmax_gradient_.register_fake
def _(logits: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))
