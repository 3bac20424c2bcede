"""A layer with live and frozen heads: one set of checks, and four functions that take it one of the `ways`.

What comes out in two parts is joined (`mixed_attention`), left apart (`split_attention`) or projected, together or by
parts (`attention_products`); `frozen_attention` computes frozen heads alone.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from saf.errors import InputError, UnsupportedError, shown
from saf.ops.backend import Call, PreparedHeads
from saf.ops.backends import BACKENDS
from saf.ops.heads import cached_order, flat_heads, join_heads, live_value_heads, take_heads
from saf.ops.live import check_kernel
from saf.ops.operator import forbid_forward_mode
from saf.ops.positions import Places, Rows, check_positions, check_start
from saf.ops.ways import are_few, forward_rows, mix_padded, way_of

if TYPE_CHECKING:  # heads are asked, not made, here: this file and theirs stand side by side
    from saf.ops.frozen_heads import FrozenHeads

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
    if scale is not None and not -math.inf < scale < math.inf:
        raise InputError(f"scale must be a finite number, got {scale}")
    frozen_slots: tuple[int, ...] = ()
    start = _checked_padding(value, start, places)
    if frozen is not None:
        frozen_slots = _checked_frozen(value, frozen, backend, places, query, key)
    elif backend != "auto":
        raise InputError(f"backend {backend!r} would execute frozen heads, and there are none; leave it out")
    slots, num_frozen = (None, 0) if frozen is None else (_slots(frozen, places), frozen.num_frozen)
    live_slots = live_value_heads(query, key, value, slots, num_frozen)
    check_positions(query, key if live_slots else value, value)
    _check_projection(projection, (len(live_slots) + num_frozen) * value.shape[-1])
    check_kernel(kernel)
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
    value: Tensor, frozen: "FrozenHeads", backend: str, places: Places | None, *others: Tensor
) -> tuple[int, ...]:
    """Return the value head of each frozen slot; raise InputError for values or a backend that do not fit.

    Raises UnsupportedError for a cache of fixed size where only whole sequences can be computed, and for values, or
    `others` that the layer reads, with tangents that the backend would drop.
    """
    if not isinstance(frozen, PreparedHeads):
        raise InputError(f"frozen must be a FrozenHeads, made by FrozenHeads.from_patterns; got {shown(frozen)}")
    frozen.check_call(value, backend)
    if not BACKENDS[frozen.backend].in_autograd:
        forbid_forward_mode(value, *others)
    slots = frozen.value_heads(value.shape[1])
    if places is None:
        return slots
    if frozen.trainable or not BACKENDS[frozen.backend].decodes:
        why = "patterns that are trained" if frozen.trainable else f"backend {frozen.backend!r}"
        raise UnsupportedError(f"{why} cannot go on from a cache of fixed size; use one that grows")
    told = _slots(frozen, places)
    return slots if told is None else told[len(told) - frozen.num_frozen :]


def _check_projection(projection: Tensor | None, width: int) -> None:
    """Raise InputError for a projection that does not have a column for each channel of each slot."""
    if projection is not None and (projection.ndim != 2 or projection.shape[1] != width):
        raise InputError(f"projection must be [C, {width}], columns slot by slot; got {list(projection.shape)}")


def _checked_padding(value: Tensor, start: Tensor | None, places: Places | None) -> Tensor | None:
    """Return starts where the values are, one after another in memory, as kernels read them.

    Raises InputError for starts that are no positions of the values' rows, and for starts beside places.
    """
    if start is None:
        return None
    check_start(start, value.shape[0], value.shape[2], wait=False)
    if places is not None:
        raise InputError("places tell of padding themselves; leave start out")
    return start.to(value.device).contiguous()


def _slots(frozen: "FrozenHeads", places: Places | None) -> tuple[int, ...] | None:
    """Return which of the value heads given each slot reads: a cache of fixed size has them in `cached_order`."""
    if frozen.kv_head is None or places is None:
        return frozen.kv_head
    return tuple(map(cached_order(frozen.kv_head, frozen.num_frozen).index, frozen.kv_head))


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
            where the package is installed; `"split"` for few rows after a cache, frozen heads in the same launch, which
            `"auto"` takes beside frozen heads where it can run; else it is PyTorch's own choice.

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


def attention_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    frozen: "FrozenHeads",
    projection: Tensor,
    *,
    start: Tensor | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, ...]:
    """Compute `mixed_attention` of a layer with frozen heads, and its product with `projection [C, H * D]`.

    Returns one or two products `[B, Tq, C]`, in the dtype of `value`, or autocast's, whose sum it is, for whoever adds
    more to it; raises as `mixed_attention` does.
    """
    projection = projection.to(value.dtype)  # once: autocast would cast the columns of either part by themselves
    call = _checked(query, key, value, frozen, start=start, kernel=kernel, projection=projection)
    way = way_of(call)
    parts = way.run(call)
    return (parts[0],) if way.projects else project_parts(parts, projection)


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
    start = _checked_padding(value, start, places)
    slots = _checked_frozen(value, frozen, backend, places)
    length = value.shape[-2]
    if rows is None:
        rows = length
    if not 0 <= rows <= length:
        raise InputError(f"rows are the last of {length} positions; got {rows}")
    if places is not None:
        return forward_rows(value, slots, frozen, Rows(places.first, rows, places.start), None)
    if are_few(frozen, rows, length, start):
        return forward_rows(value, slots, frozen, Rows(length - rows, rows, start), None)
    return mix_padded(take_heads(value, slots), frozen, start, rows)
