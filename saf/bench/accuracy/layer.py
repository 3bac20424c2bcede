"""One attention layer as the model runs it and eagerly, and its operators alone, each beside float64."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from saf.bench.harness.synthetic import synthetic_patterns
from saf.heads import HeadLayout
from saf.models.rotary import BASE, Rotary, rotate
from saf.ops import FrozenHeads, frozen_attention, live_attention, mixed_attention
from saf.ops.heads import flat_heads
from saf.patterns import CompactPattern

TENSORS = ("output", "input", "value", "query projection", "key projection", "value projection", "output projection")
"""The output, the gradients to input and values, and those to the four weights."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Hold float32 weights `[C, C]` by role, an input and an output gradient `[B, T, C]`, patterns `[F, stored]`."""

    heads: HeadLayout
    weights: dict[str, Tensor]
    x: Tensor
    upstream: Tensor
    pattern: CompactPattern

    @classmethod
    def draw(
        cls,
        *,
        heads: HeadLayout,
        head_dim: int,
        batch_size: int,
        length: int,
        stored: int,
        generator: torch.Generator,
        device: torch.device,
    ) -> "Layer":
        """Draw everything from a generator on the CPU: unit inputs, weights that keep their size."""
        width = heads.num_heads * head_dim

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        weights = {role: normal(width, width) * width**-0.5 for role in ("query", "key", "value", "output")}
        x, upstream = (normal(batch_size, length, width) for _ in range(2))
        pattern = synthetic_patterns(heads.num_frozen, stored, generator, device)
        return cls(heads=heads, weights=weights, x=x, upstream=upstream, pattern=pattern)

    @property
    def head_dim(self) -> int:
        """Return the channels of a head."""
        return self.x.shape[-1] // self.heads.num_heads

    def eager(
        self, *, frozen: bool, dtype: torch.dtype, autocast: torch.dtype | None = None, pruned: bool = False
    ) -> dict[str, Tensor]:
        """Run head by head with materialised patterns, as in Eqs. (1) and (3), in `dtype` or under autocast.

        With `pruned` instead of `frozen` the outputs of those heads are zero.
        """
        leaves = {role: weight.to(dtype, copy=True).requires_grad_() for role, weight in self.weights.items()}
        x = self.x.to(dtype, copy=True).requires_grad_()
        length = x.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        fixed = self.pattern.dense()[:, :length, :length].to(dtype)
        with _autocast(x.device, autocast):
            query, key, value = (self._split(F.linear(x, leaves[role])) for role in ("query", "key", "value"))
            value.retain_grad()
            query, key = _rotated(query), _rotated(key)
            mixed = []
            for head in range(self.heads.num_heads):
                if frozen and head in self.heads.frozen:
                    weights = fixed[self.heads.frozen.index(head)].expand(x.shape[0], -1, -1)
                elif pruned and head in self.heads.frozen:
                    weights = torch.zeros_like(fixed[0]).expand(x.shape[0], -1, -1)
                else:
                    scores = query[:, head] @ key[:, head].mT * self.head_dim**-0.5
                    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
                mixed.append(weights @ value[:, head])
            output = F.linear(torch.stack(mixed, 2).flatten(2), leaves["output"])
        output.backward(self.upstream.to(output.dtype))
        return _seven(output, x, value.grad, {role: leaf.grad for role, leaf in leaves.items()})

    def model(
        self,
        *,
        backend: str | None,
        kernel: str = "auto",
        autocast: torch.dtype | None = None,
        pruned: bool = False,
    ) -> dict[str, Tensor]:
        """Run as a model does: live heads in PyTorch's attention, frozen ones (none without a backend) in a backend.

        With `pruned`, and no backend, those heads are left out, as pruning leaves their rows out of the weights.
        """
        device = self.x.device
        heads = self.heads if backend else HeadLayout(self.heads.num_heads, self.heads.num_heads)
        frozen = None
        if backend:
            options = {"dtype": autocast or torch.float32, "device": device, "kv_head": heads.kv_head}
            frozen = FrozenHeads.from_patterns(self.pattern, backend=backend, **options)
        live, kept = (self.heads.live, self.heads.live) if pruned else (heads.live, heads.slots)
        rows = {role: self._rows(live if role in ("query", "key") else kept) for role in self.weights}
        leaves = {
            role: (weight[:, rows[role]] if role == "output" else weight[rows[role]]).clone().requires_grad_()
            for role, weight in self.weights.items()
        }
        x = self.x.clone().requires_grad_()
        rotation = Rotary(self.head_dim, x.shape[1]).to(device)(torch.arange(x.shape[1], device=device)[None])
        with _autocast(device, autocast):
            parts = [F.linear(x, leaves[role]).unflatten(-1, (-1, self.head_dim)) for role in ("query", "key", "value")]
            query, key = (rotate(part, rotation).transpose(1, 2) for part in parts[:2])
            value = parts[2].transpose(1, 2)
            value.retain_grad()
            mixed = mixed_attention(query, key, value, frozen, kernel=kernel)
            output = F.linear(flat_heads(mixed), leaves["output"])
        output.backward(self.upstream.to(output.dtype))
        gradients = {role: torch.zeros_like(weight) for role, weight in self.weights.items()}
        for role, leaf in leaves.items():
            assert leaf.grad is not None
            (gradients[role].T if role == "output" else gradients[role])[rows[role]] = (
                leaf.grad.T if role == "output" else leaf.grad
            )
        assert value.grad is not None
        ordered = value.grad.new_zeros(x.shape[0], self.heads.num_heads, *value.grad.shape[2:])
        ordered[:, list(kept)] = value.grad
        return _seven(output, x, ordered, gradients)

    def _split(self, packed: Tensor) -> Tensor:
        return packed.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _rows(self, heads: tuple[int, ...]) -> Tensor:
        """Return the rows of the weights that belong to heads, in order."""
        channel = torch.arange(self.head_dim, device=self.x.device)
        return (torch.tensor(heads, device=self.x.device)[:, None] * self.head_dim + channel).flatten()


def _seven(output: Tensor, x: Tensor, value: Tensor | None, weights: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Name the seven tensors; every gradient must be there."""
    made = [output.detach(), x.grad, value, *(weights[role] for role in ("query", "key", "value", "output"))]
    tensors = [tensor for tensor in made if tensor is not None]
    return dict(zip(map(str, TENSORS), tensors, strict=True))


def _autocast(device: torch.device, dtype: torch.dtype | None):
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def _rotated(x: Tensor) -> Tensor:
    """Rotate both halves of the channels of `x [B, H, T, D]` by angles computed in float64."""
    length, dim = x.shape[-2:]
    frequency = BASE ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=x.device) / dim)
    angle = torch.arange(length, dtype=torch.float64, device=x.device)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


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
