"""Which way a layer with live and frozen heads is computed: one table of the ways, one set of checks, four functions.

The first way whose condition holds is taken (`WAYS`, at the end of the private part):

| way | when | what runs |
| --- | --- | --- |
| ordinary | no head is frozen | attention |
| one launch | the backend mixes live heads too (`fused`), and there are some | the backend's launch of all heads |
| whole layer | no gradients, whole sequences, fixed patterns, a backend that infers | `saf::inference` |
| few rows | queries of a cache of fixed size, or few beside their keys; fixed patterns, a backend that decodes | both |
| frozen alone | no head is live | the backend's product |
| apart | otherwise | attention for live heads, the backend's product for frozen ones |

Frozen heads' patterns are fixed, trainable, or some of either: then each kind is mixed by itself (`_mix`). What comes
out in two parts is joined (`mixed_attention`), left apart (`split_attention`) or projected (`projected_attention`),
together or part by part (`project_parts`).
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saf.arguments import check, shown
from saf.errors import InputError, UnsupportedError
from saf.ops.backend import Call, PreparedHeads
from saf.ops.backends import BACKENDS
from saf.ops.heads import (
    cached_order,
    even_queries,
    flat_heads,
    join_heads,
    live_keys,
    live_value_heads,
    part_heads,
    put_together,
    read_heads,
    take_heads,
)
from saf.ops.live import check_kernel, live_attention
from saf.ops.positions import Places, Rows, check_positions, check_start, shift_rows

if TYPE_CHECKING:  # heads are asked, not made, here: this file and theirs stand side by side
    from saf.ops.frozen_heads import FrozenHeads

WHOLE_SHARE = 4
"""The whole product is computed and cut where more than one row in so many is asked for; fewer make weights."""
JOINED = 8192 * 768
"""Size B x T x H * D up to which training joins live and frozen heads before the product.

One product and a copy then cost less than two products, whose launches outweigh their work (docs/log.md).
"""


def _checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    frozen: "FrozenHeads | None",
    *,
    scale: float | None = None,
    backend: str = "auto",
    start: Tensor | None = None,
    places: Places | None = None,
    kernel: str = "auto",
    apart: bool = False,
    projection: Tensor | None = None,
) -> Call:
    """Return the call of a layer; raise InputError or UnsupportedError for one that no way computes."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        given = {"query": query, "key": key, "value": value}
        for name, one in given.items():
            check(name, one, Tensor)
    if scale is not None and not (isinstance(scale, float) and math.isfinite(scale)):
        check("scale", scale, float)
    frozen_slots: tuple[int, ...] = ()
    if frozen is not None:
        frozen_slots = _checked_frozen(value, frozen, backend, start, places)
    elif backend != "auto":
        raise InputError(f"backend {backend!r} would execute frozen heads, and there are none; leave it out")
    slots, num_frozen = (None, 0) if frozen is None else (_slots(frozen, places), frozen.num_frozen)
    live_slots = live_value_heads(query, key, value, slots, num_frozen)
    check_positions(query, key if live_slots else value, value)
    check_kernel(kernel)
    if frozen is None and start is not None:
        check_start(start, value.shape[0], value.shape[2], wait=False)
    if frozen is not None and live_slots and BACKENDS[frozen.backend].mixes_live:
        if start is not None or query.shape[-2] != value.shape[-2] or kernel != "auto" or places is not None:
            raise UnsupportedError(
                f"backend {frozen.backend!r} computes live heads itself, over whole sequences: no left padding, no "
                f"shorter query, no choice of kernel (got {kernel!r}); install_ with backend='toeplitz' for those"
            )
        if frozen.kv_head is None:
            raise InputError(f"backend {frozen.backend!r} needs kv_head; pass it to FrozenHeads.from_patterns")
    return Call(query, key, value, frozen, live_slots, frozen_slots, scale, start, places, kernel, apart, projection)


def _checked_frozen(
    value: Tensor, frozen: "FrozenHeads", backend: str, start: Tensor | None, places: Places | None
) -> tuple[int, ...]:
    """Return the value head of each frozen slot; raise InputError for values, backend or start that do not fit.

    Raises UnsupportedError for a cache of fixed size where only whole sequences can be computed.
    """
    if not isinstance(frozen, PreparedHeads):
        raise InputError(f"frozen must be a FrozenHeads, made by FrozenHeads.from_patterns; got {shown(frozen)}")
    frozen.check_call(value, backend)
    if start is not None:
        check_start(start, value.shape[0], value.shape[2], wait=False)
    slots = frozen.value_heads(value.shape[1])
    if places is None:
        return slots
    if start is not None:
        raise InputError("places tell of padding themselves; leave start out")
    if frozen.trainable or not BACKENDS[frozen.backend].decodes:
        why = "patterns that are trained" if frozen.trainable else f"backend {frozen.backend!r}"
        raise UnsupportedError(f"{why} cannot go on from a cache of fixed size; use one that grows")
    told = _slots(frozen, places)
    return slots if told is None else told[len(told) - frozen.num_frozen :]


