"""Launching the fused kernels: the written rule that cuts them into programs, checks, forward and backward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saf.errors import InputError
from saf.ops.fused.kernels import delta_kernel, fused_forward_kernel, key_block_kernel, query_block_kernel
from saf.ops.fused.tables import PAD, FusedPatterns, HeadMaps, read_tables
from saf.ops.heads import heads_like
from saf.ops.launch import MOST, PreparedLaunch, cdiv, launch
from saf.ops.live import score_scale
from saf.ops.operator import layout_of

FEW_ROWS = 49_152
FEW_PAIRS = FEW_ROWS * 1024
"""B x H x T, and B x H x T x T, up to either of which few programs are launched, in smaller blocks of queries.

Up to the first, blocks of 128 queries number less than three a multiprocessor of an H200 (384 on 132). Around the
limits the two sizes of blocks came within 1.5% of one another (docs/log.md).
"""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Hold the block sizes of one kernel.

    Attributes:
        block_m: query positions.
        block_n: key positions.
        num_warps: warps a program.
        num_stages: depth of the software pipeline.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __post_init__(self):
        """Raise InputError for sizes the kernels do not have."""
        for size in (self.block_m, self.block_n):
            if size & (size - 1) or not 16 <= size <= 128:
                raise InputError(f"blocks must be powers of two from 16 to 128, got {self.block_m} and {self.block_n}")


@dataclass(frozen=True)
class FusedConfig:
    """Hold the block sizes of the three fused kernels: forward, key blocks (dV and dK), query blocks (dQ)."""

    forward: Blocks
    keys: Blocks
    queries: Blocks


def few_programs(rows: int, length: int) -> bool:
    """Return whether `rows` B x H x T of sequences of `length` leave multiprocessors idle in large blocks."""
    return rows <= FEW_ROWS or rows * length <= FEW_PAIRS


def choose_fused_config(*, dim: int, dtype: torch.dtype, grouped: bool = False, few: bool = False) -> FusedConfig:
    """Pick block sizes by rule: the fastest of those tried on an H200 with some heads frozen (docs/log.md).

    Args:
        dim: channels D.
        dtype: of the operands.
        grouped: whether a value head serves several heads; the loop over them takes registers in the backward.
        few: whether the forward pass has few programs (`few_programs`); they take smaller blocks of queries.
    """
    if dtype == torch.float32:
        small = Blocks(
            block_m=32 if dim <= 64 else 16,
            block_n=32 if dim <= 128 else 16,
            num_warps=4 if dim <= 64 else 8,
            num_stages=1,
        )
        return FusedConfig(forward=small, keys=small, queries=small)
    queries = Blocks(block_m=128, block_n=64, num_warps=8, num_stages=3)
    if dim <= 64:
        keys = Blocks(block_m=128, block_n=64, num_warps=4, num_stages=2)
        if grouped:
            keys = Blocks(block_m=64, block_n=64, num_warps=4, num_stages=1)
        block_m = 64 if few else 128
        return FusedConfig(Blocks(block_m=block_m, block_n=64, num_warps=4, num_stages=3), keys, queries)
    if dim <= 128:
        keys = Blocks(block_m=64, block_n=128, num_warps=8, num_stages=2)
        if grouped:
            keys = Blocks(block_m=32, block_n=64, num_warps=4, num_stages=2)
        return FusedConfig(Blocks(block_m=64, block_n=64, num_warps=4, num_stages=3), keys, queries)
    return FusedConfig(
        forward=Blocks(block_m=64, block_n=64, num_warps=8, num_stages=1),
        keys=Blocks(block_m=32, block_n=32, num_warps=8, num_stages=1),
        queries=Blocks(block_m=32, block_n=32, num_warps=4, num_stages=1),
    )


LOG2E = 1.4426950408889634
"""1 / log 2: the kernels' exponentials are powers of two."""


def padded(dim: int) -> int:
    """Return channels rounded up to a power of two that matrix units take."""
    return max(16, 1 << (dim - 1).bit_length())


def pattern_strides(patterns: FusedPatterns) -> tuple[int, ...]:
    """Return the patterns' strides in the order the kernels take them."""
    return (patterns.alpha.stride(0), *patterns.band.stride()[:2], *patterns.dense.stride()[:2])


