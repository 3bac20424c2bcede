"""Launcher of the product through the bulk copy engine."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from saf.errors import InputError, UnsupportedError
from saf.ops.triton.config import Config
from saf.ops.triton.launch import ALIGNMENT, PreparedLaunch, cdiv
from saf.ops.triton.prescale import prescaling, rows_of
from saf.ops.triton.tables import TILE
from saf.ops.triton.toeplitz_descriptor_kernel import toeplitz_descriptor_kernel


def product_through_descriptors(
    x: Tensor, tables: Tensor, pre: Tensor, post: Tensor, out: Tensor, transpose: bool, config: Config
) -> Callable[..., None]:
    """Return what multiplies operands of this layout, both read through descriptors; arguments as in `toeplitz_matmul`.

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
    fold = config.fold
    rows = rows_of(length, fold)
    scale = prescaling(x, pre, fold=fold, transpose=transpose)
    operand = Described((heads, rows, fold * columns), [1, config.block_k, config.block_n])
    tile = [config.block_k, config.block_m] if transpose else [config.block_m, config.block_k]
    stacked = Described((tables.numel() // TILE, TILE), tile)
    num_m, num_n = cdiv(rows, fold * config.block_m), cdiv(fold * columns, config.block_n)
    options = {"maxnreg": config.max_registers} if config.max_registers else {}
    multiply = PreparedLaunch(
        toeplitz_descriptor_kernel, (num_m * num_n * heads,), length, columns, rows,
        *out.stride()[:3], post.stride(0), tables.shape[1], num_m, num_n, heads, config.slabs_of(num_n * heads),
        D=dim, BM=config.block_m, BN=config.block_n, BK=config.block_k, TRANSPOSE=transpose, TILE=TILE,
        STAGES=config.num_stages, FOLD=fold,
        num_warps=config.num_warps, num_stages=config.num_stages, device=x.device, **options,
    )  # fmt: skip

    def run(x: Tensor, tables: Tensor, pre: Tensor, post: Tensor, out: Tensor) -> None:
        multiply(post, out, descriptors=(operand(scale(x, pre)), stacked(tables)))

    return run


class Described:
    """Descriptors of contiguous memory of one dtype, read as `shape` in blocks.

    Triton checks the first one it makes. Of what it checks only the alignment can differ for the next.
    """

    def __init__(self, shape: tuple[int, ...], block: list[int]):
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        self._layout = {"shape": shape, "strides": strides, "block_shape": block}
        self._checked: dict[str, Any] | None = None

    def __call__(self, memory: Tensor) -> TensorDescriptor:
        """Return the descriptor; raise Triton's AssertionError for what it cannot describe."""
        if self._checked is None or memory.data_ptr() % ALIGNMENT:
            made = TensorDescriptor(memory, **self._layout)
            self._checked = {name: value for name, value in vars(made).items() if name != "base"}
            return made
        made = object.__new__(TensorDescriptor)
        made.__dict__.update(self._checked, base=memory)
        return made
