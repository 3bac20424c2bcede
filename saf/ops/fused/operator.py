"""The registered operators `saf::fused` and `saf::fused_backward`: live and frozen heads of a layer in one launch."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from saf.ops.fused.tables import read_tables
from saf.ops.heads import heads_like, unit_stride
from saf.ops.operator import forbid_second_derivative, operator


@cache
def _launchers() -> tuple[Any, Any]:
    """Return the launchers; an import in every call would cost the host more than it does."""
    from saf.ops.fused.launch import fused_backward, fused_forward

    return fused_forward, fused_backward


@operator("saf::fused")
def fused_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    maps: list[Tensor],
    patterns: list[Tensor],
    counts: list[int],
    grouped: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Mix all heads of a layer, head order kept: `[B, H, T, D]`, and the live heads' row log-sum-exps `[B, L, T]`.

    `query [B, L, T, D]`, `key [B, K, T, D]`, `value [B, H_kv, T, D]`; `maps` and `patterns` in the order of `MAPS` and
    `PATTERNS`; `counts` of live, compact and dense heads. The paper's execution (its kernel appendix).
    """
    query, key, value = (unit_stride(x) for x in (query, key, value))
    head_maps, fixed = read_tables(maps, patterns, counts, grouped)
    return _launchers()[0](query, key, value, head_maps, fixed, scale=scale)


@torch.library.register_fake("saf::fused")
def _(query, key, value, maps, patterns, counts, grouped, scale):
    batch, live, length, _ = query.shape
    return heads_like(value, sum(counts)), value.new_empty(batch, live, length, dtype=torch.float32)


@operator("saf::fused_backward")
def fused_product_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sums: Tensor,
    maps: list[Tensor],
    patterns: list[Tensor],
    counts: list[int],
    grouped: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients to query, key and value: key-block programs, then a query-block pass for live heads."""
    gradient, query, key, value = (unit_stride(x) for x in (gradient, query, key, value))
    head_maps, fixed = read_tables(maps, patterns, counts, grouped)
    return _launchers()[1](gradient, query, key, value, output, log_sums, head_maps, fixed, scale=scale)


@torch.library.register_fake("saf::fused_backward")
def _(gradient, query, key, value, output, log_sums, maps, patterns, counts, grouped, scale):
    return tuple(heads_like(x, x.shape[1]) for x in (query, key, value))


def _setup(ctx, inputs, output) -> None:
    """Keep what the backward pass reads."""
    query, key, value, maps, patterns, ctx.counts, ctx.grouped, ctx.scale = inputs
    ctx.num_maps = len(maps)
    ctx.save_for_backward(query, key, value, *output, *maps, *patterns)


def _backward(ctx, gradient: Tensor, _):
    """Return the gradients to query, key and value; tables have none."""
    forbid_second_derivative()
    query, key, value, output, log_sums, *tables = ctx.saved_tensors
    maps, patterns = tables[: ctx.num_maps], tables[ctx.num_maps :]
    rest = (maps, patterns, ctx.counts, ctx.grouped, ctx.scale)
    gradients = fused_product_backward(gradient, query, key, value, output, log_sums, *rest)
    return (*gradients, [None] * len(maps), [None] * len(patterns), None, None, None)


torch.library.register_autograd("saf::fused", _backward, setup_context=_setup)
