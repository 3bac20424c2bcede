"""Frozen heads as a batch-shared causal convolution: `P V = diag(1/Z) Toeplitz(exp rho) diag(exp alpha) V`.

One Toeplitz tile serves every batch element and every channel, so the product is a plain matrix product. Weights
are non-negative: each row's error is bounded whatever the range of alpha and rho (docs/method.md). A pattern
that the value dtype cannot hold in this form, or a dense one, is executed as a stored matrix. Trainable patterns
take the same product, with tables from the logits in every call, and gradients by Eq. (S.17).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from saf.errors import UnsupportedError
from saf.ops.backend import Backend, Slots, Tables
from saf.ops.decode.op import compact_rows, decode_tables
from saf.ops.fused.op import few_tables, serves_few
from saf.ops.heads import (
    dense_product,
    dense_rows,
    heads_like,
    merge_slots,
    row_product,
    take_heads,
    unit_stride,
)
from saf.ops.operator import operator, product_precision, uses_triton
from saf.ops.positions import QueryRows
from saf.ops.toeplitz.tables import (
    DTYPES,
    causal_convolution,
    compact_tables,
    convolution_tables,
    cross_correlation,
    make_tiles,
    tables_hold,
)
from saf.patterns import CompactPattern, Pattern

BLOCK = 128
"""Positions a block without Triton: a tile of 128 x 128 float32 numbers, 64 KiB, stays in a CPU core's cache."""


class Toeplitz(Backend):
    """Execute frozen heads as a block-Toeplitz product; its tables are those that `prepare` names."""

    decodes = True
    trains = True

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why values of `dtype` cannot be mixed; None when they can."""
        return None if dtype in DTYPES else f"values must be one of {[str(d) for d in DTYPES]}, got {dtype}"

    def describe(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return in words how it runs."""
        how = "Triton" if uses_triton(device, dtype) else "PyTorch"
        few = "; few tokens without gradients: one launch with live heads" if serves_few(device, dtype) else ""
        return f"block-Toeplitz matrix products in {how} ({BLOCK} x {BLOCK} tiles shared by the batch){few}"

    def prepare(
        self, patterns: Sequence[Pattern], dtype: torch.dtype, device: torch.device, kv_head: Slots = None
    ) -> Tables:
        """Return the tables of one pattern per head.

        `distance [C, T]` exp(rho) in `dtype`; `key_scale [C, T]` exp(alpha) and `row_scale [C, T]` 1/Z in float32
        (float64 for float64 values) and `table` from `distance_table`, for the `C` heads of `convolved`;
        `weights [F - C, T, T]` for those of `stored`; and, where none is stored, what one launch of few tokens and the
        decode kernel read.
        """
        compact = {slot: own for slot, one in enumerate(patterns) if (own := one.compact()) is not None}
        tables: Tables = {}
        convolved: tuple[int, ...] = ()
        if compact:
            stacked = [pattern.to(dtype=torch.float64, device=device) for pattern in compact.values()]
            own, holds = convolution_tables(CompactPattern.stack(stacked), dtype)
            convolved = tuple(slot for slot, held in zip(compact, holds.tolist(), strict=True) if held)
            if convolved:
                tables |= {name: table[holds] for name, table in own.items()}
                tables["table"] = distance_table(tables["distance"])
        stored = tuple(slot for slot in range(len(patterns)) if slot not in convolved)
        if stored:
            tables["weights"] = torch.stack([patterns[slot].dense().to(device=device, dtype=dtype) for slot in stored])
        else:
            tables |= few_tables(patterns, dtype, device, kv_head)
            tables |= decode_tables(kv_head, len(patterns), device) if uses_triton(device, dtype) else {}
        return tables | {"convolved": convolved, "stored": stored}

    def forward(self, value: Tensor, heads: tuple[int, ...], tables: Tables) -> Tensor:
        """Return `P V`."""
        value, stored, convolved, parts = take_heads(value, heads), tables["stored"], tables["convolved"], []
        if stored:
            parts.append((stored, dense_product(tables["weights"], take_heads(value, stored))))
        if convolved:
            own = value if not stored else take_heads(value, convolved)
            product = toeplitz_product(own, tables["table"], tables["key_scale"], tables["row_scale"], False)
            parts.append((convolved, product))
        return merge_slots(parts)

    def rows(self, value: Tensor, heads: tuple[int, ...], tables: Tables, rows: QueryRows) -> Tensor:
        """Return rows of `P V`, as products with these rows' weights."""
        parts = []
        for slots, weights_of in ((tables["stored"], dense_rows), (tables["convolved"], compact_rows)):
            if slots:
                read = tuple(heads[slot] for slot in slots)
                parts.append((slots, row_product(weights_of(tables), value, read, rows)))
        return merge_slots(parts)

    def untrainable(self, alpha: Tensor, rho: Tensor, dtype: torch.dtype) -> str | None:
        """Return why logits `[F, T]` cannot be trained here; None when they can."""
        if dtype == torch.float16:
            return "float16 has too little range for a pattern that moves; train in bfloat16 or float32"
        if tables_hold(*compact_tables(alpha, rho, dtype)).all():
            return None
        return f"{dtype} cannot hold a pattern as exp(rho) times exp(alpha); train it with backend='reference'"

    def forward_trainable(self, value: Tensor, alpha: Tensor, rho: Tensor) -> Tensor:
        """Return `P V` with gradients to the logits; `trainable_product` says what tables cannot hold."""
        return trainable_product(value, alpha, rho)


