"""Heads of tensors `[B, H, T, D]`: how they are picked, grouped, joined, and mixed by stored weights.

Tuples of ints name heads: an index tensor would have to be sent to the device.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def take_heads(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Return the named heads of `x [B, H, T, D]`: a view when they are consecutive, a copy otherwise."""
    first, last = heads[0], heads[-1]
    if heads == tuple(range(first, last + 1)):
        return x if len(heads) == x.shape[1] else x[:, first : last + 1]
    # Not `x[:, list(heads)]`: that would send an index tensor to the device in every call.
    single = x.unbind(1)
    return torch.stack([single[head] for head in heads], dim=1)


def unit_stride(x: Tensor) -> Tensor:
    """Return `x` with unit stride of channels, copied where necessary."""
    return x if x.stride(-1) == 1 else x.contiguous()


def flat_heads(heads: Tensor) -> Tensor:
    """Return `[B, H, T, D]` as `[B, T, H * D]`, without a copy of heads that are stored as `[B, T, H, D]`."""
    return heads.transpose(1, 2).flatten(2)


def heads_like(x: Tensor, heads: int) -> Tensor:
    """Return uninitialised memory like `x [B, ., T, D]` for `heads`, stored as `[B, T, heads, D]`."""
    batch, _, length, dim = x.shape
    return x.new_empty(batch, length, heads, dim).transpose(1, 2)


def cached_order(slots: tuple[int, ...], num_frozen: int, linear: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the value heads that `slots` read in the order of a cache of fixed size: those of live slots come first.

    So the values of live heads are one view of the cache, as their keys are. Frozen slots in `linear` read no cache.

    >>> cached_order((0, 2, 0, 1), num_frozen=2), cached_order((0, 2, 0, 1), num_frozen=2, linear=(1,))
    ((0, 2, 1), (0, 2))
    """
    num_live = len(slots) - num_frozen
    live = sorted(set(slots[:num_live]))
    frozen = {head for slot, head in enumerate(slots[num_live:]) if slot not in linear}
    return (*live, *sorted(frozen - set(live)))


# --- parts of a layer as one tensor


def merge_slots(parts: Iterable[tuple[tuple[int, ...], Tensor]]) -> Tensor:
    """Return one tensor of heads, stored as `[B, T, H, D]`, from parts `(their slots, [B, n, T, D])`."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0][1]
    by_slot: dict[int, Tensor] = {}
    for slots, part in parts:
        by_slot.update(zip(slots, part.unbind(1), strict=True))
    return torch.stack([by_slot[slot] for slot in sorted(by_slot)], dim=2).transpose(1, 2)


def join_heads(*parts: Tensor) -> Tensor:
    """Return live heads `[B, L, T, D]` and then frozen ones `[B, F, T, D]` as one tensor, stored as `[B, T, H, D]`.

    A single part is returned as it is.
    """
    if len(parts) == 1:
        return parts[0]
    # Without gradients no custom function: compilers then see a plain concatenation.
    return _Join.apply(*parts) if torch.is_grad_enabled() else _joined(*parts)


def _joined(live: Tensor, frozen: Tensor) -> Tensor:
    # Joined as [B, T, H, D], so that `flat_heads` copies nothing before the output projection.
    return torch.cat([live.transpose(1, 2), frozen.transpose(1, 2)], dim=2).transpose(1, 2)


class _Join(torch.autograd.Function):
    """Join heads; live heads get a gradient in memory of its own, in the memory order of attention's output.

    A slice of the joint gradient would not do: cuDNN's backward pass may run a graph that it cached for gradients of
    another memory order, and read beyond memory (docs/log.md). Frozen heads take a slice.
    """

    @staticmethod
    def forward(ctx: Any, live: Tensor, frozen: Tensor) -> Tensor:
        ctx.counts = [live.shape[1], frozen.shape[1]]
        return _joined(live, frozen)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        live, frozen = gradients[0].transpose(1, 2).split(ctx.counts, dim=2)
        return live.contiguous().transpose(1, 2), frozen.transpose(1, 2)


def dense_product(weights: Tensor, value: Tensor) -> Tensor:
    """Return `P V`: `weights [F, >=T, >=T]`, `value [B, F, T, D]` to `[B, F, T, D]`."""
    length = value.shape[-2]
    if not torch.compiler.is_compiling():
        return torch.einsum("fqk,bfkd->bfqd", weights[:, :length, :length], value)
    # Compiled, a copy by index: a slice that may be the whole array would compile one more graph.
    at = torch.arange(length, device=value.device)
    return torch.einsum("fqk,bfkd->bfqd", weights[:, at[:, None], at], value)
