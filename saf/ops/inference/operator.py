"""The registered operator `saf::inference`: a layer's heads and their output product behind one boundary, no gradients.

How they are launched is decided in the call, so that compiled code has no guards on it: few tokens take one launch for
all heads (`one_launch`), more of them two, attention for live heads and the Toeplitz product for frozen ones. While a
CUDA graph is captured the two run at the same time, on two streams: with few sequences neither launch fills the device,
and one after the other they leave it half empty. Called, a second stream costs the host more than the device gains.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saf.ops.heads import flat_heads, heads_like, live_keys, part_heads, projected, read_heads, widened
from saf.ops.inference.one_launch import OneLaunch, called_launch
from saf.ops.live import live_attention
from saf.ops.operator import operator, uses_triton
from saf.ops.streams import beside, meet
from saf.ops.toeplitz.operator import kernel_product, toeplitz_product


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
    replayed: bool,
) -> Tensor:
    """Return all heads in slot order, `[B, H, T, D]` stored as `[B, T, H, D]`; projected, `[B, T, C]`, where asked.

    `query [B, L, T, D]`, `key [B, K, T, D]`, `value [B, H_kv, T, D]`; `live_heads` and `frozen_heads` name the value
    head of each slot. `table`, `before` and `after` are of `saf::toeplitz`, `maps` to `grouped` of `saf::fused`, the
    lists empty where it cannot serve; `projection [C, H * D]`; `replayed` tells that a CUDA graph launches the kernels.
    """
    slots = tuple(live_heads), tuple(frozen_heads)
    launch = OneLaunch(maps, patterns, counts, grouped)
    if launch.serves(value, replayed=replayed):
        return projected(called_launch(query, key, read_heads(value, *slots), launch, scale), projection)

    def product(x: Tensor, out: Tensor) -> None:
        _write_product(x, (table, before, after), out)

    return two_launches(query, key, value, *slots, product, scale, kernel, projection)


@torch.library.register_fake("saf::inference")
def _(query, key, value, live_heads, frozen_heads, *rest: Any) -> Tensor:
    *_, projection, _ = rest
    heads = len(live_heads) + len(frozen_heads)
    return heads_like(value, heads) if projection is None else _projected_like(value, projection)


def two_launches(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    live_heads: tuple[int, ...],
    frozen_heads: tuple[int, ...],
    product: Callable[[Tensor, Tensor], object],
    scale: float | None,
    kernel: str,
    projection: Tensor | None,
) -> Tensor:
    """Return what `saf::inference` does, live heads from attention and frozen ones from `product(x, out)`.

    It writes the mix of values `x [B, F, T, D]`, those that frozen slots read, into `out`.
    """
    live_key, live_slots = live_keys(key, live_heads)
    live_value, frozen_value = part_heads(value, live_slots, frozen_heads)
    if projection is None:
        result = heads_like(value, len(live_heads) + len(frozen_heads))
        mixed = result[:, len(live_heads) :]
    else:
        result = _projected_like(value, projection)
        mixed = heads_like(value, len(frozen_heads))
    with beside(query.device):
        product(frozen_value, mixed)
        if projection is not None:
            torch.matmul(flat_heads(mixed), projection[:, len(live_heads) * value.shape[-1] :].t(), out=result)
    live = live_attention(query, live_key, live_value, scale=scale, kernel=kernel)
    meet(query.device)
    if projection is None:
        _write_heads(live, result)
    else:
        rows = flat_heads(live).flatten(0, 1)
        result.flatten(0, 1).addmm_(rows, projection[:, : rows.shape[1]].t())
    return result


def _write_heads(live: Tensor, result: Tensor) -> None:
    """Write live heads into the first slots of `result [B, H, T, D]`."""
    source, first = widened(live), result[:, : live.shape[1]]
    target = widened(first)
    if source.dtype == target.dtype:
        target.copy_(source)
    else:
        first.copy_(live)


def _projected_like(value: Tensor, projection: Tensor) -> Tensor:
    """Return uninitialised memory for what `projection [C, H * D]` makes of heads of `value`, `[B, T, C]`."""
    return value.new_empty(value.shape[0], value.shape[2], projection.shape[0])


def _write_product(x: Tensor, tables: tuple[Tensor, Tensor, Tensor], out: Tensor) -> None:
    """Write `saf::toeplitz` of values that frozen slots read into `out`."""
    if uses_triton(x.device, x.dtype):
        kernel_product(x, *tables, False, out=out)
    else:
        out.copy_(toeplitz_product(x, *tables, False))