def _slots(frozen: "FrozenHeads", places: Places | None) -> tuple[int, ...] | None:
    """Return which of the value heads given each slot reads: a cache of fixed size has them in `cached_order`."""
    if frozen.kv_head is None or places is None:
        return frozen.kv_head
    return tuple(map(cached_order(frozen.kv_head, frozen.num_frozen).index, frozen.kv_head))


def _has_no_frozen(call: Call) -> bool:
    """Return whether the layer is ordinary."""
    return call.frozen is None


def _attend(call: Call) -> tuple[Tensor, ...]:
    """Return live heads, `[B, L, Tq, D]`."""
    return (_live(call),)


def _live(call: Call) -> Tensor:
    """Return live heads, `[B, L, Tq, D]`, of keys and values as they lie where queries are fewer."""
    visible = None if call.places is None else call.places.visible
    options = {"scale": call.scale, "start": call.start, "visible": visible, "kernel": call.kernel}
    return live_heads(call.query, call.key, call.value, call.live_slots, **options)


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


def _mixes_live(call: Call) -> bool:
    """Return whether the backend computes live heads too, and there are some."""
    return call.frozen is not None and len(call.live_slots) > 0 and BACKENDS[call.frozen.backend].mixes_live


def _mix_all(call: Call) -> tuple[Tensor, ...]:
    """Return all heads from one launch of a backend; its maps know the value heads that slots read, and no others."""
    assert call.frozen is not None
    value = read_heads(call.value, call.live_slots, call.frozen_slots)
    query, key = call.query.to(value.dtype), call.key.to(value.dtype)  # as autocast does for SDPA: they may be wider
    tables = call.frozen.tables(value.dtype)
    return (BACKENDS[call.frozen.backend].mixed(query, key, value, tables, call.scale),)


def _infers(call: Call) -> bool:
    """Return whether a backend computes the layer at once: values have the dtype that autocast would give them."""
    frozen, value = call.frozen, call.value
    if frozen is None or call.apart or frozen.trainable or torch.is_grad_enabled() or _autocasts(value):
        return False
    if call.start is not None or not call.live_slots or call.query.shape[-2] != value.shape[-2] or call.places:
        return False
    backend = BACKENDS[frozen.backend]
    return backend.infers and backend.can_infer(value.device, value.dtype, frozen.tables(value.dtype))


def _infer(call: Call) -> tuple[Tensor, ...]:
    """Return all heads, projected where the call has a projection, from one operator."""
    assert call.frozen is not None
    return (BACKENDS[call.frozen.backend].infer(call, call.frozen.tables(call.value.dtype)),)


def _are_few(frozen: "FrozenHeads", rows: int, length: int, start: Tensor | None) -> bool:
    """Return whether `rows` of so many positions are computed by themselves: fewer, and few or none of a whole product.

    A whole product of padded rows would have to move their values first.
    """
    able = BACKENDS[frozen.backend].decodes and not frozen.trainable
    return able and rows < length and (start is not None or rows * WHOLE_SHARE <= length)


def _has_few_rows(call: Call) -> bool:
    """Return whether frozen rows are computed where the device says they are, or where they are few."""
    if call.frozen is None:
        return False
    rows, length = call.query.shape[-2], call.value.shape[-2]
    return call.places is not None or _are_few(call.frozen, rows, length, call.start)


def _mix_rows(call: Call) -> tuple[Tensor, ...]:
    """Return all heads, of few rows."""
    assert call.frozen is not None
    count, length = call.query.shape[-2], call.value.shape[-2]
    rows = Rows(length - count, count, call.start)
    if call.places is not None:
        rows = Rows(call.places.first, count, call.places.start)
    live = (lambda: _live(call)) if call.live_slots else None
    return (_forward_rows(call.value, call.frozen_slots, call.frozen, rows, live),)


def _forward_rows(
    value: Tensor, slots: tuple[int, ...], frozen: "FrozenHeads", rows: Rows, live: Callable[[], Tensor] | None
) -> Tensor:
    """Return what the backend's `forward_rows` does."""
    return BACKENDS[frozen.backend].forward_rows(value, slots, frozen.tables(value.dtype), rows, live)