def blocked_product(x: Tensor, distance: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return `y[b,f,i] = after[f,i] * sum_{j<=i} distance[f,i-j] * before[f,j] * x[b,f,j]`, a row block at a time.

    `x [B, F, T, D]`; `distance`, `before`, `after` `[F, >=T]`. Block diagonal `d` of the Toeplitz matrix is one
    `C x C` tile for the whole batch: a product of `[C, C]` with `[C, (T/C - d) * B * D]`. 16-bit inputs are
    scaled in their own dtype and accumulated in float32. Memory order of the result is `[B, T, F, D]`.
    """
    batch, heads, length, dim = x.shape
    block = min(BLOCK, max(16, 1 << (length - 1).bit_length()))
    count = -(-length // block)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    scaled = (x.to(compute) * before[:, :length, None].to(compute)).to(x.dtype).to(compute)
    scaled = pad(scaled, (0, 0, 0, count * block - length))
    columns = scaled.view(batch, heads, count, block, dim).permute(1, 3, 2, 0, 4).reshape(heads, block, -1)
    width = batch * dim
    padded = pad(distance[:, :length].to(compute), (block - 1, count * block - length))
    lags = torch.arange(block, device=x.device)[:, None] - torch.arange(block, device=x.device) + block - 1
    total = torch.zeros_like(columns)
    for offset in range(count):
        tile = padded[:, lags + offset * block]
        total[:, :, offset * width :].baddbmm_(tile, columns[:, :, : (count - offset) * width])
    total = total.view(heads, block, count, batch, dim).permute(3, 2, 1, 0, 4)
    total = total.reshape(batch, count * block, heads, dim)[:, :length]
    output = heads_like(x, heads).transpose(1, 2)
    output.copy_(total * after[:, :length].t()[:, :, None].to(compute))
    return output.transpose(1, 2)


def reversed_product(x: Tensor, distance: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return the adjoint's product: `y[j] = after[j] * sum_{i>=j} distance[i-j] * before[i] * x[i]`."""
    length = x.shape[-2]
    flipped = blocked_product(x.flip(2), distance, before[:, :length].flip(1), after[:, :length].flip(1))
    return flipped.transpose(1, 2).flip(1).contiguous().transpose(1, 2)


def distance_table(distance: Tensor) -> Tensor:
    """Return what the operator reads exp(rho) from: tiles for the kernel, `distance [F, T]` itself for PyTorch."""
    return make_tiles(distance) if uses_triton(distance.device, distance.dtype) else distance


@operator("saf::toeplitz")
def toeplitz_product(x: Tensor, table: Tensor, before: Tensor, after: Tensor, transpose: bool) -> Tensor:
    """Return the batch-shared causal convolution between two scalings (docs/method.md), or its adjoint.

    `x [B, F, T, D]`, `table` from `distance_table`, scalings `[F, >=T]`; returns `[B, F, T, D]` stored as
    `[B, T, F, D]`.
    """
    if uses_triton(x.device, x.dtype):
        from saf.ops.toeplitz.kernels import toeplitz_matmul

        precision = product_precision(x.dtype)
        return toeplitz_matmul(unit_stride(x), table, before, after, transpose=transpose, precision=precision)
    return (reversed_product if transpose else blocked_product)(x, table, before, after)


@torch.library.register_fake("saf::toeplitz")
def _(x: Tensor, table: Tensor, before: Tensor, after: Tensor, transpose: bool) -> Tensor:
    return heads_like(x, x.shape[1])


def _setup(ctx, inputs, output) -> None:
    """Keep the tables: a gradient does not depend on the values."""
    _, table, before, after, ctx.transpose = inputs
    ctx.save_for_backward(table, before, after)


def _backward(ctx, gradient: Tensor):
    """Return the gradient to the values: the transposed product, its scalings swapped."""
    table, before, after = ctx.saved_tensors
    return toeplitz_product(gradient, table, after, before, not ctx.transpose), None, None, None, None


torch.library.register_autograd("saf::toeplitz", _backward, setup_context=_setup)


@torch.library.custom_op("saf::pattern_tables", mutates_args=())
def pattern_tables(
    alpha: Tensor, rho: Tensor, length: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `saf::toeplitz` reads at `length` positions, from logits `[F, >=length]`.

    Its table, then those of `compact_tables`. Prefixes are taken in here, so that a graph serves every length.
    Raises UnsupportedError on a CPU where a head's `1/Z` is NaN; on a device the host does not wait to look at it.
    """
    distance, key_scale, row_scale = compact_tables(alpha[:, :length], rho[:, :length], dtype)
    if row_scale.device.type == "cpu" and row_scale.isnan().any():
        raise UnsupportedError(
            f"{dtype} cannot hold a trained pattern that has drifted, or is not finite; use backend='reference'"
        )
    table = distance_table(distance)
    return table.clone() if table is distance else table, distance, key_scale, row_scale


@pattern_tables.register_fake
def _(alpha: Tensor, rho: Tensor, length: int, dtype: torch.dtype):
    shape = (alpha.shape[0], length)
    distance = alpha.new_empty(shape, dtype=dtype)
    scale = alpha.new_empty(shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    table = distance_table(distance)
    return table.clone() if table is distance else table, distance, scale, torch.empty_like(scale)


@torch.library.custom_op("saf::pattern_gradient", mutates_args=())
def pattern_gradient(
    gradient: Tensor, value: Tensor, table: Tensor, distance: Tensor, key_scale: Tensor, row_scale: Tensor,
    positions: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients to values, and to alpha and rho in the scalings' dtype, Eq. (S.17).

    `gradient` and `value` are `[B, F, T, D]`; the logits' gradients are `[F, positions]`, summed over B and D, zero
    beyond T. What cancels there, `dO_i V_j` against `dO_i O_i`, comes both times from one `dO/Z` and one
    `exp(alpha) V`, unrounded, in products and sums a precision above that of the values: float32 for 16 bits, float64
    for float32. The work is that of two products of the forward pass and a correlation, each of them twice to four
    times where 16-bit operands are split (`split_product`); the memory, for its duration, that of some twenty float32
    copies of `value`: no T x T array.
    """
    wide = torch.float32 if value.dtype.itemsize == 2 else torch.float64
    scaled_gradient, scaled_value = gradient.to(wide) * row_scale[:, :, None], value.to(wide) * key_scale[:, :, None]
    if uses_triton(value.device, value.dtype) and value.dtype.itemsize == 2:
        left, right = split(scaled_gradient, value.dtype), split(scaled_value, value.dtype)
        above, below = split_product(right, table, False), split_product(left, table, True)
        scaled_gradient, scaled_value = left.float().sum(0), right.float().sum(0)
        # Every part of one operand meets every part of the other.
        columns = left.repeat(2, 1, 1, 1, 1), right.repeat_interleave(2, 0)
        pairs = cross_correlation(*(x.permute(2, 3, 0, 1, 4) for x in columns)).double()
    else:
        lags, one = distance.to(wide), torch.ones_like(key_scale)
        above, below = blocked_product(scaled_value, lags, one, one), reversed_product(scaled_gradient, lags, one, one)
        pairs = cross_correlation(*(x.permute(1, 2, 0, 3) for x in (scaled_gradient, scaled_value))).double()
    keys, lags, rows = key_scale.double(), distance.double(), row_scale.double()
    row_terms = (scaled_gradient * above).sum((0, 3)).double() * rows
    key_terms = (scaled_value * below).sum((0, 3)).double()
    alpha = key_terms - keys * causal_convolution(row_terms.flip(1), lags).flip(1)
    # Where the table is 0, what it would be multiplied with may be infinite.
    rho = torch.where(lags == 0, 0, lags * (pairs - causal_convolution(keys, row_terms.flip(1)).flip(1)))
    beyond = (0, positions - alpha.shape[1])
    alpha, rho = (pad(x.to(key_scale.dtype), beyond) for x in (alpha, rho))
    return heads_like(value, value.shape[1]).copy_(below * key_scale[:, :, None]), alpha, rho


@pattern_gradient.register_fake
def _(gradient, value, table, distance, key_scale, row_scale, positions):
    shape = (key_scale.shape[0], positions)
    return heads_like(value, value.shape[1]), key_scale.new_empty(shape), key_scale.new_empty(shape)


def split(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 `x` as two tensors of a 16-bit `dtype`, `[2, ...]`, whose sum is nearly x: its halves of bits."""
    high = x.to(dtype)
    return torch.stack([high, (x - high).to(dtype)])


def split_product(parts: Tensor, table: Tensor, transpose: bool) -> Tensor:
    """Return the product without scalings, or its adjoint, of the sum of `parts [2, B, F, T, D]`, in float32.

    The kernel takes the parts as twice the batch: matrix units multiply 16-bit numbers exactly, and add in float32.
    """
    from saf.ops.toeplitz.kernels import toeplitz_matmul

    _, batch, heads, length, dim = parts.shape
    one = torch.ones(heads, length, device=parts.device)
    sums = parts.new_empty(2 * batch, length, heads, dim, dtype=torch.float32).transpose(1, 2)
    toeplitz_matmul(parts.flatten(0, 1), table, one, one, transpose=transpose, out=sums)
    return sums[:batch] + sums[batch:]


def trainable_product(value: Tensor, alpha: Tensor, rho: Tensor) -> Tensor:
    """Return `P V [B, F, T, D]` of patterns with logits `[F, >=T]`, with gradients to values and logits.

    Tables and normalisers are computed anew in every call, so they never lag behind an update. Logits may drift along
    the gauge (S.6) without bound. A pattern that leaves what tables of the dtype hold raises UnsupportedError on a CPU;
    on a device its outputs and gradients are NaN.
    """
    return _TrainableProduct.apply(value, alpha, rho)


class _TrainableProduct(torch.autograd.Function):
    """The product P V with gradients to the values and to both logits."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, alpha: Tensor, rho: Tensor) -> Tensor:
        table, distance, key_scale, row_scale = pattern_tables(alpha, rho, value.shape[2], value.dtype)
        output = toeplitz_product(value, table, key_scale, row_scale, False)
        ctx.save_for_backward(value, table, distance, key_scale, row_scale)
        ctx.dtype, ctx.positions = alpha.dtype, alpha.shape[1]
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value, *tables = ctx.saved_tensors
        value_gradient, alpha, rho = pattern_gradient(gradients[0], value, *tables, ctx.positions)
        return value_gradient, alpha.to(ctx.dtype), rho.to(ctx.dtype)
