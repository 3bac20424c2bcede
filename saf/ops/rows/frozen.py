"""A few rows of convolved patterns, wherever the device says that they are: one row of weights against the values.

`compact_rows` gives their weights to plain PyTorch. On CUDA `saf::frozen_rows` sums the values of every stretch of keys
and `saf::join_rows` adds the stretches up beside the live heads: values are read once, at any memory order, and nothing
that a captured graph replays depends on the host.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from saf.ops.backend import Tables
from saf.ops.heads import cached_order, unit_stride
from saf.ops.operator import operator, product_precision
from saf.ops.positions import Rows

STRETCH = 256
"""Keys of a part at least: fewer would be read faster than their sums are written and added up."""
PROGRAMS = 528
"""Parts of all heads together, about: four for each multiprocessor of an H200, so that all of them read memory."""
READERS, OWN, CACHED = "row_readers", "row_heads", "row_cached_heads"
LIVE_READERS, LIVE_OWN = "row_live_readers", "row_live_heads"
"""Names of what `row_tables` makes among the tables of a layer."""


def row_tables(kv_head: tuple[int, ...] | None, frozen: int, device: torch.device) -> Tables:
    """Return which frozen slots read which value head, `U` heads in all, int32: what `saf::frozen_rows` reads.

    `row_readers [U, G]` holds the slots that read each head, -1 for none; `row_heads [U]` these heads as a layer has
    them, `row_cached_heads [U]` as a cache of fixed size does (`cached_order`), both counted from the first one read.
    Of live slots, where the layer's are known, `row_live_readers [K, G]` and `row_live_heads [K]` say the same for the
    KV heads that they read, which a cache of fixed size has first.
    They are made with the other tables: what a pass made and kept would lie in the memory of the graph that captures
    it, and be written over.
    """
    slots = tuple(range(frozen)) if kv_head is None else kv_head
    read = slots[len(slots) - frozen :]
    told = tuple(map(cached_order(slots, frozen).index, read))
    groups = readers_of(read)
    made = {
        READERS: groups,
        OWN: [read[group[0]] - min(read) for group in groups],
        CACHED: [told[group[0]] - min(told) for group in groups],
    }
    if live := slots[: len(slots) - frozen]:
        made |= {LIVE_READERS: readers_of(live), LIVE_OWN: sorted(set(live))}
    return {name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in made.items()}


def readers_of(read: tuple[int, ...]) -> list[list[int]]:
    """Return which slots read each of the heads read, ascending; filled up with -1 to one length."""
    groups = [[slot for slot, head in enumerate(read) if head == one] for one in sorted(set(read))]
    most = max(map(len, groups))
    return [group + [-1] * (most - len(group)) for group in groups]


def compact_rows(tables: Tables) -> Callable[..., Tensor]:
    """Return what `row_product` takes of convolved patterns: `exp(rho(i - j)) exp(alpha(j)) / Z(i)` (Eq. 3)."""
    distance, key_scale, row_scale = tables["distance"], tables["key_scale"], tables["row_scale"]

    def weights(query: Tensor, key: Tensor, lag: Tensor) -> Tensor:
        far = distance[:, lag].to(row_scale.dtype)[:, None]
        return far * key_scale[:, key][:, :, None] * row_scale[:, query][..., None]

    return weights


def few_rows(value: Tensor, heads: tuple[int, ...], tables: Tables, rows: Rows, live: Tensor | None) -> Tensor:
    """Return what `Toeplitz.forward_rows` does, from kernels."""
    count = parts_of(value.shape[0] * len(set(heads)), value.shape[-2])
    moves = isinstance(rows.first, Tensor)
    read = tables[CACHED if moves else OWN]
    own = tables["distance"], tables["key_scale"], tables["row_scale"]
    first, place = (rows.first, 0) if moves else (None, rows.first)
    where = first, place, rows.start, rows.count
    lowest = min(heads)
    value = unit_stride(value[:, lowest:] if lowest else value)
    parts = frozen_rows(value, read, tables[READERS], *own, *where, count)
    return join_rows(parts, value, None if live is None else unit_stride(live))


def parts_of(groups: int, length: int) -> int:
    """Return into how many stretches the keys of each of `groups` are cut."""
    return max(1, min(-(-length // STRETCH), PROGRAMS // max(1, groups)))  # an empty batch has no groups


@operator("saf::frozen_rows")
def frozen_rows(
    value: Tensor,
    read: Tensor,
    readers: Tensor,
    distance: Tensor,
    key_scale: Tensor,
    row_scale: Tensor,
    first: Tensor | None,
    place: int,
    start: Tensor | None,
    rows: int,
    parts: int,
) -> Tensor:
    """Return rows of `P V` summed over each of `parts` stretches of keys, `[parts, B, F, rows, D]` float32.

    `value [B, H_kv, T, D]`; `read [U]` names the value heads that frozen slots read, `readers [U, G]` the slots of
    each, see `row_tables`; the other tables are those of `prepare`. The rows begin at `first` (`[]`, on the device) or
    else at `place`; `start` is as in `Rows`.
    """
    from saf.ops.rows.kernels import sum_rows

    out = _parts_like(value, distance.shape[0], rows, parts)
    if not out.numel():
        return out
    at = first, place, start
    sum_rows(
        value, read, readers, distance, key_scale, row_scale, *at, out, precision=product_precision(value.dtype)
    )  # fmt: skip
    return out


@torch.library.register_fake("saf::frozen_rows")
def _(value, read, readers, distance, key_scale, row_scale, first, place, start, rows, parts) -> Tensor:
    return _parts_like(value, distance.shape[0], rows, parts)


def _parts_like(value: Tensor, heads: int, rows: int, parts: int) -> Tensor:
    return value.new_empty(parts, value.shape[0], heads, rows, value.shape[-1], dtype=torch.float32)


@operator("saf::join_rows")
def join_rows(parts: Tensor, like: Tensor, live: Tensor | None) -> Tensor:
    """Return live heads `[B, L, rows, D]` and then the sums of `parts [S, B, F, rows, D]`, stored as `[B, rows, H, D]`.

    The result has the dtype of `like`.
    """
    from saf.ops.rows.kernels import add_parts

    out = _joint_like(parts, like, live)
    if out.numel():
        add_parts(parts, live, out)
    return out


@torch.library.register_fake("saf::join_rows")
def _(parts, like, live) -> Tensor:
    return _joint_like(parts, like, live)


def _joint_like(parts: Tensor, like: Tensor, live: Tensor | None) -> Tensor:
    _, batch, frozen, rows, dim = parts.shape
    heads = frozen + (0 if live is None else live.shape[1])
    return parts.new_empty(batch, rows, heads, dim, dtype=like.dtype).transpose(1, 2)
