"""Few queries after a cache: live and frozen heads of a layer in one flash-decoding launch, kernel "flash_decode".

Keys are cut into parts, each attended to by itself, so that one query of few heads fills a device; a second launch
weighs the parts of live heads and adds up those of frozen ones. It serves decoding and the few tokens of assisted
generation; longer passes take PyTorch's choice of kernel. Layers with frozen heads take it by themselves where it can
run, ordinary ones where it is named: with grouped queries after 64K tokens a step takes 2.4 ms, by PyTorch's kernel
17.6 (Qwen3-4B's shape, 12 layers, H200; docs/log.md).
"""

import torch
from torch import Tensor

from saf.ops.backend import Tables
from saf.ops.heads import cached_order, groups_evenly, unit_stride
from saf.ops.live import score_scale
from saf.ops.operator import has_tangent, operator, product_precision, uses_triton
from saf.ops.positions import CachePosition

DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes of values: in float32 the keys and values read at once exceed a multiprocessor's shared memory."""
MOST_ROWS = 16
"""Most queries of a KV head: the rows of one product, the fewest that tensor cores take. More would read keys again."""
PART_KEYS = 256
"""Fewest keys of a part: fewer would be read faster than their sums are written and added up."""
PROGRAMS = 528
"""Most parts of all heads together: four for each multiprocessor of an H200, so that all of them read memory."""


def decode_tables(kv_head: tuple[int, ...] | None, num_frozen: int, device: torch.device) -> Tables:
    """Return which slots read which value head, int32, as the launch takes it (`decode_heads`).

    Frozen slots read U value heads, and at most G slots the same one. `frozen_readers [U, G]` are the slots that read
    each, then -1; `frozen_read [U]` the heads in the layer's order, `frozen_read_cached [U]` in that of a cache of
    fixed size (`cached_order`), both counted from the first one read. `live_readers` and `live_read` are the same for
    live slots, in the layer's order, where `kv_head` names them.

    These maps exist before any pass: built during one, they would lie in the memory of the graph that captures it,
    and be overwritten.
    """
    kv_head = tuple(range(num_frozen)) if kv_head is None else kv_head
    live_kv, frozen_kv = kv_head[:-num_frozen], kv_head[-num_frozen:]
    cached = tuple(map(cached_order(kv_head, num_frozen).index, frozen_kv))
    readers = _readers(frozen_kv)
    maps = {
        "frozen_readers": readers,
        "frozen_read": [frozen_kv[slots[0]] - min(frozen_kv) for slots in readers],
        "frozen_read_cached": [cached[slots[0]] - min(cached) for slots in readers],
    }
    if live_kv:
        maps |= {"live_readers": _readers(live_kv), "live_read": sorted(set(live_kv))}
    return {name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in maps.items()}


def _readers(kv_head: tuple[int, ...]) -> list[list[int]]:
    """Return the slots that read each value head, ascending, -1 after the last one up to a common length."""
    groups = [[slot for slot, head in enumerate(kv_head) if head == one] for one in sorted(set(kv_head))]
    most = max(map(len, groups))
    return [group + [-1] * (most - len(group)) for group in groups]


def largest_group(live_kv: tuple[int, ...]) -> int:
    """Return how many live slots read one KV head at most."""
    return max([1, *[live_kv.count(head) for head in set(live_kv)]])  # torch.compile knows no max(..., default=)


def unsupported_reason(
    query: Tensor, key: Tensor, value: Tensor, live_kv: tuple[int, ...], frozen_kv: tuple[int, ...],
    tables: Tables,
) -> str | None:  # fmt: skip
    """Return what the launch needs that a call of `flash_decode` does not have; None where it can run."""
    operands = (query, key, value)
    if not uses_triton(value.device, value.dtype) or {one.dtype for one in operands} - {*DTYPES}:
        return f"needs a CUDA device and values of 16 bits, got {value.device.type} and {value.dtype}: cast the model"
    if (group := largest_group(live_kv)) > MOST_ROWS:
        return f"takes at most {MOST_ROWS} query heads of a KV head, got {group}"
    if has_tangent(*operands):
        return "gives no derivatives in forward mode: take kernel 'math'"
    if torch.is_grad_enabled() and any(one.requires_grad for one in operands):
        return "gives no gradients: call the model under torch.no_grad()"
    if frozen_kv and "frozen_readers" not in tables:
        return "takes fixed patterns that backend 'toeplitz' holds as tables: install_ them so"
    return None


