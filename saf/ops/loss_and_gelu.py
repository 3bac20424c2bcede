"""Operators around a decoder's attention: `linear_cross_entropy`, the loss chunk by chunk, and `gelu_linear`.

The loss's operator, `saf::softmax_gradient_`, takes cross-entropy and its gradient from logits in one reading, so that
logits are held for a chunk of tokens at a time and never twice. The backward pass of `gelu_linear` computes the GELU
again instead of keeping it, by operators bound by memory, where PyTorch's own is bound by the arithmetic of erf.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saf.errors import InputError
from saf.ops.backend import forbid_second_derivative, operator, uses_triton

# The target of a token without loss, as in PyTorch.
IGNORE_INDEX = -100
# Logits in memory at once: a gigabyte of 16 bits, little next to a model in training, enough for large products.
CHUNK_LOGITS = 1 << 29
# Tokens of a chunk are a multiple of this, so that products have whole blocks of rows; not measured against others.
CHUNK_STEP = 256


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of `-log softmax(hidden weight^T)[target]` in nats, a float32 scalar.

    `hidden [..., C]`, `weight [V, C]`, `targets [...]` with -100 for tokens left out. Under autocast the products
    run in the autocast dtype; softmax and sums always run in float32 or wider. The gradient cannot be differentiated.
    Raises InputError for targets of another shape, and on the CPU for some that are no tokens; elsewhere the loss is
    NaN then.
    """
    rows, labels = _by_row(hidden, targets)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        rows = rows.to(torch.get_autocast_dtype(device))
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(rows, weight, labels)
    log_probs = linear_log_probs(rows, weight, labels)
    return -log_probs.sum() / (labels != IGNORE_INDEX).sum()


