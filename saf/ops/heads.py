"""Heads of a tensor `[B, H, T, D]`: picked, joined, and mixed by stored or gathered rows of weights.

Heads are named by tuples of ints, so that nothing is indexed by tensors that the host would have to send.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from saf.ops.positions import CachePosition

MOST_PATTERN_ROWS, MOST_PATTERN_WEIGHTS = 128, 1 << 26
"""Most rows of patterns, and weights in these rows of all heads, in memory at once: 256 MiB in float32. Chosen, not
measured."""


def take_heads(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Return the named heads of `x [B, H, T, D]`: a view when they are consecutive, a copy otherwise."""
    first, last = heads[0], heads[-1]
    if heads == tuple(range(first, last + 1)):
        return x if len(heads) == x.shape[1] else x[:, first : last + 1]
    single = x.unbind(1)
    return torch.stack([single[head] for head in heads], dim=1)


def unit_stride(x: Tensor) -> Tensor:
    """Return `x` with neighbouring channels side by side in memory, a copy where they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def flat_heads(heads: Tensor) -> Tensor:
    """Return `[B, H, T, D]` as `[B, T, H * D]`: nothing to copy for heads stored as `[B, T, H, D]`."""
    return heads.transpose(1, 2).flatten(2)


def heads_like(x: Tensor, heads: int) -> Tensor:
    """Return uninitialised memory like `x [B, ., T, D]` for `heads`, stored as `[B, T, heads, D]`."""
    batch, _, length, dim = x.shape
    return x.new_empty(batch, length, heads, dim).transpose(1, 2)


# --- which value head a slot reads


def live_keys(key: Tensor, live_kv: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """Return the keys that live heads take and the value heads that go with them.

    Grouped when every group has the same size, else one per head.
    """
    used = tuple(sorted(set(live_kv)))
    if live_kv == tuple(sorted(used * (len(live_kv) // len(used)))):
        return key, used
    return take_heads(key, tuple(used.index(head) for head in live_kv)), live_kv


def even_queries(query: Tensor, live_kv: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...] | None]:
    """Return queries `[B, L, Tq, D]` with groups of one size, some queries twice, and which of them are the live heads.

    For few rows that costs next to nothing; keys would have to be copied otherwise. None for groups that are even.
    """
    groups = [[slot for slot, head in enumerate(live_kv) if head == kv] for kv in sorted(set(live_kv))]
    size = max(map(len, groups))
    if all(len(group) == size for group in groups):
        return query, None
    filled = [slot for group in groups for slot in group + group[-1:] * (size - len(group))]
    return take_heads(query, tuple(filled)), tuple(map(filled.index, range(len(live_kv))))


def cached_order(slots: tuple[int, ...], num_frozen: int, linear: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the value heads that `slots` read in the order of a cache of fixed size: those of live slots come first.

    What live heads read is then one view of it, as their keys are. Frozen slots in `linear` read no cache.

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
    by_slot = {slot: one for slots, part in parts for slot, one in zip(slots, part.unbind(1), strict=True)}
    return torch.stack([by_slot[slot] for slot in sorted(by_slot)], dim=2).transpose(1, 2)


def join_heads(*parts: Tensor) -> Tensor:
    """Return live heads `[B, L, T, D]` and then frozen ones `[B, F, T, D]` as one tensor, stored as `[B, T, H, D]`.

    Of one part, that part.
    """
    if len(parts) == 1:
        return parts[0]
    return _Join.apply(*parts) if torch.is_grad_enabled() else _joined(*parts)


def _joined(live: Tensor, frozen: Tensor) -> Tensor:
    return torch.cat([live.transpose(1, 2), frozen.transpose(1, 2)], dim=2).transpose(1, 2)


class _Join(torch.autograd.Function):
    """Give live heads a gradient of their own, in the memory order that attention's output has.

    cuDNN's backward pass takes a graph cached for gradients of another memory order (docs/log.md), so a slice of the
    joint gradient will not do. Frozen heads take one.
    """

    @staticmethod
    def forward(ctx: Any, live: Tensor, frozen: Tensor) -> Tensor:
        ctx.counts = [live.shape[1], frozen.shape[1]]
        return _joined(live, frozen)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        live, frozen = gradients[0].transpose(1, 2).split(ctx.counts, dim=2)
        return live.contiguous().transpose(1, 2), frozen.transpose(1, 2)


# --- products in plain PyTorch


def dense_product(weights: Tensor, value: Tensor) -> Tensor:
    """Return `P V`: `weights [F, >=T, >=T]`, `value [B, F, T, D]` to `[B, F, T, D]`."""
    length = value.shape[-2]
    if not torch.compiler.is_compiling():
        return torch.einsum("fqk,bfkd->bfqd", weights[:, :length, :length], value)
    # Compiled, a copy by index: a slice may be the whole array, which the compiler would make a case of its own.
    at = torch.arange(length, device=value.device)
    return torch.einsum("fqk,bfkd->bfqd", weights[:, at[:, None], at], value)


def pattern_rows(value: Tensor, heads: tuple[int, ...], tables: dict[str, Any], position: CachePosition) -> Tensor:
    """Return rows of `P V` of fixed patterns, `[B, F, count, D]`; slot f reads `heads[f]` of `value [B, H_kv, T, D]`.

    Tables hold `weights [S, T, T]` of the slots in `stored`, and of those in `convolved` `distance`, `key_scale` and
    `row_scale`, exp(rho), exp(alpha) and 1/Z, `[C, T]` each.
    """
    parts = []
    for slots, weights_of in ((tables["stored"], _dense_weights), (tables["convolved"], _compact_weights)):
        if slots:
            read = tuple(heads[slot] for slot in slots)
            parts.append((slots, _row_product(partial(weights_of, tables), value, read, position)))
    return merge_slots(parts)


def _dense_weights(tables: dict[str, Any], query: Tensor, key: Tensor, _: Tensor) -> Tensor:
    return tables["weights"][:, query[:, :, None], key[:, None, :]]


def _compact_weights(tables: dict[str, Any], query: Tensor, key: Tensor, lag: Tensor) -> Tensor:
    """Return `exp(rho(i - j)) exp(alpha(j)) / Z(i)` (Eq. 3)."""
    key_scale, row_scale = tables["key_scale"], tables["row_scale"]
    by_distance = tables["distance"][:, lag].to(row_scale.dtype)[:, None]
    return by_distance * key_scale[:, key][:, :, None] * row_scale[:, query][..., None]


def _row_product(
    weights_of: Callable[[Tensor, Tensor, Tensor], Tensor], value: Tensor, heads: tuple[int, ...],
    position: CachePosition,
) -> Tensor:  # fmt: skip
    """Return rows of `P V`, block by block, so that autograd differentiates them; no value head is copied.

    `weights_of(query, key, lag)` returns weights `[F, B or 1, count, T]` at what `CachePosition.in_pattern` returns.
    """
    parts, most = [], MOST_PATTERN_ROWS
    if not torch.compiler.is_compiling():  # where lengths may be open
        row = len(heads) * value.shape[-2] * (1 if position.left_pad is None else max(1, len(value)))
        most = max(1, min(most, MOST_PATTERN_WEIGHTS // row))
    for block in position.blocks(most):
        *at, seen = block.in_pattern(value.shape[-2], value.device)
        weights = weights_of(*at).transpose(0, 1).masked_fill(~seen[:, None], 0).to(value.dtype)
        parts.append(_weighed(weights, value, heads))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _weighed(weights: Tensor, value: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Return `weights [B or 1, F, n, T]` times the values that slots read: one product, or one a head that is read.

    Values of heads that do not follow one another would be copied for one product.
    """
    if heads == tuple(range(heads[0], heads[-1] + 1)):
        return weights @ take_heads(value, heads)
    parts = []
    for head in sorted(set(heads)):
        slots = tuple(slot for slot, each in enumerate(heads) if each == head)
        flat = take_heads(weights, slots).flatten(1, 2) @ value[:, head]
        parts.append((slots, flat.unflatten(1, (len(slots), -1))))
    return merge_slots(parts)
