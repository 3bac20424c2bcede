"""The Toeplitz product of trainable patterns: tables from the logits, and the logits' gradients, Eq. (S.17)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from saf.errors import UnsupportedError
from saf.ops.toeplitz.operator import distance_table, toeplitz_product
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
    output: Tensor,
    value_gradient: Tensor,
    distance: Tensor,
    key_scale: Tensor,
    row_scale: Tensor,
    positions: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients to alpha and rho in the scalings' dtype, Eq. (S.17), with zeros up to `[F, positions]`.

    `gradient` and `output`, `value` and `value_gradient` (already `P^T gradient`) are `[B, F, T, D]`, summed over B
    and D. The work is one more product of the size of the forward pass; the memory, for its duration, that of five
    float32 copies of `value`: no T x T array.
    """
    wide = key_scale.dtype
    keys, lags, rows = key_scale.double(), distance.double(), row_scale.double()
    row_terms = (gradient.to(wide) * output).sum((0, 3)).double() * rows
    key_terms = (value_gradient.to(wide) * value).sum((0, 3)).double()
    alpha = key_terms - keys * causal_convolution(row_terms.flip(1), lags).flip(1)
    pairs = cross_correlation(_scaled(gradient, row_scale), _scaled(value, key_scale)).double()
    # Where the table is 0, what it would be multiplied with may be infinite.
    rho = torch.where(lags == 0, 0, lags * (pairs - causal_convolution(keys, row_terms.flip(1)).flip(1)))
    beyond = (0, positions - alpha.shape[1])
    return pad(alpha.to(wide), beyond), pad(rho.to(wide), beyond)


@pattern_gradient.register_fake
def _(gradient, value, output, value_gradient, distance, key_scale, row_scale, positions):
    shape = (key_scale.shape[0], positions)
    return key_scale.new_empty(shape), key_scale.new_empty(shape)


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    """Return `x [B, F, T, D]` scaled by `[F, T]`, in its own dtype, viewed as `[F, T, B, D]`."""
    return (x * scale[:, :, None]).to(x.dtype).permute(1, 2, 0, 3)


def trainable_product(value: Tensor, alpha: Tensor, rho: Tensor) -> Tensor:
    """Return `P V [B, F, T, D]` of patterns with logits `[F, >=T]`, with gradients to values and logits.

    Tables and normalisers are made anew from the logits in every call, so they never lag behind an update. Logits may
    drift along the gauge (S.6) without bound. A head whose pattern itself leaves what tables of the dtype hold raises
    UnsupportedError on a CPU; on a device all of its outputs and gradients are NaN.
    """
    return _TrainableProduct.apply(value, alpha, rho)


class _TrainableProduct(torch.autograd.Function):
    """The product P V with gradients for the values and for both logits, alpha and rho."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, alpha: Tensor, rho: Tensor) -> Tensor:
        """Return P V and keep what the gradients need: the values, the output and the tables."""
        table, distance, key_scale, row_scale = pattern_tables(alpha, rho, value.shape[2], value.dtype)
        output = toeplitz_product(value, table, key_scale, row_scale, False)
        ctx.save_for_backward(value, output, table, distance, key_scale, row_scale)
        ctx.dtype, ctx.positions = alpha.dtype, alpha.shape[1]
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the values (the transposed product), of alpha and of rho."""
        value, output, table, distance, key_scale, row_scale = ctx.saved_tensors
        value_gradient = toeplitz_product(gradients[0], table, row_scale, key_scale, True)
        tables = (distance, key_scale, row_scale)
        alpha, rho = pattern_gradient(gradients[0], value, output, value_gradient, *tables, ctx.positions)
        return value_gradient, alpha.to(ctx.dtype), rho.to(ctx.dtype)