def _autocasts(value: Tensor) -> bool:
    """Return whether matrix products would compute in another dtype than that of `value`."""
    kind = value.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != value.dtype


def _has_no_live(call: Call) -> bool:
    """Return whether every head is frozen."""
    return not call.live_slots


def _mix_alone(call: Call) -> tuple[Tensor, ...]:
    """Return frozen heads, `[B, F, Tq, D]`."""
    assert call.frozen is not None
    value = take_heads(call.value, call.frozen_slots)
    return (_mix_padded(value, call.frozen, call.start, call.query.shape[-2]),)


def _always(call: Call) -> bool:
    """Return True: the last way takes every call."""
    return True


def _attend_and_mix(call: Call) -> tuple[Tensor, ...]:
    """Return live heads, `[B, L, Tq, D]`, and frozen ones, `[B, F, Tq, D]`."""
    assert call.frozen is not None
    if call.query.shape[-2] < call.value.shape[-2]:
        live, selected = _live(call), take_heads(call.value, call.frozen_slots)
    else:
        key, slots = live_keys(call.key, call.live_slots)
        value, selected = part_heads(call.value, slots, call.frozen_slots)
        live = live_attention(call.query, key, value, scale=call.scale, start=call.start, kernel=call.kernel)
    return live, _mix_padded(selected, call.frozen, call.start, call.query.shape[-2])


def _mix_padded(value: Tensor, frozen: "FrozenHeads", start: Tensor | None, rows: int) -> Tensor:
    """Return the last `rows` of frozen heads, of values `[B, F, T, D]` that their slots read, in their order."""
    if start is None:
        return _mix(value, frozen, rows)
    length = value.shape[-2]
    shifted = shift_rows(value, start.to(value.device))
    mixed = shift_rows(_mix(shifted, frozen, length), -start.to(value.device))
    return mixed[:, :, length - rows :]


def _mix(value: Tensor, frozen: "FrozenHeads", rows: int) -> Tensor:
    """Mix `value [B, F, T, D]` by the backend, fixed and trainable patterns apart, and keep the last `rows`."""
    backend, tables = BACKENDS[frozen.backend], frozen.tables(value.dtype)
    if not frozen.trainable:
        return backend.forward(value, tables, rows)
    alpha, rho = frozen.logits()
    if not frozen.fixed:
        return backend.forward_trainable(value, alpha, rho, rows)
    fixed = backend.forward(take_heads(value, frozen.fixed), tables, rows)
    trained = backend.forward_trainable(take_heads(value, frozen.trainable), alpha, rho, rows)
    return put_together([(frozen.fixed, fixed), (frozen.trainable, trained)])


class Way(NamedTuple):
    """Compute a layer in one way, where it is the first that can.

    Attributes:
        name: as in the table above.
        when: whether a call goes this way, if none before did.
        run: returns all heads in one part, or live and frozen ones in two, `[B, n, Tq, D]`, in slot order.
        projects: whether `run` does the output product too, and returns `[B, T, C]`, where the call has one.
    """

    name: str
    when: Callable[[Call], bool]
    run: Callable[[Call], tuple[Tensor, ...]]
    projects: bool = False


WAYS = (
    Way("ordinary", _has_no_frozen, _attend),
    Way("one launch", _mixes_live, _mix_all),
    Way("whole layer", _infers, _infer, projects=True),
    Way("few rows", _has_few_rows, _mix_rows),
    Way("frozen alone", _has_no_live, _mix_alone),
    Way("apart", _always, _attend_and_mix),
)


def way_of(call: Call) -> Way:
    """Return the first way whose condition holds."""
    for way in WAYS:
        if way.when(call):
            return way
    raise AssertionError("the last way takes every call")


