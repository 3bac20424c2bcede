"""The registered operator `saf::toeplitz`, its plain PyTorch form (blocked matrix products) and its gradient."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from saf.ops.heads import heads_like
from saf.ops.operator import operator, product_precision, uses_triton

BLOCK = 128
"""Positions a block without Triton: a tile of 128 x 128 float32 numbers, 64 KiB, stays in a CPU core's cache."""


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
    scaled = torch.nn.functional.pad(scaled, (0, 0, 0, count * block - length))
    columns = scaled.view(batch, heads, count, block, dim).permute(1, 3, 2, 0, 4).reshape(heads, block, -1)
    width = batch * dim
    padded = torch.nn.functional.pad(distance[:, :length].to(compute), (block - 1, count * block - length))
    lags = torch.arange(block, device=x.device)[:, None] - torch.arange(block, device=x.device) + block - 1
    total = torch.zeros_like(columns)
    for offset in range(count):
        tile = padded[:, lags + offset * block]
        total[:, :, offset * width :].baddbmm_(tile, columns[:, :, : (count - offset) * width])
    total = total.view(heads, block, count, batch, dim).permute(3, 2, 1, 0, 4)
    total = total.reshape(batch, count * block, heads, dim)[:, :length]
    output = x.new_empty(batch, length, heads, dim)
    output.copy_(total * after[:, :length].t()[:, :, None].to(compute))
    return output.transpose(1, 2)


def reversed_product(x: Tensor, distance: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return the adjoint's product: `y[j] = after[j] * sum_{i>=j} distance[i-j] * before[i] * x[i]`."""
    length = x.shape[-2]
    flipped = blocked_product(x.flip(2), distance, before[:, :length].flip(1), after[:, :length].flip(1))
    return flipped.transpose(1, 2).flip(1).contiguous().transpose(1, 2)


def distance_table(distance: Tensor) -> Tensor:
    """Return what the operator reads exp(rho) from, given `distance [F, T]` on its final device.

    The kernel takes 16-bit weights from materialised 128 x 128 tiles, the fastest of the three forms measured
    (docs/log.md), and float32 ones from shifted copies. Plain PyTorch takes the vectors themselves.
    """
    if not uses_triton(distance.device, distance.dtype):
        return distance
    from saf.ops.toeplitz.config import make_tables

    return make_tables(distance, kind="shifted" if distance.dtype == torch.float32 else "tiles", dtype=distance.dtype)


@cache
def _matmul() -> Callable[..., Tensor]:
    """Return the kernel's launcher; an import in every call would cost the host more than it does."""
    from saf.ops.toeplitz.launch import toeplitz_matmul

    return toeplitz_matmul


def kernel_product(x: Tensor, table: Tensor, before: Tensor, after: Tensor, transpose: bool, **more: Any) -> Tensor:
    """Return `toeplitz_product` where `uses_triton` says so; `more` is `toeplitz_matmul`'s."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return _matmul()(x, table, before, after, transpose=transpose, precision=product_precision(x.dtype), **more)


@operator("saf::toeplitz")
def toeplitz_product(x: Tensor, table: Tensor, before: Tensor, after: Tensor, transpose: bool) -> Tensor:
    """Return the batch-shared causal convolution between two scalings (docs/method.md), or its adjoint.

    `x [B, F, T, D]`, `table` from `distance_table`, scalings `[F, >=T]`; returns `[B, F, T, D]` stored as
    `[B, T, F, D]`.
    """
    if uses_triton(x.device, x.dtype):
        return kernel_product(x, table, before, after, transpose)
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


def implementation(device: torch.device, dtype: torch.dtype) -> str:
    """Say how `saf::toeplitz` runs on a device."""
    if uses_triton(device, dtype):
        return "block-Toeplitz matrix products in Triton (128 x 128 tiles shared by the batch)"
    return f"block-Toeplitz matrix products in PyTorch ({BLOCK} x {BLOCK} tiles shared by the batch)"
