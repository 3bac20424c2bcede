"""Attention of a layer with live and frozen heads, and the one place that decides how a call is computed.

`mixed_attention` returns all heads, `attention_parts` live and frozen ones in a tensor each, `attention_products` their
product with the output projection, `frozen_attention` the frozen heads alone. Each checks its call and hands it to
`_compute`, which decides. Few queries or few tokens take one launch for all heads, as does a backend that mixes live
heads too. Otherwise SDPA computes live heads, and frozen heads go to their backend.

`live_kv` and `frozen_kv` name the value head that each live and each frozen slot reads.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saf.errors import InputError, UnsupportedError
from saf.ops.backend import has_tangent
from saf.ops.flash_decode import MOST_ROWS, flash_decode, unsupported_reason
from saf.ops.frozen_heads import BACKENDS, FrozenHeads, FrozenPart
from saf.ops.fused import mix_few
from saf.ops.linear import RecurrentState
from saf.ops.live import FLASH_DECODE, check_kernel, largest_group, live_attention
from saf.ops.tensors import (
    CachePosition,
    cached_order,
    check_left_pad,
    flat_heads,
    join_heads,
    merge_slots,
    take_heads,
    unpadded,
)

# Largest B x T x H * D at which training joins live and frozen heads before the output product. Up to it the host is
# slower than the device (docs/log.md, "Few tokens"): one product and a copy are launched faster than two products.
JOINED = 8192 * 768
# Queries may be the last rows of a longer sequence. Where they are more than one row in so many, the whole product is
# computed and cut; fewer rows take a row of weights each.
WHOLE_SHARE = 4


class Call(NamedTuple):
    """A checked call: its arguments, the value head of every slot, and where its queries stand."""

    query: Tensor
    key: Tensor
    value: Tensor
    frozen: FrozenHeads | None
    live_kv: tuple[int, ...]
    frozen_kv: tuple[int, ...]
    position: CachePosition
    scale: float | None = None
    kernel: str = "auto"
    state: RecurrentState | None = None

    @property
    def whole(self) -> bool:
        """Return whether there is a query for every position."""
        # In a cache of fixed size, which has `visible`, the device alone knows where queries stand.
        return self.position.visible is None and self.position.count == self.value.shape[-2]

    @property
    def plain(self) -> bool:
        """Return whether sequences are whole and unpadded and no kernel is named."""
        return self.whole and self.position.left_pad is None and self.kernel == "auto"


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
    call = _check_call(
        query, key, value, frozen, backend,
        scale=scale, left_pad=left_pad, cache_position=cache_position, kernel=kernel, state=state,
    )  # fmt: skip
    return join_heads(*_compute(call))


def attention_parts(
    query: Tensor, key: Tensor, value: Tensor, frozen: FrozenHeads | None, *, left_pad: Tensor | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return live and frozen heads of `mixed_attention` before they are joined, or all heads, `[B, n, Tq, D]` each."""
    return _compute(_check_call(query, key, value, frozen, left_pad=left_pad, kernel=kernel))


