"""Attention of a layer with live and frozen heads, and the one place that decides how a call is computed.

`mixed_attention` returns all heads, `attention_parts` live and frozen ones in a tensor each, `attention_products` their
product with the output projection, `frozen_attention` the frozen heads alone. `_compute` decides: one launch for all
heads, where queries or tokens are few or a backend mixes live heads too; otherwise live heads by SDPA and frozen heads
by their backend. The gradients are listed in saf/ops/__init__.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saf.errors import InputError, UnsupportedError
from saf.ops.decode.op import MOST_ROWS, flash_decode, largest_group, unsupported_reason
from saf.ops.frozen_heads import BACKENDS, FrozenHeads, FrozenPart
from saf.ops.fused.op import mix_few
from saf.ops.heads import cached_order, even_queries, flat_heads, join_heads, live_keys, merge_slots, take_heads
from saf.ops.linear.op import RecurrentState
from saf.ops.live import FLASH_DECODE, check_kernel, live_attention
from saf.ops.operator import has_tangent
from saf.ops.positions import CachePosition, check_left_pad, unpadded

JOINED = 8192 * 768
"""Size B x T x H * D up to which training joins live and frozen heads before the output product.

One product and a copy then cost less than two products, whose launches outweigh their work (docs/log.md).
"""
WHOLE_SHARE = 4
"""The whole product is computed and cut where more than one row in so many is needed; fewer make rows of weights."""


class Call(NamedTuple):
    """A checked call: its arguments, the value head of each live and each frozen slot, and where its queries stand."""

    query: Tensor
    key: Tensor
    value: Tensor
    frozen: FrozenHeads | None
    live_slots: tuple[int, ...]
    frozen_slots: tuple[int, ...]
    position: CachePosition
    scale: float | None = None
    kernel: str = "auto"
    state: RecurrentState | None = None

    @property
    def whole(self) -> bool:
        """Return whether there is a query for every position."""
        return self.position.visible is None and self.position.count == self.value.shape[-2]


def mixed_attention(
    query: Tensor, key: Tensor, value: Tensor, frozen: FrozenHeads | None, *, scale: float | None = None,
    backend: str = "auto", left_pad: Tensor | None = None, cache_position: CachePosition | None = None,
    kernel: str = "auto", state: RecurrentState | None = None,
) -> Tensor:  # fmt: skip
    """Compute the attention of one layer whose heads are partly frozen, in slot order: live heads first.

    Args:
        query: `[B, L, Tq, D]`, the live heads only; the last `Tq` of `T` positions.
        key: `[B, K, T, D]`, ascending, only the KV heads that some live head uses.
        value: `[B, H_kv, T, D]`, every value head.
        frozen: The `F` frozen heads, or None for ordinary attention.
        scale: Score scale of live heads; `1/sqrt(D)` by default.
        backend: `"auto"` or the name of the backend that `frozen` was prepared for.
        left_pad: `[B]` first real position of each row; outputs before it are zero.
        cache_position: Where queries stand among the T positions of a cache of fixed size, instead of `left_pad`;
            `value` has its heads in `cached_order` then, and outputs of padding may be anything finite.
        kernel: SDPA kernel of live heads: `"auto"`, `"cudnn"`, `"flash"`, `"efficient"`, `"math"`. Or `"flash_decode"`
            for few queries after a cache, live and frozen heads in one launch, which `"auto"` takes for layers with
            frozen heads where it can run.
        state: Of frozen heads with exponential patterns (`frozen.linear`), changed in place. `value` then has, in
            `cached_order`, only the heads that others read.

    Returns:
        `[B, L + F, Tq, D]`.

    Raises:
        InputError: Shapes that do not fit, inputs longer than the patterns, another backend than prepared, or one where
            no head is frozen.
        UnsupportedError: Backend `fused` with padding, a shorter query or a kernel; a kernel that cannot run here; a
            cache of fixed size with patterns that are trained.
    """
    options = {"scale": scale, "left_pad": left_pad, "cache_position": cache_position, "kernel": kernel, "state": state}
    return join_heads(*_compute(_checked(query, key, value, frozen, backend, **options)))


def attention_parts(
    query: Tensor, key: Tensor, value: Tensor, frozen: FrozenHeads | None, *, left_pad: Tensor | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute `mixed_attention` as it is computed: live heads, then frozen ones, or all in one part; nothing is copied.

    Returns parts `[B, n, Tq, D]` in slot order; raises as `mixed_attention`.
    """
    return _compute(_checked(query, key, value, frozen, left_pad=left_pad, kernel=kernel))


