"""Frozen heads alone, and PyTorch's own attention at the same shape, beside float64: outputs and value gradients."""

import torch
from torch import Tensor

from saf.ops import FrozenHeads, frozen_attention, live_attention
from saf.patterns import CompactPattern

Pairs = dict[str, tuple[Tensor, Tensor]]
"""Found and exact, by tensor."""


def frozen_errors(pattern: CompactPattern, backend: str, value: Tensor, upstream: Tensor) -> Pairs:
    """Mix `value [B, F, T, D]` by `pattern [F, >=T]`, and its gradient from `upstream`; both beside Eq. (3)."""
    frozen = FrozenHeads.from_patterns(pattern, backend=backend, dtype=value.dtype, device=value.device)
    leaf = value.clone().requires_grad_()
    output = frozen_attention(leaf, frozen)
    (gradient,) = torch.autograd.grad(output, leaf, upstream)
    length = value.shape[-2]
    weights = pattern.dense()[:, :length, :length]
    return {
        "output": (output.detach(), weights @ value.double()),
        "value": (gradient, weights.mT @ upstream.double()),
    }


def sdpa_errors(query: Tensor, key: Tensor, value: Tensor, upstream: Tensor, *, kernel: str) -> Pairs:
    """Attend causally, `[B, F, T, D]` each, and the gradient to `value`; both beside Eq. (1)."""
    leaf = value.clone().requires_grad_()
    output = live_attention(query, key, leaf, kernel=kernel)
    (gradient,) = torch.autograd.grad(output, leaf, upstream)
    length, dim = value.shape[-2:]
    future = torch.ones(length, length, dtype=torch.bool, device=value.device).triu(1)
    scores = query.double() @ key.double().mT * dim**-0.5
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return {
        "output": (output.detach(), weights @ value.double()),
        "value": (gradient, weights.mT @ upstream.double()),
    }
