"""The registered operator `saf::inference`: a layer's heads and their output product behind one boundary, no gradients.

How they are launched is decided in the call, so that compiled code has no guards on it: few tokens take one launch for
all heads (`few_tokens`), more of them two (`side_by_side`).
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saf.ops.few_tokens import are_few
from saf.ops.fused_operator import run_fused
from saf.ops.operator import operator
from saf.ops.side_by_side import projected_like, run_side_by_side
from saf.ops.slots import flat_heads, heads_like

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
    heads = len(live_heads) + len(frozen_heads)
    one = bool(maps) and are_few(value, heads, replayed=replayed)
    projected = projection is not None
    if not one or (not replayed and _may_be_captured(query, key, value, heads, projected=projected)):
        slots = tuple(live_heads), tuple(frozen_heads)
        result = run_side_by_side(
            query, key, value, *slots, table, before, after, scale, kernel, projection, replayed=replayed
        )
    if one:
        read = max(*live_heads, *frozen_heads) + 1
        value = (
            value if read == value.shape[1] else value[:, :read]
        )  # the maps know the heads that slots read, no others
        scale = 1 / math.sqrt(value.shape[-1]) if scale is None else scale
        joined = run_fused(query, key, value, maps, patterns, counts, grouped, scale)[0]
        result = joined if projection is None else F.linear(flat_heads(joined), projection)
    return result


_called: set[tuple[Any, ...]] = set()
"""Layouts that calls take one launch for and graphs two, called before."""


def _may_be_captured(query: Tensor, key: Tensor, value: Tensor, heads: int, *, projected: bool) -> bool:
    """Whether a graph would launch other kernels than this call, the first of its layout.

    They must run before: nothing can be compiled during a capture.
    """
    if are_few(value, heads, replayed=True):
        return False
    layout = heads, projected, key.shape, query.shape, value.shape, value.stride(), value.dtype, value.device
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