def attention_products(
    query: Tensor, key: Tensor, value: Tensor, frozen: FrozenHeads, projection: Tensor, *,
    left_pad: Tensor | None = None, kernel: str = "auto",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute `mixed_attention` of a layer with frozen heads, and its product with `projection [C, H * D]`.

    Returns one or two products `[B, Tq, C]`, in the dtype of `value` or autocast's, whose sum it is; raises as
    `mixed_attention`. Many tokens, and calls without gradients, have a product for each part: then nothing is copied,
    and attention's backward pass sees a gradient in the memory order of its output.
    """
    parts = attention_parts(query, key, value, frozen, left_pad=left_pad, kernel=kernel)
    widths = [part.shape[1] * part.shape[-1] for part in parts]
    if projection.ndim != 2 or projection.shape[1] != sum(widths):
        raise InputError(f"projection must be [C, {sum(widths)}], columns slot by slot; got {list(projection.shape)}")
    if torch.is_grad_enabled() and sum(part.numel() for part in parts) <= JOINED:
        parts, widths = (join_heads(*parts),), [sum(widths)]
    # Cast once: autocast would cast the columns of each part by themselves.
    columns = projection.to(value.dtype).split(widths, dim=1)
    return tuple(F.linear(flat_heads(part), weight) for part, weight in zip(parts, columns, strict=True))


def summed(products: Sequence[Tensor]) -> Tensor:
    """Return the sum of one or two products."""
    return products[0] if len(products) == 1 else products[0] + products[1]


def frozen_attention(
    value: Tensor, frozen: FrozenHeads, *, backend: str = "auto", left_pad: Tensor | None = None,
    cache_position: CachePosition | None = None, rows: int | None = None, state: RecurrentState | None = None,
) -> Tensor:  # fmt: skip
    """Compute the frozen heads alone, `P V` (Eq. 3): `value [B, H_kv, T, D]` to `[B, F, T, D]`.

    `frozen.kv_head` says which value head each frozen slot reads (in order when `H_kv = F`); `rows` keeps the
    last positions only; `left_pad`, `cache_position` and `state` are as in `mixed_attention`, and with these two
    `rows` says how many queries there are. Raises as `mixed_attention` does.
    """
    slots = _slots(frozen, value, backend, cache_position, state, value)[-frozen.num_frozen :]
    rows = value.shape[-2] if rows is None else rows
    if not 0 <= rows <= value.shape[-2]:
        raise InputError(f"rows must be 0 to {value.shape[-2]}, the last positions, got {rows}")
    position, none = _position(value, rows, left_pad, cache_position), value[:, :0]
    return join_heads(*_compute(Call(none[:, :, :rows], none, value, frozen, (), slots, position, state=state)))


def live_heads(query: Tensor, key: Tensor, value: Tensor, slots: tuple[int, ...], **options: Any) -> Tensor:
    """Return `live_attention` of live slots, `[B, L, Tq, D]`: `key [B, K, T, D]` of the value heads that they read.

    Uneven groups take expanded keys where sequences are whole; of fewer rows some queries are computed twice instead,
    and no keys are copied. `options` are those of `live_attention`.
    """
    if query.shape[-2] == key.shape[-2]:
        key, read = live_keys(key, slots)
        return live_attention(query, key, take_heads(value, read), **options)
    even, own = even_queries(query, slots)
    mixed = live_attention(even, key, take_heads(value, tuple(sorted(set(slots)))), **options)
    return mixed if own is None else take_heads(mixed, own)


# --- the decision


def _compute(call: Call) -> tuple[Tensor, ...]:
    """Return all heads in one part, or live and frozen ones in two, `[B, n, Tq, D]`, in slot order."""
    frozen, fixed = call.frozen, [] if call.frozen is None else call.frozen.parts(call.value.dtype)
    if call.state is None and (heads := _flash_decode(call, fixed)) is not None:
        return (heads,)
    if frozen is None:
        return (_live(call, call.value, call.live_slots),)
    if call.live_slots and fixed and (heads := _in_one_launch(call, frozen, fixed[0])) is not None:
        return (heads,)
    live_value, live_slots, value, slots = _values(call)
    mixed = _frozen(call, frozen, fixed, value, slots)
    if not live_slots:
        return (mixed,)
    live = None if call.state is None else _flash_decode(call._replace(frozen_slots=()), fixed)
    return (_live(call, live_value, live_slots) if live is None else live), mixed


def _flash_decode(call: Call, fixed: Sequence[FrozenPart]) -> Tensor | None:
    """Return all heads of few queries from the flash-decoding launch: where it is named, or can serve frozen heads.

    None elsewhere. Raises UnsupportedError where it is named and cannot run.
    """
    named, group = call.kernel == FLASH_DECODE, largest_group(call.live_slots)
    if call.whole or not (named or (call.kernel == "auto" and call.frozen is not None)):
        return None
    if call.position.count * group > MOST_ROWS >= group:  # not few
        return None
    # Maps of live slots are in the tables of any backend that has them; frozen slots need one backend for all.
    tables = ([part.tables for part in fixed if "frozen_read" in part.tables] or [{}])[0]
    if call.frozen_slots and (len(fixed) > 1 or (call.frozen and call.frozen.trainable)):
        tables = {}
    args = call.query, call.key, call.value, call.live_slots, call.frozen_slots, tables
    if reason := unsupported_reason(*args):
        if named:
            raise UnsupportedError(f"attention kernel {FLASH_DECODE!r} {reason}; or take 'auto'")
        return None
    return flash_decode(*args, call.position, call.scale)


def _in_one_launch(call: Call, frozen: FrozenHeads, fixed: FrozenPart) -> Tensor | None:
    """Return all heads from one launch of a backend that mixes live heads too, or of few tokens; None elsewhere."""
    backend, tables, value = fixed.backend, fixed.tables, call.value
    if not backend.mixes_live:
        device = value.device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != value.dtype
        plain = call.whole and call.position.left_pad is None and call.kernel == "auto"
        if not plain or len(fixed.slots) != frozen.num_frozen or torch.is_grad_enabled() or autocast:
            return None
    query, key = call.query.to(value.dtype), call.key.to(value.dtype)  # as autocast does: they may be wider
    # The maps of the launch know of no value heads behind the last one that is read.
    count = max(call.live_slots + call.frozen_slots) + 1
    value = value if count == value.shape[1] else value[:, :count]
    if backend.mixes_live:
        return backend.mixed(query, key, value, tables, call.scale)
    return mix_few(query, key, value, tables, call.scale, replayed=frozen.replayed)


def _values(call: Call) -> tuple[Tensor, tuple[int, ...], Tensor, tuple[int, ...]]:
    """Return the values of live and of frozen heads, each with the head that every slot reads.

    Where every value head of whole sequences is read once, in order, each kind takes its part of one split, whose
    gradients are joined once: those of two slices would each be filled up with zeros and added.
    """
    value, live, frozen = call.value, call.live_slots, call.frozen_slots
    if not (live and call.whole) or live + frozen != tuple(range(value.shape[1])):
        return value, live, value, frozen
    parts = value.transpose(1, 2).split([len(live), len(frozen)], dim=2)
    live_value, frozen_value = (part.transpose(1, 2) for part in parts)
    return live_value, live, frozen_value, tuple(range(len(frozen)))


def _live(call: Call, value: Tensor, slots: tuple[int, ...]) -> Tensor:
    options = {"scale": call.scale, "left_pad": call.position.left_pad, "visible": call.position.visible}
    return live_heads(call.query, call.key, value, slots, **options, kernel=call.kernel)


def _frozen(
    call: Call, frozen: FrozenHeads, fixed: Sequence[FrozenPart], value: Tensor, slots: tuple[int, ...]
) -> Tensor:
    """Return frozen heads, `[B, F, Tq, D]`, of `value`: those of each backend, then the trainable ones.

    Few queries take rows of weights, in plain PyTorch, which autograd differentiates; so do padded ones, whose values a
    whole product would move first. Otherwise the whole product is computed and cut.
    """
    position, length, backend = call.position, value.shape[-2], BACKENDS[frozen.backend]
    few = position.left_pad is not None or position.count * WHOLE_SHARE <= length
    whole_product = call.whole or (
        position.visible is None and call.state is None and (not few or backend.mixes_live or bool(frozen.trainable))
    )
    parts = []

    def last(mixed: Tensor) -> Tensor:
        return mixed if call.whole else mixed[:, :, length - position.count :]

    for part in fixed:
        read = tuple(slots[slot] for slot in part.slots)
        if call.state is not None and part.backend is BACKENDS["linear"]:
            assert frozen.kv_head is not None
            own = tuple(frozen.kv_head[slot - frozen.num_frozen] for slot in part.slots)
            mixed = call.state.mix(own, part.tables, position, call.whole)
        elif whole_product:
            mixed = last(part.backend.forward(value, read, part.tables, position.left_pad))
        else:
            mixed = part.backend.rows(value, read, part.tables, position)
        parts.append((part.slots, mixed))
    if frozen.trainable:
        own = take_heads(value, tuple(slots[slot] for slot in frozen.trainable))
        mixed = unpadded(lambda x: backend.forward_trainable(x, *frozen.logits()), own, position.left_pad)
        parts.append((frozen.trainable, last(mixed)))
    return merge_slots(parts)


# --- checks


def _checked(
    query: Tensor, key: Tensor, value: Tensor, frozen: FrozenHeads | None, backend: str = "auto", *,
    scale: float | None = None, left_pad: Tensor | None = None, cache_position: CachePosition | None = None,
    kernel: str = "auto", state: RecurrentState | None = None,
) -> Call:  # fmt: skip
    """Return the call of a layer; raise InputError or UnsupportedError for one that cannot be computed."""
    if frozen is not None:
        slots = _slots(frozen, value, backend, cache_position, state, query, key, value)
        live, own = slots[: -frozen.num_frozen], slots[-frozen.num_frozen :]
    elif backend != "auto":
        raise InputError(f"backend {backend!r} would execute frozen heads, and there are none; leave it out")
    else:  # consecutive heads share a value head
        count, heads = query.shape[1], value.shape[1]
        if not heads or not count or count % heads:
            raise InputError(f"query heads must be a multiple of value's {heads}, at least one; got {count}")
        live, own = tuple(slot // (count // heads) for slot in range(count)), ()
    _check_shapes(query, key, value, live)
    check_kernel(kernel)
    position = _position(value, query.shape[-2], left_pad, cache_position)
    call = Call(query, key, value, frozen, live, own, position, scale, kernel, state)
    plain = left_pad is None and call.whole and kernel == "auto"
    if frozen and live and BACKENDS[frozen.backend].mixes_live and not (plain and frozen.kv_head):
        raise UnsupportedError(
            f"backend {frozen.backend!r} takes whole sequences without padding, kernel 'auto', and kv_head in "
            "from_patterns; use backend='toeplitz'"
        )
    return call


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, live_slots: tuple[int, ...]) -> None:
    """Raise InputError unless query `[B, L, Tq, D]`, key `[B, K, T, D]` and value fit together and the live slots."""
    key = key if live_slots else value[:, :0]
    q, k, v = query.shape, key.shape, value.shape  # read once: each costs the host
    if not len(q) == len(k) == len(v) == 4:
        problem = "must be [batch, heads, positions, head_dim]"
    elif not q[0] == k[0] == v[0] or not q[3] == k[3] == v[3]:
        problem = "need the same batch and head_dim"
    elif k[2] != v[2] or q[2] > v[2] or not v[2]:
        problem = "need the same positions, at least one, queries the last of them"
    elif q[1] != len(live_slots) or k[1] != len(set(live_slots)):
        problem = f"need {len(live_slots)} live heads of {len(set(live_slots))} KV heads; pass kv_head to from_patterns"
    elif not query.dtype == key.dtype == value.dtype and not torch.is_autocast_enabled(value.device.type):
        problem = f"need the same dtype, got {query.dtype}, {key.dtype}, {value.dtype}"
    else:
        return
    raise InputError(f"query, key and value {problem}, got {tuple(q)}, {tuple(k)}, {tuple(v)}")


def _position(value: Tensor, rows: int, left_pad: Tensor | None, cache_position: CachePosition | None) -> CachePosition:
    """Return where the queries stand: the last `rows` positions without a cache of fixed size.

    `left_pad` moves to the values' device, contiguous, as kernels read it.
    """
    if left_pad is not None:
        check_left_pad(left_pad, value.shape[0], value.shape[2])
        if cache_position is not None:
            raise InputError("cache_position includes padding; leave left_pad out")
        left_pad = left_pad.to(value.device).contiguous()
    if cache_position is None:
        return CachePosition(value.shape[-2] - rows, rows, left_pad)
    return cache_position._replace(count=rows)


def _slots(
    frozen: FrozenHeads, value: Tensor, backend: str, cache_position: CachePosition | None,
    state: RecurrentState | None, *operands: Tensor,
) -> tuple[int, ...]:  # fmt: skip
    """Return which head of `value` each slot reads, live ones first; -1 for slots that decode from a state.

    A cache of fixed size, and values that a state complements, have their heads in `cached_order`. Raises InputError
    or UnsupportedError for values, a backend or a cache that frozen heads cannot take.
    """
    frozen.check_values(value, backend)
    own, heads = BACKENDS[frozen.backend], frozen.kv_head
    if not own.in_autograd and has_tangent(*operands):
        raise UnsupportedError("frozen heads have no derivatives in forward mode; use backend='reference'")
    if state is not None and torch.is_grad_enabled() and state.value.requires_grad:
        raise UnsupportedError("decoding from a recurrent state gives no gradients: call under torch.no_grad()")
    if cache_position is not None and state is None and (frozen.trainable or own.mixes_live):
        why = "patterns that are trained" if frozen.trainable else f"backend {frozen.backend!r}"
        raise UnsupportedError(f"{why} cannot go on from a cache of fixed size; use one that grows")
    if heads is None:  # one to one
        if state is not None:
            raise InputError("frozen heads with a recurrent state need kv_head; pass it to FrozenHeads.from_patterns")
        heads = tuple(range(value.shape[1]))
    if state is not None or cache_position is not None:
        order = cached_order(heads, frozen.num_frozen, () if state is None else frozen.linear)
        heads = tuple(order.index(head) if head in order else -1 for head in heads)
    if len(heads) < frozen.num_frozen or max(heads) >= value.shape[1]:
        raise InputError(f"frozen slots read value heads {heads[-frozen.num_frozen :]}; value has {value.shape[1]}")
    return heads