def attention_products(
    query: Tensor, key: Tensor, value: Tensor, frozen: FrozenHeads, projection: Tensor, *,
    left_pad: Tensor | None = None, kernel: str = "auto",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute `mixed_attention` of a layer with frozen heads, and its product with `projection [C, H * D]`.

    Returns one or two terms of that product, `[B, Tq, C]`, in the dtype of `value` or autocast's. Many tokens, and
    calls without gradients, have a term for each of `attention_parts`: then nothing is copied, and attention's backward
    pass sees a gradient in the memory order of its output. Raises as `mixed_attention`.
    """
    parts = attention_parts(query, key, value, frozen, left_pad=left_pad, kernel=kernel)
    widths = [part.shape[1] * part.shape[-1] for part in parts]
    # Without gradients few tokens are one part already (`_one_launch`), and more of them gain nothing by a copy.
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

    `frozen.kv_head` says which value head each frozen slot reads (in order when `H_kv = F`). `rows` is the number of
    queries, at the last positions or those of `cache_position`. Other arguments and errors are those of
    `mixed_attention`.
    """
    _, frozen_kv = _value_heads(frozen, value, backend, cache_position, state, value)
    rows = value.shape[-2] if rows is None else rows
    if not 0 <= rows <= value.shape[-2]:
        raise InputError(f"rows must be 0 to {value.shape[-2]}, the last positions, got {rows}")
    position, no_heads = _position(value, rows, left_pad, cache_position), value[:, :0]
    call = Call(no_heads[:, :, :rows], no_heads, value, frozen, (), frozen_kv, position, state=state)
    return join_heads(*_compute(call))


# --- the decision


def _compute(call: Call) -> tuple[Tensor, ...]:
    """Return all heads in one part, or live and frozen ones in two, `[B, n, Tq, D]`, in slot order."""
    frozen = call.frozen
    parts = [] if frozen is None else frozen.parts(call.value.dtype)
    # 1. Few queries after a cache. With two launches a decoding step at 4K was 0.90x of an ordinary one (docs/log.md).
    if call.state is None and (heads := _flash_decode(call, parts)) is not None:
        return (heads,)
    # 2. No frozen head: ordinary attention, bit for bit.
    if frozen is None:
        return (_live(call, call.value, call.live_kv),)
    # 3. The backend `fused`, or few tokens of another one.
    if call.live_kv and parts and (heads := _one_launch(call, frozen, parts[0])) is not None:
        return (heads,)
    # 4. Live heads by SDPA, frozen heads by their backends.
    live_value, live_kv, frozen_value, frozen_kv = _split_values(call)
    frozen_heads = _frozen(call, frozen, parts, frozen_value, frozen_kv)
    if not live_kv:
        return (frozen_heads,)
    # Frozen heads that decode from a state leave the launch of few queries to the live ones.
    live = None if call.state is None else _flash_decode(call._replace(frozen_kv=()), parts)
    return (_live(call, live_value, live_kv) if live is None else live), frozen_heads


def _flash_decode(call: Call, parts: Sequence[FrozenPart]) -> Tensor | None:
    """Return all heads of few queries from the flash-decoding launch: where it is named, or can serve frozen heads.

    None elsewhere. Raises UnsupportedError where it is named and cannot run.
    """
    named, group = call.kernel == FLASH_DECODE, largest_group(call.live_kv)
    if call.whole or not (named or (call.kernel == "auto" and call.frozen is not None)):
        return None
    if call.position.count * group > MOST_ROWS >= group:  # not few; a larger group is refused below
        return None
    tables = None
    if call.frozen is not None:
        mapped = [part.tables for part in parts if "kv_readers" in part.tables]
        # Any backend's maps do for live slots alone. Frozen slots are summed from one set of tables, so that all of
        # them need one backend, and none may be trained.
        one_backend = len(parts) == 1 and not call.frozen.trainable
        tables = mapped[0] if mapped and (one_backend or not call.frozen_kv) else {}
    operands = call.query, call.key, call.value
    if reason := unsupported_reason(*operands, call.live_kv, tables):
        if named:
            raise UnsupportedError(f"attention kernel {FLASH_DECODE!r} {reason}; or take 'auto'")
        return None
    return flash_decode(*operands, tables, call.position, call.scale, frozen=len(call.frozen_kv) > 0)


def _one_launch(call: Call, frozen: FrozenHeads, part: FrozenPart) -> Tensor | None:
    """Return all heads from one launch of a backend that mixes live heads too, or of few tokens; None elsewhere."""
    value, mixes_live = call.value, part.backend.mixes_live
    if not mixes_live:
        device = value.device.type
        # SDPA would compute in autocast's dtype, this launch in that of the values: few tokens must not change it.
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != value.dtype
        one_backend = len(part.slots) == frozen.num_frozen
        if not (call.plain and one_backend) or torch.is_grad_enabled() or autocast:
            return None
    query, key = call.query.to(value.dtype), call.key.to(value.dtype)  # as autocast does: they may be wider
    # The launch's maps end with the last value head that a slot reads.
    count = max(call.live_kv + call.frozen_kv) + 1
    value = value if count == value.shape[1] else value[:, :count]
    if mixes_live:
        return part.backend.mixed(query, key, value, part.tables, call.scale)
    return mix_few(query, key, value, part.tables, call.scale, replayed=frozen.replayed)


def _split_values(call: Call) -> tuple[Tensor, tuple[int, ...], Tensor, tuple[int, ...]]:
    """Return the values of live and of frozen heads, each with the head that every slot reads.

    Where every value head of whole sequences is read once, in order, each kind takes its part of one split, whose
    gradients are joined once: those of two slices would each be filled up with zeros and added.
    """
    value, live_kv, frozen_kv = call.value, call.live_kv, call.frozen_kv
    if not (live_kv and call.whole) or live_kv + frozen_kv != tuple(range(value.shape[1])):
        return value, live_kv, value, frozen_kv
    parts = value.transpose(1, 2).split([len(live_kv), len(frozen_kv)], dim=2)
    live_value, frozen_value = (part.transpose(1, 2) for part in parts)
    return live_value, live_kv, frozen_value, tuple(range(len(frozen_kv)))


def _live(call: Call, value: Tensor, live_kv: tuple[int, ...]) -> Tensor:
    return live_attention(
        call.query, call.key, value, live_kv=live_kv,
        scale=call.scale, kernel=call.kernel, left_pad=call.position.left_pad, visible=call.position.visible,
    )  # fmt: skip


def _frozen(
    call: Call, frozen: FrozenHeads, parts: Sequence[FrozenPart], value: Tensor, frozen_kv: tuple[int, ...]
) -> Tensor:
    """Return frozen heads, `[B, F, Tq, D]`, of `value`: those of each backend, then the trainable ones.

    Fixed patterns take the whole product, which is then cut, or a row of weights for each of few queries
    (`Backend.rows`).
    """
    position, backend, results = call.position, BACKENDS[frozen.backend], []
    takes_product = _takes_product(call, frozen, value.shape[-2])

    def last_rows(x: Tensor) -> Tensor:
        return x if call.whole else x[:, :, x.shape[2] - position.count :]

    for part in parts:
        heads = tuple(frozen_kv[slot] for slot in part.slots)
        if call.state is not None and part.backend is BACKENDS["linear"]:
            assert frozen.kv_head is not None
            # Not `frozen_kv`, which is -1 where no cache holds what a slot reads: the state has the new rows of every
            # value head, in the layer's own order.
            layer_kv = frozen.kv_head[-frozen.num_frozen :]
            heads = tuple(layer_kv[slot] for slot in part.slots)
            result = call.state.mix(heads, part.tables, position, call.whole)
        elif takes_product:
            result = last_rows(part.backend.forward(take_heads(value, heads), part.tables, position.left_pad))
        else:
            result = part.backend.rows(value, heads, part.tables, position)
        results.append((part.slots, result))
    if frozen.trainable:
        x = take_heads(value, tuple(frozen_kv[slot] for slot in frozen.trainable))
        result = unpadded(lambda x: backend.forward_trainable(x, *frozen.logits()), x, position.left_pad)
        results.append((frozen.trainable, last_rows(result)))
    return merge_slots(results)


def _takes_product(call: Call, frozen: FrozenHeads, length: int) -> bool:
    """Return whether frozen heads of values `[B, ., length, D]` take the whole product, which is then cut."""
    position = call.position
    if call.whole:
        return True
    if position.visible is not None or call.state is not None:
        return False  # a cache of fixed size is not full, and a state stands for values that are gone
    if frozen.trainable or BACKENDS[frozen.backend].mixes_live:
        return True  # neither computes single rows
    # With padding a whole product would move its values first.
    return position.left_pad is None and position.count * WHOLE_SHARE > length


# --- checks


def _check_call(
    query: Tensor, key: Tensor, value: Tensor, frozen: FrozenHeads | None, backend: str = "auto", *,
    scale: float | None = None, left_pad: Tensor | None = None, cache_position: CachePosition | None = None,
    kernel: str = "auto", state: RecurrentState | None = None,
) -> Call:  # fmt: skip
    """Return the call of a layer; raise InputError or UnsupportedError for one that cannot be computed."""
    if frozen is not None:
        live_kv, frozen_kv = _value_heads(frozen, value, backend, cache_position, state, query, key, value)
    elif backend != "auto":
        raise InputError(f"backend {backend!r} would execute frozen heads, and there are none; leave it out")
    else:  # consecutive heads share a value head
        count, heads = query.shape[1], value.shape[1]
        if not heads or not count or count % heads:
            raise InputError(f"query heads must be a multiple of value's {heads}, at least one; got {count}")
        live_kv, frozen_kv = tuple(slot // (count // heads) for slot in range(count)), ()
    if not live_kv:
        key = value[:, :0]  # nothing reads a key: callers may pass any, or one of no heads
    _check_shapes(query, key, value, live_kv)
    check_kernel(kernel)
    position = _position(value, query.shape[-2], left_pad, cache_position)
    call = Call(query, key, value, frozen, live_kv, frozen_kv, position, scale, kernel, state)
    if frozen and live_kv and BACKENDS[frozen.backend].mixes_live and not (call.plain and frozen.kv_head):
        raise UnsupportedError(
            f"backend {frozen.backend!r} takes whole sequences without padding, kernel 'auto', and kv_head in "
            "from_patterns; use backend='toeplitz'"
        )
    return call


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, live_kv: tuple[int, ...]) -> None:
    """Raise InputError unless query `[B, L, Tq, D]`, key `[B, K, T, D]` and value fit together and the live slots."""
    q, k, v = query.shape, key.shape, value.shape  # read once: every call passes here, and each access costs the host
    if not len(q) == len(k) == len(v) == 4:
        problem = "must be [batch, heads, positions, head_dim]"
    elif not q[0] == k[0] == v[0] or not q[3] == k[3] == v[3]:
        problem = "need the same batch and head_dim"
    elif k[2] != v[2] or q[2] > v[2] or not v[2]:
        problem = "need the same positions, at least one, queries the last of them"
    elif q[1] != len(live_kv) or k[1] != len(set(live_kv)):
        problem = (
            f"do not fit the frozen heads: query must have the {len(live_kv)} live heads alone, key their "
            f"{len(set(live_kv))} KV heads; where heads share KV heads, pass kv_head to from_patterns"
        )
    elif not query.dtype == key.dtype == value.dtype and not torch.is_autocast_enabled(value.device.type):
        raise InputError(f"query, key and value need the same dtype, got {query.dtype}, {key.dtype}, {value.dtype}")
    else:
        return
    raise InputError(f"query, key and value {problem}, got {tuple(q)}, {tuple(k)}, {tuple(v)}")


def _position(value: Tensor, rows: int, left_pad: Tensor | None, cache_position: CachePosition | None) -> CachePosition:
    """Return where the queries stand: the last `rows` positions without a cache of fixed size."""
    if left_pad is not None:
        check_left_pad(left_pad, value.shape[0], value.shape[2])
        if cache_position is not None:
            raise InputError("cache_position includes padding; leave left_pad out")
        left_pad = left_pad.to(value.device).contiguous()  # as kernels read it
    if cache_position is None:
        return CachePosition(value.shape[-2] - rows, rows, left_pad)
    return cache_position._replace(count=rows)


def _value_heads(
    frozen: FrozenHeads, value: Tensor, backend: str, cache_position: CachePosition | None,
    state: RecurrentState | None, *operands: Tensor,
) -> tuple[tuple[int, ...], tuple[int, ...]]:  # fmt: skip
    """Return which head of `value` each live and each frozen slot reads; -1 for slots that decode from a state.

    A cache of fixed size, and values that a state complements, have their heads in `cached_order`. Raises InputError
    or UnsupportedError for values, a backend or a cache that frozen heads cannot take.
    """
    frozen.check_values(value, backend)
    executor, kv_head, num_frozen = BACKENDS[frozen.backend], frozen.kv_head, frozen.num_frozen
    if not executor.in_autograd and has_tangent(*operands):
        raise UnsupportedError("frozen heads have no derivatives in forward mode; use backend='reference'")
    if state is not None and torch.is_grad_enabled() and state.value.requires_grad:
        raise UnsupportedError("decoding from a recurrent state gives no gradients: call under torch.no_grad()")
    if cache_position is not None and state is None and (frozen.trainable or executor.mixes_live):
        why = "patterns that are trained" if frozen.trainable else f"backend {frozen.backend!r}"
        raise UnsupportedError(f"{why} cannot go on from a cache of fixed size; use one that grows")
    if kv_head is None:  # slots and value heads correspond one to one, in order
        assert state is None, "frozen heads with a recurrent state need kv_head"
        kv_head = tuple(range(value.shape[1]))
    if state is not None or cache_position is not None:
        order = cached_order(kv_head, num_frozen, () if state is None else frozen.linear)
        kv_head = tuple(order.index(head) if head in order else -1 for head in kv_head)
    # num_frozen is at least 1, as FrozenHeads has at least one pattern: with 0 the slices would be exchanged.
    live_kv, frozen_kv = kv_head[:-num_frozen], kv_head[-num_frozen:]
    if len(kv_head) < num_frozen or max(kv_head) >= value.shape[1]:
        raise InputError(f"frozen slots read value heads {frozen_kv}; value has {value.shape[1]}")
    return live_kv, frozen_kv
