"""The paper's execution: one Triton launch a layer for live and frozen heads, tiles of P rebuilt in registers.

It is the paper's row in every benchmark; `toeplitz` is faster. Whole sequences only: no decoding, no padding. Its
forward launch also serves few tokens of backend `toeplitz` without gradients (`mix_few`): a launch costs more than
the work in it there. In a CUDA graph of 1 x 512 a layer takes 3 us less than an ordinary one, and by two launches 10
us more, of 70 (124M, 25% frozen, H200; docs/log.md).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from saf.ops.backend import Backend, Tables, ValueHeads
from saf.ops.fused.tables import MAPS, PATTERNS, fused_tables, read_tables
from saf.ops.heads import heads_like, take_heads, unit_stride
from saf.ops.live import score_scale
from saf.ops.operator import TRITON_DTYPES, forbid_second_derivative, has_triton, operator
from saf.ops.positions import unpadded
from saf.patterns import Pattern


class Fused(Backend):
    """Execute frozen heads as the paper does, in one launch with live ones; its tables are those of `fused_tables`."""

    mixes_live = True
    dtypes = TRITON_DTYPES

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda" or not has_triton():
            return f"it needs a CUDA device and Triton, got {device.type}"
        return super().unsupported_reason(device, dtype)

    def describe(self, device: torch.device, dtype: torch.dtype) -> str:
        return "one Triton launch a layer for live and frozen heads (the paper's execution)"

    def prepare(
        self, patterns: Sequence[Pattern], dtypes: Sequence[torch.dtype], device: torch.device,
        kv_head: ValueHeads = None,
    ) -> dict[torch.dtype, Tables]:  # fmt: skip
        return {dtype: fused_tables(patterns, dtype, device, kv_head) for dtype in dtypes}

    def forward(self, value: Tensor, heads: tuple[int, ...], tables: Tables, left_pad: Tensor | None = None) -> Tensor:
        def alone(x: Tensor) -> Tensor:
            return fused_product(x[:, :0], x[:, :0], x, *_arguments(tables, "alone"), 1.0)[0]

        return unpadded(alone, take_heads(value, heads), left_pad)

    def mixed(self, query: Tensor, key: Tensor, value: Tensor, tables: Tables, scale: float | None) -> Tensor:
        factor = score_scale(scale, value.shape[-1])
        return fused_product(query, key, value, *_arguments(tables, "mixed"), factor)[0]


def _arguments(tables: Tables, heads: str, prefix: str = "") -> tuple[list[Tensor], list[Tensor], list[int], bool]:
    """Return maps, patterns, counts and whether heads are grouped, of frozen heads `alone` or of `mixed` ones."""
    maps = [tables[f"{prefix}{heads}_{name}"] for name in MAPS]
    patterns = [tables[prefix + name] for name in PATTERNS]
    return maps, patterns, list(tables[f"{prefix}{heads}_counts"]), tables[f"{prefix}{heads}_grouped"][0]


# --- few tokens of backend `toeplitz`


LENGTH = 4096
"""Positions that tables of few tokens cover: no longer sequence is few by the limits below."""
SHORT = 1024
"""Positions up to which one launch was no slower than two on an H200, at the batches that `SHORT_PAIRS` allows."""
SHORTEST = 256
"""Positions that shorter sequences count as: their time no longer falls with the square of the length."""
SHORT_PAIRS = 40 * SHORT**2
"""B x H x T x T up to which one launch is faster on the device: with 12 heads some 3 x 1,024 or 12 x 512 tokens."""
HOST_BOUND = 2 * 4096 * 768 * (12 * 768 + 4096)
"""B x T x C x (12 C + T), half a layer's operations, up to which a host that launches every kernel sets the pace.

