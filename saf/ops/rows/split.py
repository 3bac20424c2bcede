"""Few rows of live heads, and of frozen ones beside them, in one launch: the kernel called "split".

It is flash-decoding: keys are cut into stretches, each attended to by itself, so that one query of few heads fills a
device; `saf::merge_rows` weighs the stretches. Frozen heads' stretches are sums, as in `saf::frozen_rows`, so that a
layer of both kinds of heads has no launch more than an ordinary one. It serves decoding and the few tokens of assisted
generation; longer passes take PyTorch's choice of kernel. Layers with frozen heads take it by themselves where it can
run, ordinary ones where it is asked for by name.
"""

import torch
from torch import Tensor

from saf.errors import UnsupportedError
from saf.ops.backend import Call
from saf.ops.heads import unit_stride
from saf.ops.live import SPLIT, score_scale
from saf.ops.operator import has_tangent, operator, product_precision, uses_triton
from saf.ops.rows.frozen import CACHED, LIVE_OWN, LIVE_READERS, OWN, READERS, parts_of

DTYPES = (torch.bfloat16, torch.float16)
"""Of values: float32 keys and values of a stretch do not fit into a multiprocessor's shared memory together."""
MOST_ROWS = 16
"""Rows of one product, the queries of a KV head: the fewest that tensor cores take. More of them read keys again."""


def splits(call: Call) -> bool:
    """Return whether a call of few rows takes this launch: asked for by name, or with frozen heads that it can serve.

    Raises UnsupportedError for few rows that it is asked for and cannot take: a setting without effect would go
    unnoticed.
    """
    rows, named = call.query.shape[-2], call.kernel == SPLIT
    if not (named or (call.kernel == "auto" and call.frozen is not None)):
        return False
    # Whole sequences first: with lengths left open by the compiler, a limit of rows would be another program.
    if not call.live_slots or (call.places is None and rows == call.value.shape[-2]):
        return False
    group = _group(call)
    if rows * group > MOST_ROWS >= group:  # not few
        return False
    reason = _obstacle(call, group)
    if named and reason:
        raise UnsupportedError(f"attention kernel {SPLIT!r} {reason}; or take 'auto'")
    return reason is None


def _obstacle(call: Call, group: int) -> str | None:
    """Return what the launch needs that a call does not have; None where it can run."""
    operands, frozen = (call.query, call.key, call.value), call.frozen
    value = call.value
    if not uses_triton(value.device, value.dtype) or {one.dtype for one in operands} - {*DTYPES}:
        return f"needs a CUDA device and values of 16 bits, got {value.device.type} and {value.dtype}: cast the model"
    if group > MOST_ROWS:
        return f"takes at most {MOST_ROWS} query heads of a KV head, got {group}"
    if has_tangent(*operands):
        return "gives no derivatives in forward mode: take kernel 'math'"
    if torch.is_grad_enabled() and any(one.requires_grad for one in operands):
        return "gives no gradients: call the model under torch.no_grad()"
    if frozen is not None and (frozen.trainable or READERS not in frozen.tables(value.dtype)):
        return "takes fixed patterns that backend 'toeplitz' holds as tables: install_ them so"
    return None


def split(call: Call) -> tuple[Tensor, ...]:
    """Return live heads and then frozen ones, `[B, L + F, rows, D]`, stored as `[B, rows, L + F, D]`."""
    query, key, value, frozen, places = call.query, call.key, call.value, call.frozen, call.places
    tables = {} if frozen is None else frozen.tables(value.dtype)
    used = sorted(set(call.live_slots))
    live_readers = None if _is_even(call.live_slots) else tables[LIVE_READERS]
    # A cache of fixed size has first what live heads read.
    own = None if places is not None or used == list(range(len(used))) else tables[LIVE_OWN]
    groups = len(used) + (0 if frozen is None else len(set(call.frozen_slots)))
    parts = parts_of(value.shape[0] * groups, value.shape[-2])
    read = None if frozen is None else tables[OWN if places is None else CACHED]
    lowest = min(call.frozen_slots, default=0)
    where = (None, value.shape[-2] - query.shape[-2], call.start)
    if places is not None:
        where = (places.first, 0, places.start)
    scale = score_scale(call.scale, query.shape[-1])
    sums, logs = split_rows(
        *map(unit_stride, (query, key, value)), own, live_readers, _group(call), read, tables.get(READERS), lowest,
        tables.get("distance"), tables.get("key_scale"), tables.get("row_scale"), *where, parts, scale,
    )  # fmt: skip
    return (merge_rows(sums, logs, value),)


def _group(call: Call) -> int:
    """Return how many live slots read one KV head at most."""
    return max(map(call.live_slots.count, set(call.live_slots)))


def _is_even(slots: tuple[int, ...]) -> bool:
    """Return whether as many slots read each head, in its order: which ones needs no table."""
    used = sorted(set(slots))
    return slots == tuple(head for head in used for _ in range(len(slots) // len(used)))


@operator("saf::split_rows")
def split_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: Tensor | None,
    live_readers: Tensor | None,
    group: int,
    read: Tensor | None,
    readers: Tensor | None,
    lowest: int,
    distance: Tensor | None,
    key_scale: Tensor | None,
    row_scale: Tensor | None,
    first: Tensor | None,
    place: int,
    start: Tensor | None,
    parts: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return every stretch's outputs, `[parts, B, L + F, rows, D]`, and live heads' logarithms `[parts, B, L, rows]`.

    `query [B, L, rows, D]`, `key [B, K, T, D]`, `value [B, H_kv, T, D]`. `own [K]` names the value heads of the keys,
    None for the first K; `live_readers [K, G]` the slots that read each, None for `group` one after another. The other
    arguments are those of `saf::frozen_rows`, None without frozen heads; `lowest` is the first value head they read.
    """
    from saf.ops.rows.kernels import split as kernel

    sums, logs = _parts_like(query, value, distance, parts)
    if sums.numel():
        tables = distance, key_scale, row_scale
        at = first, place, start
        kernel(
            query, key, value, own, live_readers, group, read, readers, lowest, tables, *at, scale, sums, logs,
            precision=product_precision(value.dtype),
        )  # fmt: skip
    return sums, logs


@torch.library.register_fake("saf::split_rows")
def _(
    query, key, value, own, live_readers, group, read, readers, lowest, distance, key_scale, row_scale, first, place,
    start, parts, scale,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _parts_like(query, value, distance, parts)


def _parts_like(query: Tensor, value: Tensor, distance: Tensor | None, parts: int) -> tuple[Tensor, Tensor]:
    batch, live, rows, dim = query.shape
    heads = live + (0 if distance is None else distance.shape[0])
    sums = value.new_empty(parts, batch, heads, rows, dim, dtype=torch.float32)
    return sums, value.new_empty(parts, batch, live, rows, dtype=torch.float32)


@operator("saf::merge_rows")
def merge_rows(sums: Tensor, logs: Tensor, like: Tensor) -> Tensor:
    """Return all heads, `[B, L + F, rows, D]` in the dtype of `like`, stored as `[B, rows, L + F, D]`."""
    from saf.ops.rows.kernels import merge

    out = _merged_like(sums, like)
    if out.numel():
        merge(sums, logs, out)
    return out


@torch.library.register_fake("saf::merge_rows")
def _(sums, logs, like) -> Tensor:
    return _merged_like(sums, like)


def _merged_like(sums: Tensor, like: Tensor) -> Tensor:
    _, batch, heads, rows, dim = sums.shape
    return sums.new_empty(batch, rows, heads, dim, dtype=like.dtype).transpose(1, 2)
