"""Launcher of the product whose operands are read through addresses."""

from collections.abc import Callable

from torch import Tensor

from saf.ops.triton.config import Config
from saf.ops.triton.launch import PreparedLaunch, cdiv
from saf.ops.triton.prescale import prescaling
from saf.ops.triton.tables import PAD, TILE
from saf.ops.triton.toeplitz_kernel import toeplitz_kernel


def product_through_pointers(
    x: Tensor, tables: Tensor, pre: Tensor, post: Tensor, out: Tensor, transpose: bool, config: Config, precision: str
) -> Callable[..., None]:
    """Return what multiplies operands of this layout, read through addresses."""
    batch, heads, length, dim = x.shape
    columns = batch * dim
    x_strides = x.stride()[:3]
    scale = None
    if config.prescale == "pass":
        # The scaled input is [F, T, B D]: as one batch element with B D channels it is a plain matrix.
        scale = prescaling(x, pre)
        x_strides = (dim, length * columns, columns)
    num_m = cdiv(length, config.block_m)
    num_n = cdiv(columns, config.block_n)
    multiply = PreparedLaunch(
        toeplitz_kernel, (num_m * num_n * heads,), length, columns, *x_strides, *out.stride()[:3],
        tables.stride(0), tables.stride(1), pre.stride(0), post.stride(0), num_m, num_n, heads,
        config.slabs_of(num_n * heads),
        **kernel_constants(config, length, columns, dim, transpose, precision), **kernel_options(config),
        device=x.device,
    )  # fmt: skip

    def run(x: Tensor, tables: Tensor, pre: Tensor, post: Tensor, out: Tensor) -> None:
        multiply(x if scale is None else scale(x, pre), tables, pre, post, out)

    return run


def kernel_constants(
    config: Config, length: int, columns: int, dim: int, transpose: bool, precision: str
) -> dict[str, int | bool | str]:
    """Return the compile-time arguments of `toeplitz_kernel` for one shape."""
    return {
        "D": dim,
        "BM": config.block_m,
        "BN": config.block_n,
        "BK": config.block_k,
        "TRANSPOSE": transpose,
        "TABLES": config.tables,
        "PRESCALE": config.prescale,
        "PAD": PAD,
        "TILE": TILE,
        "EVEN_T": length % max(config.block_m, config.block_k) == 0,
        "EVEN_N": columns % config.block_n == 0,
        "PRECISION": precision,
        "STAGES": config.num_stages,
    }


def kernel_options(config: Config) -> dict[str, int]:
    """Return the compiler's options for a configuration."""
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return options | ({"maxnreg": config.max_registers} if config.max_registers else {})
