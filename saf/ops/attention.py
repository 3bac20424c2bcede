"""The seam: attention of a layer with live and frozen heads, and the one place that decides how a call is computed.

`mixed_attention` returns all heads, `split_attention` live and frozen ones apart, `attention_products` their product
with the output projection, `frozen_attention` the frozen heads alone. `_heads_of` decides: flash decoding; ordinary
attention; one launch of a backend for all heads; rows of patterns for few queries after a cache; otherwise live heads
by SDPA and frozen heads by their backend's product.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saf.errors import InputError, UnsupportedError, shown
from saf.ops.backends import BACKENDS
from saf.ops.decode.op import MOST_ROWS, flash_decode, largest_group, unsupported_reason
from saf.ops.frozen_heads import FrozenHeads
from saf.ops.fused.op import mix_few
from saf.ops.heads import (
    cached_order,
    even_queries,
    flat_heads,
    join_heads,
    live_keys,
    live_value_heads,
    merge_slots,
    read_heads,
    take_heads,
)
from saf.ops.linear.op import Linear
from saf.ops.linear.recurrent import RecurrentState
from saf.ops.live import FLASH_DECODE, check_kernel, live_attention
from saf.ops.operator import forbid_forward_mode
from saf.ops.positions import CachePosition, QueryRows, check_left_pad, check_positions, shift_rows

JOINED = 8192 * 768
"""Size B x T x H * D up to which training joins live and frozen heads before the output product.

One product and a copy then cost less than two products, whose launches outweigh their work (docs/log.md).
"""
WHOLE_SHARE = 4
"""The whole product is computed and cut where more than one row in so many is needed; fewer make rows of weights."""

# Not from BACKENDS, whose values are of type `Backend`: this class alone has `recur`, for recurrent states.
LINEAR = Linear()


class Call(NamedTuple):
    """A checked call of `mixed_attention`, its arguments, and the value head of each live and each frozen slot."""

    query: Tensor
    key: Tensor
    value: Tensor
    frozen: FrozenHeads | None
    live_slots: tuple[int, ...]
    frozen_slots: tuple[int, ...]
    scale: float | None = None
    left_pad: Tensor | None = None
    cache_position: CachePosition | None = None
    kernel: str = "auto"
    state: RecurrentState | None = None

    @property
    def rows(self) -> QueryRows:
        """Return which rows of patterns the queries are."""
        count = self.query.shape[-2]
        if self.cache_position is not None:
            return QueryRows(self.cache_position.first, count, self.cache_position.left_pad)
        return QueryRows(self.value.shape[-2] - count, count, self.left_pad)

    @property
    def whole(self) -> bool:
        """Return whether there is a query for every position."""
        return self.cache_position is None and self.query.shape[-2] == self.value.shape[-2]


def mixed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    frozen: FrozenHeads | None,
    *,
    scale: float | None = None,
    backend: str = "auto",
    left_pad: Tensor | None = None,
    cache_position: CachePosition | None = None,
    kernel: str = "auto",
    state: RecurrentState | None = None,
) -> Tensor:
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
        kernel: SDPA kernel of live heads: `"auto"`, `"cudnn"`, `"flash"`, `"efficient"`, `"math"`; `"fa3"` or `"fa4"`
            where the package is installed; `"flash_decode"` for few queries after a cache, frozen heads in the same
            launch, which `"auto"` takes beside frozen heads where it can run.
        state: Of frozen heads with exponential patterns (`frozen.linear`), changed in place. `value` then has, in
            `cached_order`, only the heads that others read.

    Returns:
        `[B, L + F, Tq, D]`.

    Raises:
        InputError: Shapes that do not fit, inputs longer than the patterns, another backend than prepared, or one where
            no head is frozen.
        UnsupportedError: A backend that computes live heads itself (`fused`) with padding, a shorter query or a kernel
            of theirs; a kernel that cannot run here; a cache of fixed size with patterns that are trained.
    """
    call = _checked(query, key, value, frozen, backend, scale, left_pad, cache_position, kernel, state)
    parts = _heads_of(call)
    return parts[0] if len(parts) == 1 else join_heads(*parts)


def split_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    frozen: FrozenHeads | None,
    *,
    left_pad: Tensor | None = None,
    kernel: str = "auto",
) -> tuple[Tensor | None, Tensor | None]:
    """Compute `mixed_attention` with live `[B, L, Tq, D]` and frozen `[B, F, Tq, D]` outputs apart (None when empty).

    Where both are projected apart, nothing is copied together. Raises as `mixed_attention` does.
    """
    call = _checked(query, key, value, frozen, left_pad=left_pad, kernel=kernel)
    parts, num_live = _heads_of(call), len(call.live_slots)
    if len(parts) == 2:
        return parts[0], parts[1]
    if frozen is None:
        return parts[0], None
    return (parts[0][:, :num_live], parts[0][:, num_live:]) if num_live else (None, parts[0])