def mixed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    frozen: "FrozenHeads | None",
    *,
    scale: float | None = None,
    backend: str = "auto",
    start: Tensor | None = None,
    places: Places | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Compute the attention of one layer whose heads are partly frozen, in slot order: live heads first.

    Args:
        query: `[B, L, Tq, D]`, the live heads only; the last `Tq` of `T` positions.
        key: `[B, K, T, D]`, ascending, only the KV heads that some live head uses.
        value: `[B, H_kv, T, D]`, every value head.
        frozen: The `F` frozen heads, or None for ordinary attention.
        scale: Score scale of live heads; `1/sqrt(D)` by default.
        backend: `"auto"` or the name of the backend that `frozen` was prepared for.
        start: `[B]` first real position of each row (left padding); outputs before it are zero.
        places: Where queries stand among the T places of a cache of fixed size, instead of `start`; `value` has its
            heads in `saf.ops.heads.cached_order` then, and outputs of padding may be anything finite.
        kernel: SDPA kernel of live heads: `"auto"`, `"cudnn"`, `"flash"`, `"efficient"`, `"math"`; `"fa3"` or `"fa4"`
            where the package is installed.

    Returns:
        `[B, L + F, Tq, D]`.

    Raises:
        InputError: Shapes that do not fit, inputs longer than the patterns, another backend than prepared, or one where
            no head is frozen.
        UnsupportedError: A backend that computes live heads itself (`fused`), asked for padding, a shorter query or a
            kernel of theirs; a kernel that cannot run here; places beside patterns that are trained.
    """
    call = _checked(query, key, value, frozen, scale=scale, backend=backend, start=start, places=places, kernel=kernel)
    parts = way_of(call).run(call)
    return parts[0] if len(parts) == 1 else join_heads(*parts)


def split_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    frozen: "FrozenHeads | None",
    *,
    scale: float | None = None,
    backend: str = "auto",
    start: Tensor | None = None,
    kernel: str = "auto",
) -> tuple[Tensor | None, Tensor | None]:
    """Compute `mixed_attention` with live `[B, L, Tq, D]` and frozen `[B, F, Tq, D]` outputs apart (None when empty).

    Where both are projected apart, nothing is copied together. Raises as `mixed_attention` does.
    """
    call = _checked(query, key, value, frozen, scale=scale, backend=backend, start=start, kernel=kernel, apart=True)
    parts = way_of(call).run(call)
    if len(parts) == 2:
        return parts[0], parts[1]
    num_live = len(call.live_slots)
    if frozen is None:
        return parts[0], None
    return (parts[0][:, :num_live], parts[0][:, num_live:]) if num_live else (None, parts[0])


def projected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    frozen: "FrozenHeads",
    projection: Tensor,
    *,
    start: Tensor | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Compute `mixed_attention` of a layer with frozen heads, and the product with `projection [C, H * D]`.

    Returns `[B, Tq, C]` in the dtype of `value`, or autocast's; raises as `mixed_attention` does.
    """
    projection = projection.to(value.dtype)  # once: autocast would cast the columns of either part by themselves
    call = _checked(query, key, value, frozen, start=start, kernel=kernel, projection=projection)
    way = way_of(call)
    parts = way.run(call)
    return parts[0] if way.projects else project_parts(parts, projection)


def project_parts(parts: Sequence[Tensor], projection: Tensor) -> Tensor:
    """Project heads that come in parts `[B, n, T, D]`, in slot order, by `projection [C, H * D]`: `[B, T, C]`.

    Of many tokens, and without gradients, each part by a product of its own: nothing is copied together then, and
    attention's backward pass sees a gradient in the memory order of its output.
    """
    if len(parts) == 2 and torch.is_grad_enabled() and sum(part.numel() for part in parts) <= JOINED:
        parts = [join_heads(*parts)]
    columns = projection.split([part.shape[1] * part.shape[-1] for part in parts], dim=1)
    products = [F.linear(flat_heads(part), own) for part, own in zip(parts, columns, strict=True)]
    return products[0] if len(products) == 1 else products[0] + products[1]


def frozen_attention(
    value: Tensor,
    frozen: "FrozenHeads",
    *,
    backend: str = "auto",
    start: Tensor | None = None,
    places: Places | None = None,
    rows: int | None = None,
) -> Tensor:
    """Compute the frozen heads alone, `P V` (Eq. 3): `value [B, H_kv, T, D]` to `[B, F, T, D]`.

    `frozen.kv_head` says which value head each frozen slot reads (in order when `H_kv = F`); `rows` keeps the
    last positions only; `start` and `places` are as in `mixed_attention`, and with places `rows` says how many queries
    there are. Raises as `mixed_attention` does.
    """
    slots = _checked_frozen(value, frozen, backend, start, places)
    length = value.shape[-2]
    if rows is None:
        rows = length
    elif not isinstance(rows, int) or isinstance(rows, bool):
        check("rows", rows, int)
    if not 0 <= rows <= length:
        raise InputError(f"rows are the last of {length} positions; got {rows}")
    if places is not None:
        return _forward_rows(value, slots, frozen, Rows(places.first, rows, places.start), None)
    if _are_few(frozen, rows, length, start):
        return _forward_rows(value, slots, frozen, Rows(length - rows, rows, start), None)
    return _mix_padded(take_heads(value, slots), frozen, start, rows)
