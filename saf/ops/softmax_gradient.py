"""The registered operator `saf::softmax_gradient_`: cross-entropy and its gradient from logits, in one reading."""

import torch
from torch import Tensor

from saf.errors import InputError
from saf.ops.availability import uses_triton

IGNORED = -100


@torch.library.custom_op("saf::softmax_gradient_", mutates_args={"logits"})
def softmax_gradient_(logits: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    """Return `-log softmax(logits)[label]` by row and overwrite the logits with `(softmax - onehot) / count`.

    `logits [N, V]` contiguous, `labels [N]`, `count` a scalar tensor; rows labelled -100 give zeros. Losses are
    float32 or wider, as is all arithmetic between reading and writing the logits. A label that is no column raises
    InputError on the CPU; elsewhere its loss is NaN and its gradients are zero, since the host does not wait.
    """
    if labels.shape != logits.shape[:1]:
        raise InputError(f"{logits.shape[0]} rows of logits need as many labels; got {list(labels.shape)}")
    if uses_triton(logits.device, logits.dtype):
        from saf.ops.triton.softmax_gradient import softmax_gradient

        return softmax_gradient(logits, labels, count, ignored=IGNORED)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    known = known_labels(labels, logits.shape[1])
    target = labels.where(known, 0)[:, None]
    normaliser = wide.logsumexp(1, keepdim=True)
    losses = (normaliser - wide.gather(1, target))[:, 0].where(known, torch.nan).where(labels != IGNORED, 0)
    slope = (wide - normaliser).exp()
    slope.scatter_add_(1, target, slope.new_full(target.shape, -1))
    logits.copy_((slope / count).where(known[:, None], 0))
    return losses


@softmax_gradient_.register_fake
def _(logits: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))


def known_labels(labels: Tensor, vocab_size: int) -> Tensor:
    """Return which labels are columns; raise InputError on the CPU for one that is neither a column nor -100."""
    known = (labels >= 0) & (labels < vocab_size)
    # Elsewhere the host would have to wait for the device.
    on_host = labels.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_host and len(strange := labels[~known & (labels != IGNORED)]):
        raise InputError(f"targets are tokens 0 to {vocab_size - 1}, or -100 to leave one out; got {int(strange[0])}")
    return known
