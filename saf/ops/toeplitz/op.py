"""Frozen heads as a batch-shared causal convolution: `P V = diag(1/Z) Toeplitz(exp rho) diag(exp alpha) V` (S.13).

One Toeplitz tile serves every batch element and every channel, so the product is a plain matrix product. Its gradient
`dV = P^T dO` is the same product transposed, see `value_gradient`. A pattern that the value dtype cannot hold in this
form, or a dense one, is executed as a stored matrix. Trainable patterns take the same product, with tables from the
logits in every call, and gradients by Eq. (S.17), see `pattern_gradient`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from saf.errors import UnsupportedError
from saf.ops.backend import Backend, Tables, ValueHeads
from saf.ops.decode.op import decode_tables
from saf.ops.fused.op import few_tables, serves_few
from saf.ops.heads import dense_product, heads_like, merge_slots, take_heads, unit_stride
from saf.ops.operator import operator, product_precision, uses_triton
from saf.ops.positions import unpadded
from saf.ops.toeplitz.tables import (
    BLOCK,
    balance,
    blocked_product,
    causal_convolution,
    compact_tables,
    cross_correlation,
    distance_table,
    make_tiles,
    reversed_product,
)
from saf.patterns import CompactPattern, Pattern


class Toeplitz(Backend):
    """Execute frozen heads as a block-Toeplitz product.

    Its tables: `distance [C, T]` exp(rho) in the values' dtype, `table` from `distance_table`, `key_scale` exp(alpha)
    and `row_scale` 1/Z `[C, T]` in float32 (float64 for float64 values), for the `C` heads in `convolved`;
    `weights [F - C, T, T]` for those in `stored`; and, where none is stored, what one launch of few tokens and the
    decode kernel read.
    """

    trains = True

    def describe(self, device: torch.device, dtype: torch.dtype) -> str:
        how = "Triton" if uses_triton(device, dtype) else "PyTorch"
        few = "; few tokens without gradients: one launch with live heads" if serves_few(device, dtype) else ""
        return f"block-Toeplitz matrix products in {how} ({BLOCK} x {BLOCK} tiles shared by the batch){few}"

    def prepare(
        self, patterns: Sequence[Pattern], dtypes: Sequence[torch.dtype], device: torch.device,
        kv_head: ValueHeads = None,
    ) -> dict[torch.dtype, Tables]:  # fmt: skip
        compact = {slot: own for slot, one in enumerate(patterns) if (own := one.compact()) is not None}
        logits = None
        if compact:
            stacked = [pattern.to(dtype=torch.float64, device=device) for pattern in compact.values()]
            balanced = CompactPattern.stack(stacked).balanced()
            logits = balanced.alpha, balanced.rho
        return {dtype: _tables(patterns, tuple(compact), logits, dtype, device, kv_head) for dtype in dtypes}

    def forward(self, value: Tensor, heads: tuple[int, ...], tables: Tables, left_pad: Tensor | None = None) -> Tensor:
        return unpadded(lambda x: _mixed(x, tables), take_heads(value, heads), left_pad)

    def untrainable_reason(self, alpha: Tensor, rho: Tensor, dtype: torch.dtype) -> str | None:
        if dtype == torch.float16:
            return "float16 has too little range for a pattern that moves; train in bfloat16 or float32"
        if compact_tables(*balance(alpha, rho), dtype)[2].isfinite().all():
            return None
        return f"{dtype} cannot hold a pattern as exp(rho) times exp(alpha); train it with backend='reference'"

    def forward_trainable(self, value: Tensor, alpha: Tensor, rho: Tensor) -> Tensor:
        return trainable_product(value, alpha, rho)[0]


def _tables(
    patterns: Sequence[Pattern], compact: tuple[int, ...], logits: tuple[Tensor, Tensor] | None, dtype: torch.dtype,
    device: torch.device, kv_head: ValueHeads,
) -> Tables:  # fmt: skip
    """Return the tables of one dtype; `logits` `[C, T]` are those of the slots in `compact`, balanced."""
    tables: Tables = {}
    convolved: tuple[int, ...] = ()
    if logits is not None:
        distance, key_scale, row_scale = compact_tables(*logits, dtype)
        held = row_scale.isfinite().all(1)
        convolved = tuple(slot for slot, holds in zip(compact, held.tolist(), strict=True) if holds)
        tables = {"distance": distance[held], "key_scale": key_scale[held], "row_scale": row_scale[held]}
        tables["table"] = distance_table(tables["distance"])
    stored = tuple(slot for slot in range(len(patterns)) if slot not in convolved)
    if stored:
        tables["weights"] = torch.stack([patterns[slot].dense().to(device=device, dtype=dtype) for slot in stored])
    else:
        tables |= few_tables(patterns, dtype, device, kv_head)
        tables |= decode_tables(kv_head, len(patterns), device) if uses_triton(device, dtype) else {}
    return tables | {"convolved": convolved, "stored": stored}


def _mixed(value: Tensor, tables: Tables) -> Tensor:
    """Return `P V` of `value [B, F, T, D]`, of both kinds of heads."""
    stored, convolved, parts = tables["stored"], tables["convolved"], []
    if stored:
        parts.append((stored, dense_product(tables["weights"], take_heads(value, stored))))
    if convolved:
        scales = tables["key_scale"], tables["row_scale"]
        product = toeplitz_product(take_heads(value, convolved), tables["table"], *scales, False)
        parts.append((convolved, product))
    return merge_slots(parts)


# --- the product and its gradient


def _keep_tables(ctx, inputs, output) -> None:
    """Keep the tables alone: the gradient does not depend on the values."""
    _, table, before, after, ctx.transpose = inputs
    ctx.save_for_backward(table, before, after)


def value_gradient(ctx, gradient: Tensor):
    """Return dV = P^T dO (section 3.3 of the paper).

    P = diag(1/Z) G diag(e^alpha), so P^T = diag(e^alpha) G^T diag(1/Z): G transposed, the scalings exchanged (S.15).
    """
    table, before, after = ctx.saved_tensors
    return toeplitz_product(gradient, table, after, before, not ctx.transpose), None, None, None, None


def _product_like(x, table, before, after, transpose) -> Tensor:
    return heads_like(x, x.shape[1])


@operator("toeplitz", fake=_product_like, gradient=value_gradient, context=_keep_tables)
def toeplitz_product(x: Tensor, table: Tensor, before: Tensor, after: Tensor, transpose: bool) -> Tensor:
    """Return `diag(after) G diag(before) x` (S.13), `[B, F, T, D]`, or with `transpose` by G^T; stored `[B, T, F, D]`.

    `x [B, F, T, D]`, `table` from `distance_table`, scalings `[F, >=T]`.
    """
    if uses_triton(x.device, x.dtype):
        from saf.ops.toeplitz.kernels import toeplitz_matmul

        precision = product_precision(x.dtype)
        return toeplitz_matmul(unit_stride(x), table, before, after, transpose=transpose, precision=precision)
    return (reversed_product if transpose else blocked_product)(x, table, before, after)


# --- trainable patterns


def _keep_trainable(ctx, inputs, output) -> None:
    value, alpha, _ = inputs
    ctx.save_for_backward(value, *output[1:])
    ctx.dtype, ctx.positions = alpha.dtype, alpha.shape[1]


def logit_gradients(ctx, gradient: Tensor, *_):
    """Return the gradients to values, alpha and rho."""
    to_value, to_alpha, to_rho = pattern_gradient(gradient, *ctx.saved_tensors, ctx.positions)
    return to_value, to_alpha.to(ctx.dtype), to_rho.to(ctx.dtype)


def _trainable_like(value, alpha, rho) -> tuple[Tensor, ...]:
    shape, wide = (alpha.shape[0], value.shape[2]), torch.float64 if value.dtype == torch.float64 else torch.float32
    scales = value.new_empty(shape, dtype=wide), value.new_empty(shape, dtype=wide)
    return heads_like(value, value.shape[1]), value.new_empty(shape), *scales


@operator("trainable", fake=_trainable_like, gradient=logit_gradients, context=_keep_trainable)
def trainable_product(value: Tensor, alpha: Tensor, rho: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `P V [B, F, T, D]` of patterns with logits `[F, >=T]`, and the tables of `compact_tables` it is made of.

    These are computed anew in every call, so they never lag behind an update; prefixes are taken in here, so that a
    graph serves every length. Logits may drift along the gauge (S.6) without bound. A pattern that leaves what tables
    of the dtype hold raises UnsupportedError on a CPU; on a device, where the host does not wait to look at it, its
    outputs and gradients are NaN.
    """
    length = value.shape[2]
    distance, key_scale, row_scale = compact_tables(*balance(alpha[:, :length], rho[:, :length]), value.dtype)
    if value.device.type == "cpu" and row_scale.isnan().any():
        raise UnsupportedError(
            f"{value.dtype} cannot hold a trained pattern that has drifted, or is not finite; use backend='reference'"
        )
    output = toeplitz_product(value, distance_table(distance), key_scale, row_scale, False)
    return output, distance, key_scale, row_scale


