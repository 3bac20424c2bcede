"""The Toeplitz product of trainable patterns: tables from the logits, and the logits' gradients, Eq. (S.17)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from saf.errors import UnsupportedError
from saf.ops.heads import heads_like
from saf.ops.operator import uses_triton
from saf.ops.toeplitz.operator import (
    blocked_product,
    distance_table,
    kernel_product,
    reversed_product,
    toeplitz_product,
)
from saf.ops.toeplitz.tables import causal_convolution, compact_tables, cross_correlation

NOT_HELD = "{dtype} cannot hold a pattern as exp(rho) times exp(alpha); train it with backend='reference'"


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
        raise UnsupportedError(f"{NOT_HELD.format(dtype=dtype)}; it has drifted there, or is no longer finite")
    table = distance_table(distance)
    return table.clone() if table is distance else table, distance, key_scale, row_scale


@pattern_tables.register_fake
def _(alpha: Tensor, rho: Tensor, length: int, dtype: torch.dtype):
    """Tell the compiler the shapes and dtypes of a pattern's tables."""
    shape = (alpha.shape[0], length)
    distance = alpha.new_empty(shape, dtype=dtype)
    scale = alpha.new_empty(shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    table = distance_table(distance)
    return table.clone() if table is distance else table, distance, scale, torch.empty_like(scale)


@torch.library.custom_op("saf::pattern_gradient", mutates_args=())
def pattern_gradient(
    gradient: Tensor,
    value: Tensor,
    table: Tensor,
    distance: Tensor,
    key_scale: Tensor,
    row_scale: Tensor,
    positions: int,
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
    _, batch, heads, length, dim = parts.shape
    one = torch.ones(heads, length, device=parts.device)
    sums = parts.new_empty(2 * batch, length, heads, dim, dtype=torch.float32).transpose(1, 2)
    kernel_product(parts.flatten(0, 1), table, one, one, transpose, out=sums)
    return sums[:batch] + sums[batch:]


def trainable_product(value: Tensor, alpha: Tensor, rho: Tensor) -> Tensor:
    """Return `P V [B, F, T, D]` of patterns with logits `[F, >=T]`, with gradients to values and logits.

    Tables and normalisers are made anew from the logits in every call, so they never lag behind an update. Logits may
    drift along the gauge (S.6) without bound. A head whose pattern itself leaves what tables of the dtype hold raises
    UnsupportedError on a CPU; on a device all of its outputs and gradients are NaN.
    """
    return _TrainableProduct.apply(value, alpha, rho)


class _TrainableProduct(torch.autograd.Function):
    """Give the product P V gradients for the values and for both logits, alpha and rho."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, alpha: Tensor, rho: Tensor) -> Tensor:
        """Return P V and keep what the gradients need: the values and the tables."""
        table, distance, key_scale, row_scale = pattern_tables(alpha, rho, value.shape[2], value.dtype)
        output = toeplitz_product(value, table, key_scale, row_scale, False)
        ctx.save_for_backward(value, table, distance, key_scale, row_scale)
        ctx.dtype, ctx.positions = alpha.dtype, alpha.shape[1]
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the values, of alpha and of rho."""
        value, *tables = ctx.saved_tensors
        value_gradient, alpha, rho = pattern_gradient(gradients[0], value, *tables, ctx.positions)
        return value_gradient, alpha.to(ctx.dtype), rho.to(ctx.dtype)
