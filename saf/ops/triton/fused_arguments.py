"""What the fused kernels' launches have in common: compile-time arguments, strides, checks."""

from typing import Any

import torch
from torch import Tensor

from saf.errors import InputError
from saf.ops.triton.fused_config import Blocks
from saf.ops.triton.fused_tables import FusedPatterns, HeadMaps
from saf.ops.triton.tables import PAD

LOG2E = 1.4426950408889634
"""1 / log 2: the kernels' exponentials are powers of two."""


def scores_scale(scale: float | None, dim: int) -> float:
    """Return the scale of scores, by default 1 / sqrt(D)."""
    return dim**-0.5 if scale is None else float(scale)


def padded(dim: int) -> int:
    """Channels rounded up to a power of two that matrix units take."""
    return max(16, 1 << (dim - 1).bit_length())


def pattern_strides(patterns: FusedPatterns) -> tuple[int, ...]:
    """Return the patterns' strides in the order the kernels take them."""
    return (patterns.alpha.stride(0), *patterns.band.stride()[:2], *patterns.dense.stride()[:2])


def state_constants(maps: HeadMaps) -> dict[str, bool]:
    """Return which kinds of heads a layer has; code for absent kinds is left out."""
    return dict(zip(("HAS_LIVE", "HAS_COMPACT", "HAS_DENSE"), (count > 0 for count in maps.counts), strict=True))


def block_constants(blocks: Blocks, length: int, dim: int, precision: str, *, pad: bool = True) -> dict[str, Any]:
    """Return the compile-time arguments that follow from block sizes and shape."""
    even = length % max(blocks.block_m, blocks.block_n) == 0
    constants = {
        "D": dim,
        "DP": padded(dim),
        "BM": blocks.block_m,
        "BN": blocks.block_n,
        "EVEN": even,
        "PRECISION": precision,
        "STAGES": blocks.num_stages,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }
    limit = {"maxnreg": blocks.max_registers} if blocks.max_registers else {}
    return constants | limit | ({"PAD": PAD} if pad else {})


def check_operands(query: Tensor, key: Tensor, value: Tensor, maps: HeadMaps, patterns: FusedPatterns) -> None:
    """Raise InputError unless operands, maps and patterns fit together."""
    batch, _, length, dim = value.shape
    live, compact, dense = maps.counts
    if query.shape != (batch, live, length, dim):
        raise InputError(f"query must be {(batch, live, length, dim)}, one slot a live head, got {tuple(query.shape)}")
    if (key.shape[0], *key.shape[2:]) != (batch, length, dim):
        raise InputError(f"key must be [{batch}, K, {length}, {dim}], got {tuple(key.shape)}")
    if not query.dtype == key.dtype == value.dtype or value.dtype == torch.float64:
        raise InputError(f"query, key and value must share a 16- or 32-bit dtype, got {query.dtype}, {value.dtype}")
    if any(tensor.numel() and tensor.stride(-1) != 1 for tensor in (query, key, value)):
        raise InputError("the channels of query, key and value must have stride 1; pass contiguous tensors")
    for name, count, have in (
        ("compact", compact, patterns.alpha.shape),
        ("dense", dense, patterns.dense.shape),
    ):
        if count and (have[0] != count or have[1] < length):
            raise InputError(f"{count} {name} heads of {length} positions need as many patterns, got {tuple(have)}")