def _gradients_like(gradient, value, distance, key_scale, row_scale, positions) -> tuple[Tensor, ...]:
    shape = (key_scale.shape[0], positions)
    return heads_like(value, value.shape[1]), key_scale.new_empty(shape), key_scale.new_empty(shape)


@operator("pattern_gradient", fake=_gradients_like)
def pattern_gradient(
    gradient: Tensor, value: Tensor, distance: Tensor, key_scale: Tensor, row_scale: Tensor, positions: int
) -> tuple[Tensor, Tensor, Tensor]:
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
        table = make_tiles(distance)
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
    row_terms = (scaled_gradient * above).sum((0, 3)).double() * rows  # D_i / Z_i of (S.17)
    key_terms = (scaled_value * below).sum((0, 3)).double()  # <dV_j, V_j>
    alpha = key_terms - keys * causal_convolution(row_terms.flip(1), lags).flip(1)
    # Where the table is 0, what it would be multiplied with may be infinite.
    rho = torch.where(lags == 0, 0, lags * (pairs - causal_convolution(keys, row_terms.flip(1)).flip(1)))
    beyond = (0, positions - alpha.shape[1])
    alpha, rho = (pad(x.to(key_scale.dtype), beyond) for x in (alpha, rho))
    return heads_like(value, value.shape[1]).copy_(below * key_scale[:, :, None]), alpha, rho


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