def attention_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    frozen: FrozenHeads,
    projection: Tensor,
    *,
    left_pad: Tensor | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, ...]:
    """Compute `mixed_attention` of a layer with frozen heads, and its product with `projection [C, H * D]`.

    Returns one or two products `[B, Tq, C]`, in the dtype of `value`, or autocast's, whose sum it is, for whoever adds
    more to it; raises as `mixed_attention` does.
    """
    call = _checked(query, key, value, frozen, left_pad=left_pad, kernel=kernel)
    width = (len(call.live_slots) + frozen.num_frozen) * value.shape[-1]
    if projection.ndim != 2 or projection.shape[1] != width:
        raise InputError(f"projection must be [C, {width}], columns slot by slot; got {list(projection.shape)}")
    # Cast once: autocast would cast the columns of either part by themselves.
    return project_parts(_heads_of(call), projection.to(value.dtype))


def summed(products: Sequence[Tensor]) -> Tensor:
    """Return the sum of one or two products."""
    return products[0] if len(products) == 1 else products[0] + products[1]


def project_parts(parts: Sequence[Tensor], projection: Tensor) -> tuple[Tensor, ...]:
    """Project heads that come in parts `[B, n, T, D]`, in slot order, by `projection [C, H * D]`: `[B, T, C]` each.

    The sum is the layer's output. Of many tokens, and without gradients, each part has a product of its own: nothing is
    copied together then, and attention's backward pass sees a gradient in the memory order of its output.
    """
    if len(parts) == 2 and torch.is_grad_enabled() and sum(part.numel() for part in parts) <= JOINED:
        parts = [join_heads(*parts)]
    columns = projection.split([part.shape[1] * part.shape[-1] for part in parts], dim=1)
    return tuple(F.linear(flat_heads(part), own) for part, own in zip(parts, columns, strict=True))


def frozen_attention(
    value: Tensor,
    frozen: FrozenHeads,
    *,
    backend: str = "auto",
    left_pad: Tensor | None = None,
    cache_position: CachePosition | None = None,
    rows: int | None = None,
    state: RecurrentState | None = None,
) -> Tensor:
    """Compute the frozen heads alone, `P V` (Eq. 3): `value [B, H_kv, T, D]` to `[B, F, T, D]`.

    `frozen.kv_head` says which value head each frozen slot reads (in order when `H_kv = F`); `rows` keeps the
    last positions only; `left_pad`, `cache_position` and `state` are as in `mixed_attention`, and with these two
    `rows` says how many queries there are. Raises as `mixed_attention` does.
    """
    left_pad = _checked_padding(value, left_pad, cache_position)
    slots = _checked_frozen(value, frozen, backend, cache_position, state)
    rows = value.shape[-2] if rows is None else rows
    if not 0 <= rows <= value.shape[-2]:
        raise InputError(f"rows must be 0 to {value.shape[-2]}, the last positions, got {rows}")
    none = value[:, :0]
    call = Call(none[:, :, :rows], none, value, frozen, (), slots, None, left_pad, cache_position, state=state)
    return _heads_of(call)[0]


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


def _heads_of(call: Call) -> tuple[Tensor, ...]:
    """Return all heads in one part, or live and frozen ones in two, `[B, n, Tq, D]`, in slot order."""
    if call.state is not None:
        return (_decode_from_state(call),)
    frozen, value, slots = call.frozen, call.value, call.frozen_slots
    tables = None if frozen is None else frozen.tables(value.dtype)
    if _decodes_by_kernel(call, tables):
        args = (call.query, call.key, value, call.live_slots, slots, tables or {}, call.rows, call.scale)
        return (flash_decode(*args),)
    if frozen is None or tables is None:
        return (_live(call),)
    backend = BACKENDS[frozen.backend]
    if call.live_slots and (backend.mixes_live or _one_launch_serves(call)):
        read = read_heads(value, call.live_slots, slots)
        query, key = call.query.to(value.dtype), call.key.to(value.dtype)  # as autocast does: they may be wider
        if backend.mixes_live:
            return (backend.mixed(query, key, read, tables, call.scale),)
        heads = mix_few(query, key, read, tables, call.scale, replayed=frozen.replayed)
        if heads is not None:
            return (heads,)
    count, length = call.query.shape[-2], value.shape[-2]
    # Few rows: weights are made and multiplied in plain PyTorch, which autograd differentiates. A whole product is cut
    # afterwards, and of padded rows it would have to move their values first.
    few = not call.whole and (call.left_pad is not None or count * WHOLE_SHARE <= length)
    if call.cache_position is not None or (few and backend.decodes and not frozen.trainable):
        mixed = backend.rows(value, slots, tables, call.rows)
        return (join_heads(_live(call), mixed),) if call.live_slots else (mixed,)
    if call.live_slots and call.whole:
        live, value, slots = _attend_whole(call)
        return live, _mix(value, slots, frozen, call.left_pad)
    mixed = _mix(value, slots, frozen, call.left_pad)[:, :, length - count :]
    return (_live(call), mixed) if call.live_slots else (mixed,)