It is a layer of the 124M model at two sequences of 4,096 tokens: by two launches a called prompt ran at 0.53x of an
ordinary one, by one at 0.94x (docs/log.md). On the device two are faster there, so CUDA graphs take two.
"""
DIM = 128
"""Channels up to which the limits were measured; wider heads leave the kernel few registers."""
FEW_DTYPES = (torch.bfloat16, torch.float16)
_FEW = "few_"


def serves_few(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether one launch for few tokens runs on a device, and is known to pay there: Hopper and later."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return hopper and has_triton() and dtype in FEW_DTYPES


def are_few(value: Tensor, heads: int, *, replayed: bool) -> bool:
    """Return whether one launch is faster for values `[B, H_kv, T, D]` of a layer of `heads`.

    `replayed` says that a CUDA graph launches the kernels: the host's pace has no say then.
    """
    batch, _, length, dim = value.shape
    if dim > DIM or length > LENGTH:
        return False
    if length <= SHORT and batch * heads * length * max(length, SHORTEST) <= SHORT_PAIRS:
        return True
    width = heads * dim
    return not replayed and batch * length * width * (12 * width + length) <= HOST_BOUND


def few_tables(
    patterns: Sequence[Pattern], dtype: torch.dtype, device: torch.device, kv_head: tuple[int, ...] | None
) -> Tables:
    """Return the launch's tables of the first positions for another backend's; none where it cannot serve."""
    if kv_head is None or not serves_few(device, dtype):
        return {}
    first = [pattern.prefix(min(LENGTH, pattern.length)) for pattern in patterns]
    return {_FEW + name: table for name, table in fused_tables(first, dtype, device, kv_head).items()}


def mix_few(
    query: Tensor, key: Tensor, value: Tensor, tables: Tables, scale: float | None, *, replayed: bool
) -> Tensor | None:
    """Return all heads, `[B, H, T, D]`, from one launch where that is faster; None elsewhere.

    Code compiled for one shape launches the kernel itself, at a fraction of what an operator costs the host. With
    lengths left open by the compiler nothing is few: a bound on them would be a program of its own.
    """
    if _FEW + PATTERNS[0] not in tables:
        return None
    compiling = torch.compiler.is_compiling()
    if compiling:
        from torch.fx.experimental.symbolic_shapes import has_static_value

        if not all(has_static_value(size) for size in value.shape):
            return None
    arguments = _arguments(tables, "mixed", _FEW)
    if not are_few(value, sum(arguments[2]), replayed=replayed):
        return None
    factor = score_scale(scale, value.shape[-1])
    if torch.compiler.is_dynamo_compiling():
        from saf.ops.fused.kernels import visible_forward

        return visible_forward(unit_stride(query), unit_stride(key), unit_stride(value), *arguments, factor)
    return fused_product(query, key, value, *arguments, factor)[0]


# --- the operator and its gradients


def _gradients_like(
    gradient, query, key, value, output, log_sums, maps, patterns, counts, grouped, scale
) -> tuple[Tensor, ...]:
    return tuple(heads_like(x, x.shape[1]) for x in (query, key, value))


@operator("fused_backward", fake=_gradients_like)
def fused_product_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sums: Tensor, maps: list[Tensor],
    patterns: list[Tensor], counts: list[int], grouped: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients to query, key and value, of frozen heads dV = P^T dO alone (section 3.3 of the paper).

    Key-block programs compute dV of all heads and dK of live ones, a query-block pass dQ of live ones.
    """
    from saf.ops.fused.kernels import fused_backward

    gradient, query, key, value = (unit_stride(x) for x in (gradient, query, key, value))
    tables = read_tables(maps, patterns, counts, grouped)
    return fused_backward(gradient, query, key, value, output, log_sums, *tables, scale=scale)


def _keep_operands(ctx, inputs, output) -> None:
    query, key, value, maps, patterns, ctx.counts, ctx.grouped, ctx.scale = inputs
    ctx.num_maps = len(maps)
    ctx.save_for_backward(query, key, value, *output, *maps, *patterns)


def operand_gradients(ctx, gradient: Tensor, _):
    """Return the gradients to query, key and value; tables have none."""
    forbid_second_derivative()
    query, key, value, output, log_sums, *tables = ctx.saved_tensors
    maps, patterns = tables[: ctx.num_maps], tables[ctx.num_maps :]
    rest = (maps, patterns, ctx.counts, ctx.grouped, ctx.scale)
    gradients = fused_product_backward(gradient, query, key, value, output, log_sums, *rest)
    return (*gradients, [None] * len(maps), [None] * len(patterns), None, None, None)


def _product_like(query, key, value, maps, patterns, counts, grouped, scale) -> tuple[Tensor, Tensor]:
    batch, live, length, _ = query.shape
    return heads_like(value, sum(counts)), value.new_empty(batch, live, length, dtype=torch.float32)


@operator("fused", fake=_product_like, gradient=operand_gradients, context=_keep_operands)
def fused_product(
    query: Tensor, key: Tensor, value: Tensor, maps: list[Tensor], patterns: list[Tensor], counts: list[int],
    grouped: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mix all heads of a layer, head order kept: `[B, H, T, D]`, and the live heads' row log-sum-exps `[B, L, T]`.

    `query [B, L, T, D]`, `key [B, K, T, D]`, `value [B, H_kv, T, D]`; `maps` and `patterns` in the order of `MAPS` and
    `PATTERNS`; `counts` of live, compact and dense heads.
    """
    from saf.ops.fused.kernels import fused_forward

    query, key, value = (unit_stride(x) for x in (query, key, value))
    return fused_forward(query, key, value, *read_tables(maps, patterns, counts, grouped), scale=scale)
