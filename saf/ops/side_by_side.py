"""The registered operator `saf::side_by_side`: live and frozen heads of a layer behind one boundary, for inference.

In a CUDA graph they run at the same time, on two streams: with few sequences neither launch fills the device, and run
after one another they leave it half empty.
"""

from functools import cache

import torch
from torch import Tensor

from saf.ops.availability import uses_triton
from saf.ops.live import live_attention
from saf.ops.operator import operator
from saf.ops.slots import project_heads
from saf.ops.toeplitz_operator import kernel_product, toeplitz_product


def overlaps(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the operator gains anything: on CUDA, where the product is a kernel."""
    return device.type == "cuda" and uses_triton(device, dtype)


@operator("saf::side_by_side")
def side_by_side(
    query: Tensor,
    key: Tensor,
    live_value: Tensor,
    value: Tensor,
    table: Tensor,
    before: Tensor,
    after: Tensor,
    scale: float | None,
    kernel: str,
    projection: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return live heads' attention `[B, L, T, D]` and the Toeplitz product of `value`, `[B, F, T, D]`.

    Arguments are those of `live_attention` and `saf::toeplitz`. Both results are stored as `[B, T, heads, D]`. With
    `projection [C, H * D]` the second is what its last columns make of the product, `[B, T, C]`.
    """
    if not overlaps(query.device, value.dtype):
        live = live_attention(query, key, live_value, scale=scale, kernel=kernel)
        mixed = toeplitz_product(value, table, before, after, False)
        return _by_position(live), project_heads(_by_position(mixed), projection)
    if not torch.cuda.is_current_stream_capturing():
        # Where the host launches every kernel itself, a second stream costs it more than the device gains. It is made
        # now, so that what matrix products keep for it lies in no graph's memory.
        _side_stream(query.device)
        mixed = project_heads(kernel_product(value, table, before, after, False), projection)
        return _by_position(live_attention(query, key, live_value, scale=scale, kernel=kernel)), mixed
    value = value if value.stride(-1) == 1 else value.contiguous()
    # Made on the stream that frees them: what the side stream reads and writes is used again only behind it.
    mixed = _new_by_position(value)
    result = mixed if projection is None else _new_projected(value, projection)
    main, side = torch.cuda.current_stream(query.device), _side_stream(query.device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        kernel_product(value, table, before, after, False, out=mixed)
        if projection is not None:
            mixed = mixed.transpose(1, 2).flatten(2)
            torch.matmul(mixed, projection[:, projection.shape[1] - mixed.shape[-1] :].t(), out=result)
    live = live_attention(query, key, live_value, scale=scale, kernel=kernel)
    main.wait_stream(side)
    return _by_position(live), result


@torch.library.register_fake("saf::side_by_side")
def _(
    query: Tensor,
    key: Tensor,
    live_value: Tensor,
    value: Tensor,
    table: Tensor,
    before: Tensor,
    after: Tensor,
    scale: float | None,
    kernel: str,
    projection: Tensor | None,
) -> tuple[Tensor, Tensor]:
    mixed = _new_by_position(value) if projection is None else _new_projected(value, projection)
    return _new_by_position(query), mixed


def _new_by_position(like: Tensor) -> Tensor:
    batch, heads, length, dim = like.shape
    return like.new_empty(batch, length, heads, dim).transpose(1, 2)


def _new_projected(like: Tensor, projection: Tensor) -> Tensor:
    return like.new_empty(like.shape[0], like.shape[2], projection.shape[0])


def _by_position(heads: Tensor) -> Tensor:
    """Give `[B, H, T, D]` the memory order `[B, T, H, D]`; nothing to do for what PyTorch's fast kernels return."""
    _, count, length, dim = heads.shape
    if heads.stride() == (length * count * dim, dim, count * dim, 1):
        return heads
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda.current_blas_handle()
    return stream
