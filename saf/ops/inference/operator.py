"""The registered operator `saf::inference`: a layer's heads and their output product behind one boundary, no gradients.

How they are launched is decided in the call, so that compiled code has no guards on it: few tokens take one launch for
all heads (`few_tokens`), more of them two (`side_by_side`).
"""

from typing import Any

import torch
from torch import Tensor

from saf.ops.heads import heads_like, projected, read_heads
from saf.ops.inference.one_launch import OneLaunch, are_few, run_launch
from saf.ops.inference.two_launches import projected_like, run_side_by_side
from saf.ops.operator import layout_of, operator

MOST = 4096


@operator("saf::inference")
def inference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    live_heads: list[int],
    frozen_heads: list[int],
    table: Tensor,
    before: Tensor,
    after: Tensor,
    maps: list[Tensor],
    patterns: list[Tensor],
    counts: list[int],
    grouped: bool,
    scale: float | None,
    kernel: str,
    projection: Tensor | None,
) -> Tensor:
    """Return all heads in slot order, `[B, H, T, D]` stored as `[B, T, H, D]`; projected, `[B, T, C]`, where asked.

    `query [B, L, T, D]`, `key [B, K, T, D]`, `value [B, H_kv, T, D]`; `live_heads` and `frozen_heads` name the value
    head of each slot. `table`, `before` and `after` are of `saf::toeplitz`, `maps` to `grouped` of `saf::fused`, the
    lists empty where it cannot serve; `projection [C, H * D]`.
    """
    replayed = query.is_cuda and torch.cuda.is_current_stream_capturing()
    slots = tuple(live_heads), tuple(frozen_heads)
    tables = table, before, after
    launch = OneLaunch(maps, patterns, counts, grouped)
    one = launch.serves(value, replayed=replayed)
    if not one or (not replayed and _runs_both(query, key, value, slots, tables, alone=projection is None)):
        result = run_side_by_side(query, key, value, *slots, *tables, scale, kernel, projection, replayed=replayed)
    if one:
        result = projected(run_launch(query, key, read_heads(value, *slots), launch, scale), projection)
    return result


_called: set[tuple[Any, ...]] = set()
"""Layouts that calls take one launch for and graphs two, once called."""


def _runs_both(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slots: tuple[tuple[int, ...], tuple[int, ...]],
    tables: tuple[Tensor, ...],
    *,
    alone: bool,
) -> bool:
    """Whether a call in one launch also runs the kernels of a graph, which has two: the first of its layout does.

    Nothing can be compiled during a capture. The layout is all that those kernels are compiled for; `alone`, no output
    product.
    """
    if are_few(value, sum(map(len, slots)), replayed=True):
        return False
    layout = (slots, alone, *map(layout_of, (query, key, value)), *((x.shape, x.stride()) for x in tables))
    if layout in _called:
        return False
    if len(_called) >= MOST:
        _called.clear()
    _called.add(layout)
    return True


@torch.library.register_fake("saf::inference")
def _(query, key, value, live_heads, frozen_heads, *rest: Any) -> Tensor:
    *_, projection = rest
    heads = len(live_heads) + len(frozen_heads)
    return heads_like(value, heads) if projection is None else projected_like(value, projection)
