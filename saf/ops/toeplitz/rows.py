"""A few rows of convolved patterns, wherever the device says that they are: one row of weights against the values.

`compact_rows` gives their weights to plain PyTorch. On CUDA `saf::frozen_rows` sums the values of every stretch of keys
and `saf::join_rows` adds the stretches up beside the live heads: values are read once, at any memory order, and nothing
that a captured graph replays depends on the host.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor

from saf.ops.backend import Tables
from saf.ops.heads import unit_stride
from saf.ops.operator import operator
from saf.ops.positions import Rows
from saf.ops.streams import beside, meet
from saf.ops.toeplitz.operator import float32_products

STRETCH = 256
"""Keys of a part at least: fewer would be read faster than their sums are written and added up."""
PROGRAMS = 528
"""Parts of all heads together, about: four for each multiprocessor of an H200, so that all of them read memory."""


def compact_rows(tables: Tables) -> Callable[..., Tensor]:
    """Return what `row_product` takes of convolved patterns: `exp(rho(i - j)) exp(alpha(j)) / Z(i)` (Eq. 3)."""
    distance, key_scale, row_scale = tables["distance"], tables["key_scale"], tables["row_scale"]

    def weights(query: Tensor, key: Tensor, lag: Tensor) -> Tensor:
        far = distance[:, lag].to(row_scale.dtype)[:, None]
        return far * key_scale[:, key][:, :, None] * row_scale[:, query][..., None]

    return weights


def rows_beside(
    value: Tensor, heads: tuple[int, ...], tables: Tables, rows: Rows, live: Callable[[], Tensor] | None
) -> Tensor:
    """Return what `Toeplitz.forward_rows` does, from kernels; a captured graph runs the first one beside `live()`."""
    count = parts_of(value.shape[0] * len(set(heads)), value.shape[-2])
    own = tables["distance"], tables["key_scale"], tables["row_scale"]
    moves = isinstance(rows.first, Tensor)
    first, place = (rows.first, 0) if moves else (None, rows.first)
    where = first, place, rows.start, rows.count
    value = unit_stride(value)
    parts = frozen_rows(value, list(heads), *own, *where, count, live is not None)
    return join_rows(parts, value, first, rows.start, None if live is None else unit_stride(live()))


def parts_of(groups: int, length: int) -> int:
    """Return into how many stretches the keys of each of `groups` are cut."""
    return max(1, min(-(-length // STRETCH), PROGRAMS // groups))


@operator("saf::frozen_rows")
def frozen_rows(
    value: Tensor,
    heads: list[int],
    distance: Tensor,
    key_scale: Tensor,
    row_scale: Tensor,
    first: Tensor | None,
    place: int,
    start: Tensor | None,
    rows: int,
    parts: int,
    has_live: bool,
) -> Tensor:
    """Return rows of `P V` summed over each of `parts` stretches of keys, `[parts, B, F, rows, D]` float32.

    `value [B, H_kv, T, D]`; `heads` names the value head of each frozen slot; tables are those of `prepare`. The rows
    begin at `first` (`[]`, on the device) or else at `place`; `start` is as in `Rows`.
    """
    from saf.ops.toeplitz.row_kernels import sum_rows

    out = _parts_like(value, len(heads), rows, parts)
    at = first, place, start
    groups = head_groups(tuple(heads), value.device)
    precision = float32_products() if value.dtype == torch.float32 else "ieee"
    with beside(value.device) if has_live else nullcontext():
        sum_rows(value, groups, distance, key_scale, row_scale, *at, out, precision=precision)
    return out


@torch.library.register_fake("saf::frozen_rows")
def _(value, heads, distance, key_scale, row_scale, first, place, start, rows, parts, has_live) -> Tensor:
    return _parts_like(value, len(heads), rows, parts)


def _parts_like(value: Tensor, heads: int, rows: int, parts: int) -> Tensor:
    return value.new_empty(parts, value.shape[0], heads, rows, value.shape[-1], dtype=torch.float32)


@cache
def head_groups(heads: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the value heads that frozen slots read, `[U]`, and the slots that read each, `[U, G]`, -1 for none.

    Sent to the device once: it must be known before a CUDA graph is captured, as the passes before see to.
    """
    read = sorted(set(heads))
    slots = [[slot for slot, head in enumerate(heads) if head == one] for one in read]
    most = max(map(len, slots))
    filled = [each + [-1] * (most - len(each)) for each in slots]
    return tuple(torch.tensor(made, dtype=torch.int32, device=device) for made in (read, filled))  # type: ignore[return-value]


@operator("saf::join_rows")
def join_rows(parts: Tensor, value: Tensor, first: Tensor | None, start: Tensor | None, live: Tensor | None) -> Tensor:
    """Return live heads `[B, L, rows, D]` and then the sums of `parts [S, B, F, rows, D]`, stored as `[B, rows, H, D]`.

    The other arguments are those of `saf::frozen_rows`, whose dtype of values the result has: named here too, their
    memory is not used again before the streams have met.
    """
    from saf.ops.toeplitz.row_kernels import add_parts

    meet(parts.device)
    out = _joint_like(parts, value, live)
    add_parts(parts, live, out)
    return out


@torch.library.register_fake("saf::join_rows")
def _(parts, value, first, start, live) -> Tensor:
    return _joint_like(parts, value, live)


def _joint_like(parts: Tensor, like: Tensor, live: Tensor | None) -> Tensor:
    _, batch, frozen, rows, dim = parts.shape
    heads = frozen + (0 if live is None else live.shape[1])
    return parts.new_empty(batch, rows, heads, dim, dtype=like.dtype).transpose(1, 2)