def _decode_from_state(call: Call) -> Tensor:
    """Return all heads `[B, L + F, Tq, D]` of a layer whose heads with exponential patterns go on from a state."""
    frozen, state = call.frozen, call.state
    assert frozen is not None
    assert state is not None
    if torch.is_grad_enabled() and state.value.requires_grad:
        raise UnsupportedError("decoding from a recurrent state gives no gradients: call under torch.no_grad()")
    tables = frozen.tables(call.value.dtype)
    mixed = LINEAR.recur(state, call.value, call.frozen_slots, tables, call.rows, call.whole)
    if not call.live_slots:
        return mixed
    alone, maps = call._replace(frozen_slots=()), {name: tables[name] for name in tables if name.startswith("row_live")}
    if _decodes_by_kernel(alone, None):
        args = (call.query, call.key, call.value, call.live_slots, (), maps, call.rows, call.scale)
        return join_heads(flash_decode(*args), mixed)
    return join_heads(_live(call), mixed)


def _decodes_by_kernel(call: Call, tables: dict[str, Any] | None) -> bool:
    """Return whether a call of few queries takes the flash-decoding launch: named, or with frozen heads it can serve.

    Raises UnsupportedError where it is named and cannot run: a setting without effect would go unnoticed.
    """
    named = call.kernel == FLASH_DECODE
    if call.whole or not (named or (call.kernel == "auto" and call.frozen is not None)):
        return False
    group = largest_group(call.live_slots)
    if call.query.shape[-2] * group > MOST_ROWS >= group:  # not few
        return False
    trained = call.frozen is not None and bool(call.frozen.trainable)
    reason = unsupported_reason(call.query, call.key, call.value, call.live_slots, {} if trained else tables)
    if named and reason:
        raise UnsupportedError(f"attention kernel {FLASH_DECODE!r} {reason}; or take 'auto'")
    return reason is None


def _one_launch_serves(call: Call) -> bool:
    """Return whether all heads may be computed by `mix_few`: whole sequences of values that autocast leaves as is."""
    device = call.value.device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != call.value.dtype
    plain = call.whole and call.left_pad is None and call.kernel == "auto"
    return plain and not (call.frozen and call.frozen.trainable) and not torch.is_grad_enabled() and not autocast


def _live(call: Call) -> Tensor:
    """Return live heads, `[B, L, Tq, D]`."""
    visible = None if call.cache_position is None else call.cache_position.visible
    options = {"scale": call.scale, "left_pad": call.left_pad, "visible": visible, "kernel": call.kernel}
    return live_heads(call.query, call.key, call.value, call.live_slots, **options)