def flash_decode(
    query: Tensor, key: Tensor, value: Tensor, live_kv: tuple[int, ...], frozen_kv: tuple[int, ...],
    tables: Tables, position: CachePosition, scale: float | None,
) -> Tensor:  # fmt: skip
    """Return live heads and then frozen ones, `[B, L + F, rows, D]`, stored as `[B, rows, L + F, D]`.

    `query [B, L, rows, D]`, `key [B, K, T, D]`, `value [B, H_kv, T, D]`; `live_kv` and `frozen_kv` are the value head
    of each live and frozen slot; `tables` are those of the layer. Where the device alone knows the position, keys and
    values are a cache of fixed size, whose value heads lie in `cached_order`.
    """
    used, first = sorted(set(live_kv)), position.first
    on_device, on_host = (first, 0) if isinstance(first, Tensor) else (None, first)
    # A cache of fixed size begins with the heads that live slots read.
    live_read = None if on_device is not None or used == list(range(len(used))) else tables["live_read"]
    read_name = "frozen_read" if on_device is None else "frozen_read_cached"
    names = (read_name, "frozen_readers", "distance", "key_scale", "row_scale")
    frozen_read, frozen_readers, *patterns = (tables[name] if frozen_kv else None for name in names)
    groups = value.shape[0] * (len(used) + len(set(frozen_kv)))
    parts = max(1, min(-(-value.shape[-2] // PART_KEYS), PROGRAMS // max(1, groups)))  # an empty batch has no groups
    return decode_heads(
        *map(unit_stride, (query, key, value)), live_read, None if groups_evenly(live_kv) else tables["live_readers"],
        largest_group(live_kv), frozen_read, frozen_readers, min(frozen_kv) if frozen_kv else 0, *patterns,
        on_device, on_host, position.left_pad, parts, score_scale(scale, query.shape[-1]),
    )  # fmt: skip


def _heads_like(
    query, key, value, live_read, live_readers, group, frozen_read, readers, lowest, distance, *_
) -> Tensor:
    batch, live, rows, dim = query.shape
    return value.new_empty(batch, rows, live + (0 if distance is None else distance.shape[0]), dim).transpose(1, 2)


@operator("flash_decode", fake=_heads_like)
def decode_heads(
    query: Tensor, key: Tensor, value: Tensor, live_read: Tensor | None, live_readers: Tensor | None, group: int,
    frozen_read: Tensor | None, frozen_readers: Tensor | None, lowest: int, distance: Tensor | None,
    key_scale: Tensor | None, row_scale: Tensor | None, first: Tensor | None, host_first: int, left_pad: Tensor | None,
    parts: int, scale: float,
) -> Tensor:  # fmt: skip
    """Return all heads, `[B, L + F, rows, D]` in the dtype of `value`; the keys are cut into `parts`.

    `live_read [K]` are the value heads of the keys, None for the first K. `live_readers [K, G]` are the slots that read
    each, at most `group` and -1 after them; None where `group` consecutive slots read each. `frozen_read [U]` are the
    value heads of frozen slots, counted from `lowest`; `frozen_readers [U, G]` the slots that read each; `distance`,
    `key_scale`, `row_scale` `[F, >=T]` the patterns. All of these are None without frozen heads. The first query stands
    at `first` (`[]`, on the device), at `host_first` where that is None.
    """
    from saf.ops.decode.kernels import decode

    out = _heads_like(query, key, value, live_read, live_readers, group, frozen_read, frozen_readers, lowest, distance)
    if out.numel():
        decode(
            query, key, value, live_read, live_readers, group, frozen_read, frozen_readers, lowest, distance, key_scale,
            row_scale, first, host_first, left_pad, parts, scale, out, precision=product_precision(value.dtype),
        )  # fmt: skip
    return out
