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


def prescaled(x: Tensor, pre: Tensor) -> Tensor:
    """Return x * pre in x's dtype as contiguous [F, T, B D]."""
    batch, heads, length, dim = x.shape
    scaled = x.new_empty(heads, length, batch * dim)
    grid = (cdiv(length, 32), cdiv(batch * dim, 128), heads)
    launch(
        prescale_kernel, grid, x, pre, scaled, length, batch * dim,
        x.stride(0), x.stride(1), x.stride(2), pre.stride(0),
        D=dim, BT=32, BN=128, num_warps=4, device=x.device,
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
    operand = TensorDescriptor.from_tensor(prescaled(x, pre), [1, config.block_k, config.block_n])
    num_m, num_n = cdiv(length, config.block_m), cdiv(columns, config.block_n)
    options = {"maxnreg": config.max_registers} if config.max_registers else {}
    launch(
        toeplitz_descriptor_kernel, (num_m * num_n * heads,), operand, tiles, post, out, length, columns,
        out.stride(0), out.stride(1), out.stride(2), post.stride(0), tables.shape[1], num_m, num_n, heads,
        D=dim, BM=config.block_m, BN=config.block_n, BK=config.block_k, TRANSPOSE=transpose, TILE=TILE,
        STAGES=config.num_stages, SPECIALIZE=config.loads == "specialized",
        num_warps=config.num_warps, num_stages=config.num_stages, device=x.device, **options,
    )  # fmt: skip