def state_constants(maps: HeadMaps) -> dict[str, bool]:
    """Return which kinds of heads a layer has; code for absent kinds is left out."""
    return dict(zip(("HAS_LIVE", "HAS_COMPACT", "HAS_DENSE"), (count > 0 for count in maps.counts), strict=True))


def block_constants(blocks: Blocks, length: int, dim: int, *, pad: bool = True) -> dict[str, Any]:
    """Return the compile-time arguments that follow from block sizes and shape; float32 products are exact."""
    even = length % max(blocks.block_m, blocks.block_n) == 0
    constants = {
        "D": dim,
        "DP": padded(dim),
        "BM": blocks.block_m,
        "BN": blocks.block_n,
        "EVEN": even,
        "PRECISION": "ieee",
        "STAGES": blocks.num_stages,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }
    return constants | ({"PAD": PAD} if pad else {})


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


def fused_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    maps: HeadMaps,
    patterns: FusedPatterns,
    *,
    scale: float | None = None,
    config: FusedConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Mix all heads of a layer in one launch.

    Args:
        query: [B, L, T, D] of live heads, unit stride in D, any other strides; so for all tensors below.
        key: [B, K, T, D], the key heads that live heads use.
        value: [B, H_kv, T, D].
        maps: states and slots of the H heads.
        patterns: of the frozen heads, for at least T positions.
        scale: of the live heads' scores; default 1 / sqrt(D).
        config: block sizes; default: `choose_fused_config`.

    Returns:
        The output [B, H, T, D] in head order, laid out as [B, T, H, D], and the live heads' row log-sum-exps
        [B, L, T], float32, nats.

    Raises:
        InputError: shapes, strides or dtypes that do not fit together.
    """
    result = heads_like(value, maps.state.numel())
    lse = log_sums_like(value, maps.counts[0])
    known = (maps.counts, scale, config, *map(layout_of, (query, key, value, *patterns)))
    plan = _plans.get(known)
    if plan is None:
        if len(_plans) >= MOST:
            _plans.clear()
        plan = _plans[known] = plan_forward(query, key, value, result, maps, patterns, scale, config)
    plan(query, key, value, result, lse, *forward_tables(maps, patterns))
    return result, lse


def log_sums_like(value: Tensor, live: int) -> Tensor:
    """Return uninitialised memory for the row log-sum-exps of `live` heads beside `value [B, H_kv, T, D]`."""
    return value.new_empty(value.shape[0], live, value.shape[2], dtype=torch.float32)


@torch.library.triton_op("saf::fused_visible", mutates_args=())
def visible_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    maps: list[Tensor],
    patterns: list[Tensor],
    counts: list[int],
    grouped: bool,
    scale: float,
) -> Tensor:
    """Do `fused_forward`, its output alone, as an operator that a compiler looks into and whose kernel it launches.

    Called from Python, or from an exported program, which keeps the operator, it takes the host longer than
    `saf::fused`, whose arguments these are. The channels of query, key and value have unit stride.
    """
    head_maps, fixed = read_tables(maps, patterns, counts, grouped)
    result = heads_like(value, sum(counts))
    grid, numbers, constants = forward_arguments(query, key, value, result, head_maps, fixed, scale)
    tensors = query, key, value, result, log_sums_like(value, counts[0]), *forward_tables(head_maps, fixed)
    torch.library.wrap_triton(fused_forward_kernel)[grid](*tensors, *numbers, **constants)
    return result


def forward_tables(maps: HeadMaps, patterns: FusedPatterns) -> tuple[Tensor, ...]:
    """Return what the forward kernel reads besides the operands, in its order."""
    return maps.state, maps.query, maps.key, maps.value, maps.pattern, *patterns


_plans: dict[tuple[Any, ...], Callable[..., None]] = {}
"""Forward launches by all they depend on but memory."""


def plan_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    maps: HeadMaps,
    patterns: FusedPatterns,
    scale: float | None,
    config: FusedConfig | None,
) -> Callable[..., None]:
    """Check operands and return what mixes all of their layout: called with them, result, log-sum-exps and tables."""
    check_operands(query, key, value, maps, patterns)
    if result.numel() == 0:
        return lambda *_: None
    grid, numbers, constants = forward_arguments(query, key, value, result, maps, patterns, scale, config)
    return PreparedLaunch(fused_forward_kernel, grid, *numbers, **constants, device=value.device)


def forward_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    maps: HeadMaps,
    patterns: FusedPatterns,
    scale: float | None = None,
    config: FusedConfig | None = None,
) -> tuple[tuple[int, int], tuple[float, ...], dict[str, Any]]:
    """Return the forward's grid, the numbers that follow its tensors, and its compile-time arguments."""
    batch, _, length, dim = value.shape
    heads = maps.state.numel()
    few = few_programs(batch * heads * length, length)
    blocks = (config or choose_fused_config(dim=dim, dtype=value.dtype, few=few)).forward
    numbers = (
        heads, maps.counts[0], length, score_scale(scale, dim) * LOG2E,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *result.stride()[:3], *pattern_strides(patterns),
    )  # fmt: skip
    constants = block_constants(blocks, length, dim) | state_constants(maps)
    return (batch * heads, cdiv(length, blocks.block_m)), numbers, constants


