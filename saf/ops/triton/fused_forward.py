"""Launcher of the fused forward: one launch a layer, whatever its mix of heads."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saf.errors import InputError
from saf.ops.operator import layout_of
from saf.ops.slots import heads_like
from saf.ops.triton.fused_arguments import (
    LOG2E,
    block_constants,
    check_operands,
    pattern_strides,
    scores_scale,
    state_constants,
)
from saf.ops.triton.fused_config import FusedConfig, choose_fused_config, few_programs
from saf.ops.triton.fused_forward_kernel import fused_forward_kernel
from saf.ops.triton.fused_tables import FusedPatterns, HeadMaps
from saf.ops.triton.launch import MOST, PreparedLaunch, cdiv


def fused_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    maps: HeadMaps,
    patterns: FusedPatterns,
    *,
    scale: float | None = None,
    out: Tensor | None = None,
    config: FusedConfig | None = None,
    precision: str = "ieee",
) -> tuple[Tensor, Tensor]:
    """Mix all heads of a layer in one launch.

    Args:
        query: [B, L, T, D] of live heads, unit stride in D, any other strides; so for all tensors below.
        key: [B, K, T, D], the key heads that live heads use.
        value: [B, H_kv, T, D].
        maps: states and slots of the H heads.
        patterns: of the frozen heads, for at least T positions.
        scale: of the live heads' scores; default 1 / sqrt(D).
        out: [B, H, T, D] view to write into; default: new memory laid out as [B, T, H, D].
        config: block sizes; default: `choose_fused_config`.
        precision: of float32 products: "ieee", "tf32" or "tf32x3".

    Returns:
        The output [B, H, T, D] in head order, and the live heads' row log-sum-exps [B, L, T], float32, nats.

    Raises:
        InputError: shapes, strides or dtypes that do not fit together.
    """
    result = heads_like(value, maps.state.numel()) if out is None else out
    lse = log_sums_like(value, maps.counts[0])
    layouts = map(layout_of, (query, key, value, *patterns))
    known = (maps.counts, scale, config, precision, None if out is None else layout_of(out), *layouts)
    plan = _plans.get(known)
    if plan is None:
        if len(_plans) >= MOST:
            _plans.clear()
        plan = _plans[known] = plan_forward(query, key, value, result, maps, patterns, scale, config, precision)
    plan(query, key, value, result, lse, *forward_tables(maps, patterns))
    return result, lse


def log_sums_like(value: Tensor, live: int) -> Tensor:
    """Return uninitialised memory for the row log-sum-exps of `live` heads beside `value [B, H_kv, T, D]`."""
    return value.new_empty(value.shape[0], live, value.shape[2], dtype=torch.float32)


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
    *settings: Any,
) -> Callable[..., None]:
    """Check operands and return what mixes all of their layout: called with them, result, log-sum-exps and tables.

    `settings` are those of `forward_arguments`: scale, config, precision.
    """
    batch, _, length, dim = value.shape
    heads = maps.state.numel()
    check_operands(query, key, value, maps, patterns)
    if result.shape != (batch, heads, length, dim) or result.dtype != value.dtype or result.stride(-1) != 1:
        raise InputError(f"out must be {(batch, heads, length, dim)} {value.dtype} with unit stride in D")
    if result.numel() == 0:
        return lambda *_: None
    grid, numbers, constants = forward_arguments(query, key, value, result, maps, patterns, *settings)
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
    precision: str = "ieee",
) -> tuple[tuple[int, int], tuple[float, ...], dict[str, Any]]:
    """Return the forward's grid, the numbers that follow its tensors, and its compile-time arguments."""
    batch, _, length, dim = value.shape
    heads = maps.state.numel()
    few = few_programs(batch * heads * length, length)
    blocks = (config or choose_fused_config(dim=dim, dtype=value.dtype, few=few)).forward
    numbers = (
        heads, maps.counts[0], length, scores_scale(scale, dim) * LOG2E,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *result.stride()[:3], *pattern_strides(patterns),
    )  # fmt: skip
    constants = block_constants(blocks, length, dim, precision) | state_constants(maps)
    return (batch * heads, cdiv(length, blocks.block_m)), numbers, constants
