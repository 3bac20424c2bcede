"""Live heads from attention and frozen ones from the Toeplitz product, without gradients.

In a CUDA graph they run at the same time, on two streams: with few sequences neither launch fills the device, and run
after one another they leave it half empty. Called, a second stream costs the host more than the device gains.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from saf.ops.heads import flat_heads, heads_like, live_keys, part_heads
from saf.ops.live import live_attention
from saf.ops.operator import uses_triton
from saf.ops.toeplitz.operator import kernel_product, toeplitz_product


def run_side_by_side(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    live_heads: tuple[int, ...],
    frozen_heads: tuple[int, ...],
    table: Tensor,
    before: Tensor,
    after: Tensor,
    scale: float | None,
    kernel: str,
    projection: Tensor | None,
    *,
    replayed: bool,
) -> Tensor:
    """Return what `saf::inference` does, live heads from attention and frozen ones from the Toeplitz product.

    Where a graph is captured (`replayed`) they run at the same time.
    """
    live_key, live_slots = live_keys(key, live_heads)
    live_value, frozen_value = part_heads(value, live_slots, frozen_heads)
    if projection is None:
        result = heads_like(value, len(live_heads) + len(frozen_heads))
        mixed = result[:, len(live_heads) :]
    else:
        result = projected_like(value, projection)
        mixed = heads_like(value, len(frozen_heads))
    # Memory was made on the stream that frees it: what the other one reads and writes is used again only behind it.
    with _other_stream(query.device, replayed=replayed):
        _product(frozen_value, table, before, after, mixed)
        if projection is not None:
            torch.matmul(flat_heads(mixed), projection[:, len(live_heads) * value.shape[-1] :].t(), out=result)
    live = live_attention(query, live_key, live_value, scale=scale, kernel=kernel)
    if replayed:
        torch.cuda.current_stream(query.device).wait_stream(_side_stream(query.device))
    if projection is None:
        result[:, : len(live_heads)] = live
    else:
        rows = flat_heads(live).flatten(0, 1)
        result.flatten(0, 1).addmm_(rows, projection[:, : rows.shape[1]].t())
    return result


def projected_like(value: Tensor, projection: Tensor) -> Tensor:
    """Return uninitialised memory for what `projection [C, H * D]` makes of heads of `value`, `[B, T, C]`."""
    return value.new_empty(value.shape[0], value.shape[2], projection.shape[0])


def _product(x: Tensor, table: Tensor, before: Tensor, after: Tensor, out: Tensor) -> None:
    """Write `saf::toeplitz` of values that frozen slots read into `out`."""
    if uses_triton(x.device, x.dtype):
        kernel_product(x, table, before, after, False, out=out)
    else:
        out.copy_(toeplitz_product(x, table, before, after, False))


def _other_stream(device: torch.device, *, replayed: bool) -> AbstractContextManager[Any]:
    """Return a context in which a captured graph branches off; made before, in calls: cuBLAS keeps memory for it."""
    if device.type != "cuda":
        return nullcontext()
    side = _side_stream(device)
    if not replayed:
        return nullcontext()
    side.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(side)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda.current_blas_handle()
    return stream