def linear_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return `log softmax(hidden weight^T)[target]`, shaped like `targets`, float32 or wider, without gradient.

    Zero where the target is -100. Raises as `linear_cross_entropy` does.
    """
    rows, labels = _by_row(hidden, targets)
    size = chunk_rows(weight.shape[0])
    parts = []
    for h, t in zip(rows.split(size), labels.split(size), strict=True):
        log_probs, *_ = _log_probs(F.linear(h, weight.to(h.dtype)), t)
        parts.append(log_probs)
    return torch.cat(parts).view(targets.shape)


def chunk_rows(vocab_size: int) -> int:
    """Return how many tokens' logits are held at once."""
    return max(CHUNK_STEP, CHUNK_LOGITS // vocab_size // CHUNK_STEP * CHUNK_STEP)


def _by_row(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states `[N, C]` and labels `[N]`, a token a row."""
    if targets.shape != hidden.shape[:-1]:
        raise InputError(f"targets must be {list(hidden.shape[:-1])}, one a position; got {list(targets.shape)}")
    return hidden.flatten(0, -2), targets.flatten()


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss and both gradients in one pass over chunks, written over the logits; backward only scales."""

    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        # Gradients here, not in `backward`: logits are then computed once and freed at once.
        matrix = weight.to(rows.dtype)
        count = (labels != IGNORE_INDEX).sum()
        losses, row_gradients, weight_gradient = [], [], None
        size = chunk_rows(weight.shape[0])
        for h, t in zip(rows.split(size), labels.split(size), strict=True):
            with torch.autocast(rows.device.type, enabled=False):  # both operands are cast already
                slope = h @ matrix.t()
                losses.append(softmax_gradient_(slope, t, count).sum())
                row_gradients.append(slope @ matrix)
                # Chunks are added up in the weight's dtype: float32 where the products are 16 bits wide.
                part = slope.t() @ h
                weight_gradient = part.to(weight.dtype) if weight_gradient is None else weight_gradient.add_(part)
        ctx.save_for_backward(torch.cat(row_gradients), weight_gradient)
        return torch.stack(losses).sum() / count

    @staticmethod
    def backward(ctx, gradient: Tensor):
        forbid_second_derivative()
        row_gradient, weight_gradient = ctx.saved_tensors
        return (row_gradient * gradient).to(row_gradient.dtype), weight_gradient * gradient, None


def _losses_like(logits: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))


@operator("softmax_gradient_", fake=_losses_like, mutates=("logits",))
def softmax_gradient_(logits: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    """Return `-log softmax(logits)[label]` by row and overwrite the logits with `(softmax - onehot) / count`.

    `logits [N, V]` contiguous, `labels [N]`, `count` a scalar tensor; rows labelled -100 give zeros. Losses are
    float32 or wider, as is all arithmetic between reading and writing the logits. A label that is no column raises
    InputError on the CPU; elsewhere its loss is NaN and its gradients are zero, since the host does not wait.
    """
    if uses_triton(logits.device, logits.dtype):
        from saf.ops.loss_and_gelu_kernels import softmax_gradient

        return softmax_gradient(logits, labels, count, ignored=IGNORE_INDEX)
    log_probs, wide, normaliser, is_column = _log_probs(logits, labels)
    # Labels that are no columns count as column 0, so that nothing is read beyond a row; `where` drops the result.
    slope, target = (wide - normaliser).exp(), labels.where(is_column, 0)[:, None]
    slope.scatter_add_(1, target, slope.new_full(target.shape, -1))
    logits.copy_((slope / count).where(is_column[:, None], 0))
    return -log_probs


def _log_probs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the labels' log-probabilities `[N]`, and what they are computed from.

    That is the logits in float32 or wider, their log-sum-exps, and which labels are columns. Ignored labels have
    log-probability zero, others that are no column NaN. The latter raise InputError on the CPU; elsewhere the host
    would have to wait for the device.
    """
    is_column = (labels >= 0) & (labels < logits.shape[1])
    on_host = labels.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_host and len(outside := labels[~is_column & (labels != IGNORE_INDEX)]):
        most = logits.shape[1] - 1
        raise InputError(f"targets are tokens 0 to {most}, or -100 to leave one out; got {int(outside[0])}")
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    normaliser = wide.logsumexp(1, keepdim=True)
    log_probs = (wide.gather(1, labels.where(is_column, 0)[:, None]) - normaliser)[:, 0]
    return log_probs.where(is_column, torch.nan).where(labels != IGNORE_INDEX, 0), wide, normaliser, is_column


def gelu_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return `gelu(x) weight^T`: `x [..., I]`, `weight [O, I]` to `[..., O]`; the exact GELU, x Phi(x).

    Under autocast the product runs in the autocast dtype, as `F.linear` would.
    """
    if not recomputes(x):
        return F.linear(F.gelu(x), weight)
    return _GeluLinear.apply(x, weight.to(x.dtype))


def recomputes(x: Tensor) -> bool:
    """Return whether the backward pass computes the GELU again: in training, where operators have a kernel for it."""
    # An update of 124M falls from 14.8 to 12.5 GiB by it, and its 309 ms by 3.5 (docs/log.md).
    # Not in float32: the polynomial of the kernel is exact to 16 bits alone.
    trains = torch.is_grad_enabled() and x.requires_grad
    return trains and x.dtype != torch.float32 and uses_triton(x.device, x.dtype)


class _GeluLinear(torch.autograd.Function):
    """`gelu_linear` that saves its input and the weight, nothing else."""

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
        # One pass over memory writes both: GELU(x) for the weight's gradient, and over `slope` that of the input.
        activated = gelu_backward_(x, slope)
        return slope, gradients[0].flatten(0, -2).t() @ activated.flatten(0, -2)


@operator("gelu", fake=lambda x: x.new_empty(x.shape))
def gelu(x: Tensor) -> Tensor:
    """Return `x Phi(x)` in the dtype of `x`, contiguous."""
    if uses_triton(x.device, x.dtype):
        from saf.ops.loss_and_gelu_kernels import gelu as kernel

        return kernel(x.contiguous())
    return F.gelu(x).contiguous()


@operator("gelu_backward_", fake=lambda x, gradient: x.new_empty(x.shape), mutates=("gradient",))
def gelu_backward_(x: Tensor, gradient: Tensor) -> Tensor:
    """Multiply `gradient` (contiguous) by `Phi(x) + x phi(x)` and return `x Phi(x)`; shapes and dtypes as `x`."""
    if uses_triton(x.device, x.dtype):
        from saf.ops.loss_and_gelu_kernels import gelu_backward as kernel

        return kernel(x.contiguous(), gradient)
    gradient.copy_(torch.ops.aten.gelu_backward(gradient, x))
    return F.gelu(x).contiguous()