def fused_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    maps: HeadMaps,
    patterns: FusedPatterns,
    *,
    scale: float | None = None,
    config: FusedConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `fused_forward` with respect to query, key and value.

    Args:
        grad: [B, H, T, D], of the output.
        query: as in the forward.
        key: as in the forward.
        value: as in the forward.
        out: the forward's output.
        lse: the forward's row log-sum-exps.
        maps: as in the forward.
        patterns: as in the forward.
        scale: as in the forward.
        config: block sizes; default: `choose_fused_config`.

    Returns:
        dQ [B, L, T, D], dK [B, K, T, D], dV [B, H_kv, T, D], each laid out as [B, T, heads, D]. Deterministic.

    Raises:
        InputError: shapes, strides or dtypes that do not fit together.
    """
    batch, num_value_heads, length, dim = value.shape
    live = maps.counts[0]
    check_operands(query, key, value, maps, patterns)
    if grad.shape != out.shape or grad.shape != (batch, maps.state.numel(), length, dim) or grad.stride(-1) != 1:
        raise InputError(f"grad must be {tuple(out.shape)} with unit stride in D, got {tuple(grad.shape)}")
    dq, dk, dv = heads_like(query, live), heads_like(key, key.shape[1]), heads_like(value, num_value_heads)
    if dv.numel() == 0:
        return dq, dk, dv
    blocks = config or choose_fused_config(dim=dim, dtype=value.dtype, grouped=maps.grouped)
    delta = torch.empty_like(lse)
    common: dict[str, Any] = {"device": value.device}
    if live:
        launch(
            delta_kernel, (batch * live, cdiv(length, 64)), out, grad, delta, maps.live, live, length,
            *out.stride()[:3], *grad.stride()[:3],
            D=dim, DP=padded(dim), BM=64, num_warps=4, **common,
        )  # fmt: skip
    launch(
        key_block_kernel, (batch * num_value_heads, cdiv(length, blocks.keys.block_n)),
        query, key, value, grad, lse, delta, dk, dv,
        maps.state, maps.query, maps.key, maps.pattern, maps.group_start, maps.group_heads,
        patterns.alpha, patterns.band, patterns.log_z, patterns.dense,
        num_value_heads, live, length, score_scale(scale, dim),
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad.stride()[:3],
        *dk.stride()[:3], *dv.stride()[:3], *pattern_strides(patterns),
        **block_constants(blocks.keys, length, dim), **state_constants(maps), GROUPED=maps.grouped,
        **common,
    )  # fmt: skip
    if live:
        launch(
            query_block_kernel, (batch * live, cdiv(length, blocks.queries.block_m)),
            query, key, value, grad, lse, delta, dq, maps.live, maps.key, maps.value,
            live, length, score_scale(scale, dim),
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad.stride()[:3], *dq.stride()[:3],
            **block_constants(blocks.queries, length, dim, pad=False), **common,
        )  # fmt: skip
    return dq, dk, dv