def _attend_whole(call: Call) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Return live heads `[B, L, T, D]`, the values that frozen heads mix, and which of them each frozen slot reads.

    Where every value head is read once, in order, both kinds take a part whose gradients are joined once: those of two
    slices would each be filled up with zeros and added.
    """
    key, slots = live_keys(call.key, call.live_slots)
    value, own = call.value, call.frozen_slots
    live_value = frozen_value = None
    if slots + own == tuple(range(value.shape[1])):
        parts = value.transpose(1, 2).split([len(slots), len(own)], dim=2)
        live_value, frozen_value = (part.transpose(1, 2) for part in parts)
        own = tuple(range(len(own)))
    else:
        live_value, frozen_value = take_heads(value, slots), value
    options = {"scale": call.scale, "left_pad": call.left_pad, "kernel": call.kernel}
    return live_attention(call.query, key, live_value, **options), frozen_value, own


def _mix(value: Tensor, heads: tuple[int, ...], frozen: FrozenHeads, left_pad: Tensor | None) -> Tensor:
    """Return frozen heads, `[B, F, T, D]`, each of its head of `value [B, H, T, D]`, fixed and trainable ones apart."""
    backend, parts = BACKENDS[frozen.backend], []
    if left_pad is not None:
        if backend.pads:
            return backend.padded(value, heads, frozen.tables(value.dtype), left_pad)
        moved = shift_rows(take_heads(value, heads), left_pad)
        return shift_rows(_mix(moved, tuple(range(len(heads))), frozen, None), -left_pad)
    if frozen.fixed:
        read = tuple(heads[slot] for slot in frozen.fixed)
        parts.append((frozen.fixed, backend.forward(value, read, frozen.tables(value.dtype))))
    if frozen.trainable:
        read = tuple(heads[slot] for slot in frozen.trainable)
        parts.append((frozen.trainable, backend.forward_trainable(take_heads(value, read), *frozen.logits())))
    return merge_slots(parts)


def _checked(
    query: Tensor, key: Tensor, value: Tensor, frozen: FrozenHeads | None, backend: str = "auto",
    scale: float | None = None, left_pad: Tensor | None = None, cache_position: CachePosition | None = None,
    kernel: str = "auto", state: RecurrentState | None = None,
) -> Call:  # fmt: skip
    """Return the call of a layer; raise InputError or UnsupportedError for one that cannot be computed."""
    if scale is not None and not -math.inf < scale < math.inf:
        raise InputError(f"scale must be a finite number, got {scale}")
    left_pad = _checked_padding(value, left_pad, cache_position)
    slots, frozen_slots, num_frozen = None, (), 0
    if frozen is not None:
        frozen_slots = _checked_frozen(value, frozen, backend, cache_position, state, query, key)
        slots, num_frozen = _slots(frozen, cache_position, state), frozen.num_frozen
    elif backend != "auto":
        raise InputError(f"backend {backend!r} would execute frozen heads, and there are none; leave it out")
    live_slots = live_value_heads(query, key, value, slots, num_frozen)
    check_positions(query, key if live_slots else value, value)
    check_kernel(kernel)
    call = Call(query, key, value, frozen, live_slots, frozen_slots, scale, left_pad, cache_position, kernel, state)
    if frozen is not None and live_slots and BACKENDS[frozen.backend].mixes_live:
        if left_pad is not None or not call.whole or kernel != "auto":
            raise UnsupportedError(
                f"backend {frozen.backend!r} computes live heads itself, over whole sequences: no left padding, no "
                f"shorter query, no choice of kernel (got {kernel!r}); install_ with backend='toeplitz' for those"
            )
        if frozen.kv_head is None:
            raise InputError(f"backend {frozen.backend!r} needs kv_head; pass it to FrozenHeads.from_patterns")
    return call


def _checked_frozen(
    value: Tensor, frozen: FrozenHeads, backend: str, cache_position: CachePosition | None,
    state: RecurrentState | None, *others: Tensor,
) -> tuple[int, ...]:  # fmt: skip
    """Return the value head of each frozen slot; raise InputError for values or a backend that do not fit.

    Raises UnsupportedError for a cache of fixed size where only whole sequences can be computed, and for values, or
    `others` that the layer reads, with tangents that the backend would drop.
    """
    if not isinstance(frozen, FrozenHeads):
        raise InputError(f"frozen must be a FrozenHeads, made by FrozenHeads.from_patterns; got {shown(frozen)}")
    frozen.check_call(value, backend)
    if not BACKENDS[frozen.backend].in_autograd:
        forbid_forward_mode(value, *others)
    if state is not None:
        slots = _slots(frozen, cache_position, state)
        assert slots is not None
        return slots[len(slots) - frozen.num_frozen :]
    own = frozen.value_heads(value.shape[1])
    if cache_position is None:
        return own
    if frozen.trainable or not BACKENDS[frozen.backend].decodes:
        why = "patterns that are trained" if frozen.trainable else f"backend {frozen.backend!r}"
        raise UnsupportedError(f"{why} cannot go on from a cache of fixed size; use one that grows")
    slots = _slots(frozen, cache_position, None)
    return own if slots is None else slots[len(slots) - frozen.num_frozen :]


def _checked_padding(value: Tensor, left_pad: Tensor | None, cache_position: CachePosition | None) -> Tensor | None:
    """Return `left_pad` where the values are, contiguous, as kernels read it; raise InputError where it cannot be."""
    if left_pad is None:
        return None
    check_left_pad(left_pad, value.shape[0], value.shape[2], wait=False)
    if cache_position is not None:
        raise InputError("cache_position includes padding; leave left_pad out")
    return left_pad.to(value.device).contiguous()


def _slots(
    frozen: FrozenHeads, cache_position: CachePosition | None, state: RecurrentState | None
) -> tuple[int, ...] | None:
    """Return which of the value heads each slot reads: a cache of fixed size, or beside a state, has `cached_order`.

    Slots that decode from a state read none, -1.
    """
    if state is not None:
        heads = tuple(range(state.value.shape[1])) if frozen.kv_head is None else frozen.kv_head
        order = cached_order(heads, frozen.num_frozen, frozen.linear)
        return tuple(order.index(head) if head in order else -1 for head in heads)
    if frozen.kv_head is None or cache_position is None:
        return frozen.kv_head
    return tuple(map(cached_order(frozen.kv_head, frozen.num_frozen).index, frozen.kv_head))
