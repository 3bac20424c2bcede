"""Launchers of the separate input scaling and of the product through the bulk copy engine."""

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from saf.errors import InputError, UnsupportedError
from saf.ops.triton.config import Config
from saf.ops.triton.launch import cdiv, launch
from saf.ops.triton.tables import TILE
from saf.ops.triton.toeplitz_descriptor_kernel import toeplitz_descriptor_kernel
from saf.ops.triton.toeplitz_kernel import prescale_kernel


def prescaled(x: Tensor, pre: Tensor, *, fold: int = 1, transpose: bool = False) -> Tensor:
    """Return x * pre in x's dtype as contiguous [F, T, B D], or folded as [F, T rounded up, fold B D].

    Folded, group r of the columns holds the rows r - fold + 1 tiles away (r tiles away transposed), zero beyond T.
    """
    batch, heads, length, dim = x.shape
    rows = length if fold == 1 else cdiv(length, fold * TILE) * fold * TILE
    columns = fold * batch * dim
    scaled = x.new_empty(heads, rows, columns)
    grid = (cdiv(rows, 32), cdiv(columns, 128), heads)
    launch(
        prescale_kernel, grid, x, pre, scaled, length, batch * dim, rows,
        x.stride(0), x.stride(1), x.stride(2), pre.stride(0),
        D=dim, BT=32, BN=128, FOLD=fold, FIRST=0 if transpose else 1 - fold, TILE=TILE,
        num_warps=4, device=x.device,
    )  # fmt: skip
    return scaled


def multiply_through_descriptors(
    x: Tensor, tables: Tensor, pre: Tensor, post: Tensor, out: Tensor, transpose: bool, config: Config
) -> None:
    """Run the product into `out` with both operands read through descriptors; arguments as in `toeplitz_matmul`.

    Raises:
        UnsupportedError: a CUDA device before compute capability 9.0.
        InputError: B x D is no multiple of 8, or x is float32.
    """
    batch, heads, length, dim = x.shape
    columns = batch * dim
    if x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) < (9, 0):
        raise UnsupportedError("descriptors need compute capability 9.0; choose loads='pointer'")
    if columns % 8 or x.dtype == torch.float32:
        raise InputError(
            f"descriptors need 16-bit operands and B x D a multiple of 8, got {x.dtype} and {columns}; "
            "choose loads='pointer'"
        )
    stacked = tables.view(-1, TILE)
    tile = [config.block_k, config.block_m] if transpose else [config.block_m, config.block_k]
    tiles = TensorDescriptor.from_tensor(stacked, tile)
    fold = config.fold
    scaled = prescaled(x, pre, fold=fold, transpose=transpose)
    operand = TensorDescriptor.from_tensor(scaled, [1, config.block_k, config.block_n])
    rows = scaled.shape[1]
    num_m, num_n = cdiv(rows, fold * config.block_m), cdiv(fold * columns, config.block_n)
    options = {"maxnreg": config.max_registers} if config.max_registers else {}
    launch(
        toeplitz_descriptor_kernel, (num_m * num_n * heads,), operand, tiles, post, out, length, columns, rows,
        out.stride(0), out.stride(1), out.stride(2), post.stride(0), tables.shape[1], num_m, num_n, heads,
        config.slabs_of(num_n * heads),
        D=dim, BM=config.block_m, BN=config.block_n, BK=config.block_k, TRANSPOSE=transpose, TILE=TILE,
        STAGES=config.num_stages, FOLD=fold,
        num_warps=config.num_warps, num_stages=config.num_stages, device=x.device, **options,
    )  # fmt: skip
