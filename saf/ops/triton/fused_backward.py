"""Launchers of the fused backward: dot products of outputs and gradients, key blocks, query blocks."""

from typing import Any

import torch
from torch import Tensor

from saf.errors import InputError
from saf.ops.slots import heads_like
from saf.ops.triton.fused_arguments import (
    block_constants,
    check_operands,
    padded,
    pattern_strides,
    scores_scale,
    state_constants,
)
from saf.ops.triton.fused_backward_kernel import delta_kernel, key_block_kernel, query_block_kernel
from saf.ops.triton.fused_config import FusedConfig, choose_fused_config
from saf.ops.triton.fused_tables import FusedPatterns, HeadMaps
from saf.ops.triton.launch import cdiv, launch


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
    precision: str = "ieee",
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
        precision: as in the forward.

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
        num_value_heads, live, length, scores_scale(scale, dim),
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad.stride()[:3],
        *dk.stride()[:3], *dv.stride()[:3], *pattern_strides(patterns),
        **block_constants(blocks.keys, length, dim, precision), **state_constants(maps), GROUPED=maps.grouped,
        **common,
    )  # fmt: skip
    if live:
        launch(
            query_block_kernel, (batch * live, cdiv(length, blocks.queries.block_m)),
            query, key, value, grad, lse, delta, dq, maps.live, maps.key, maps.value,
            live, length, scores_scale(scale, dim),
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad.stride()[:3], *dq.stride()[:3],
            **block_constants(blocks.queries, length, dim, precision, pad=False), **common,
        )  # fmt: skip
    return dq, dk, dv
