"""Launcher of the batch-shared Toeplitz product, forward and transposed."""

from functools import cache

import torch
from torch import Tensor

from saf.errors import InputError
from saf.ops.triton.choices import config_for
from saf.ops.triton.config import PRECISIONS, Config
from saf.ops.triton.launch import cdiv, launch
from saf.ops.triton.tables import PAD, TILE, table_kind, table_length
from saf.ops.triton.toeplitz_descriptor import multiply_through_descriptors, prescaled
from saf.ops.triton.toeplitz_kernel import toeplitz_kernel


def toeplitz_matmul(
    x: Tensor,
    tables: Tensor,
    pre: Tensor,
    post: Tensor,
    *,
    transpose: bool,
    out: Tensor | None = None,
    config: Config | None = None,
    precision: str = "ieee",
) -> Tensor:
    """Multiply by diag(post) G diag(pre), head by head, with G(i, j) = g(i - j) for j <= i, or by G transposed.

    Memory beyond the T positions of x is never used, nor are scalings beyond T. Deterministic.

    Args:
        x: [B, F, T, D], unit stride in D, any other strides; bfloat16, float16 or float32.
        tables: from `make_tables`, for L >= T positions.
        pre: [F, L] float32, scales the input.
        post: [F, L] float32, scales the output.
        transpose: multiply by the transpose (the gradient with respect to the input of the other direction).
        out: [B, F, T, D] view to write into, unit stride in D; default: new memory laid out as [B, T, F, D].
        config: how to run; default: what tuning kept for the shape, else the written rule (`config_for`).
        precision: of float32 products: "ieee" or "tf32".

    Returns:
        [B, F, T, D] in x's dtype.

    Raises:
        InputError: shapes, strides, dtypes or devices that do not fit together.
    """
    batch, heads, length, dim = x.shape
    columns = batch * dim
    result = x.new_empty(batch, length, heads, dim).transpose(1, 2) if out is None else out
    if config is None:
        config = config_for(
            length=length,
            batch=batch,
            heads=heads,
            dim=dim,
            dtype=x.dtype,
            transpose=transpose,
            tables=table_kind(tables),
            descriptors=_has_descriptors(x.device),
            device=x.device,
        )
    _check_operands(x, result, precision)
    _check_tables(tables, config, heads, length)
    _check_scale("pre", pre, heads, length)
    _check_scale("post", post, heads, length)
    if len({tensor.device for tensor in (x, tables, pre, post, result)}) != 1:
        raise InputError("x, tables, pre, post and out must be on one device")
    if result.numel() == 0:
        return result
    if config.loads == "descriptor":
        multiply_through_descriptors(x, tables, pre, post, result, transpose, config)
        return result
    x_strides = (x.stride(0), x.stride(1), x.stride(2))
    if config.prescale == "pass":
        # The scaled input is [F, T, B D]: as one batch element with B D channels it is a plain matrix.
        x = prescaled(x, pre)
        x_strides = (dim, x.stride(0), x.stride(1))
    num_m = cdiv(length, config.block_m)
    num_n = cdiv(columns, config.block_n)
    launch(
        toeplitz_kernel, (num_m * num_n * heads,), x, tables, pre, post, result, length, columns,
        *x_strides, result.stride(0), result.stride(1), result.stride(2),
        tables.stride(0), tables.stride(1), pre.stride(0), post.stride(0), num_m, num_n, heads,
        config.slabs_of(num_n * heads),
        **kernel_constants(config, length, columns, dim, transpose, precision), **kernel_options(config),
        device=result.device,
    )  # fmt: skip
    return result


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


@cache
def _has_descriptors(device: torch.device) -> bool:
    """Whether the bulk copy engine is there: compute capability 9.0 and later; not in the interpreter."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _check_operands(x: Tensor, out: Tensor, precision: str) -> None:
    """Raise InputError unless input, output and precision can be used."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise InputError(f"x must be bfloat16, float16 or float32, got {x.dtype}; use another backend")
    if out.shape != x.shape or out.dtype != x.dtype:
        raise InputError(f"out must be {tuple(x.shape)} {x.dtype}, got {tuple(out.shape)} {out.dtype}")
    if x.numel() and (x.stride(3) != 1 or out.stride(3) != 1):
        raise InputError("the channels of x and out must have stride 1; pass x.contiguous()")
    if precision not in PRECISIONS:
        raise InputError(f"precision must be one of {PRECISIONS}, got {precision!r}")


def _check_tables(tables: Tensor, config: Config, heads: int, length: int) -> None:
    """Raise InputError unless the table is of the configured kind and large enough."""
    kind = table_kind(tables)
    if kind != config.tables:
        raise InputError(f"tables are of kind {kind!r}, the configuration reads {config.tables!r}; rebuild one")
    if tables.shape[0] != heads or table_length(tables) < length or not tables.is_contiguous():
        raise InputError(
            f"tables must be contiguous and serve {heads} heads and {length} positions, got "
            f"{tables.shape[0]} heads and {table_length(tables)} positions"
        )


def _check_scale(name: str, scale: Tensor, heads: int, length: int) -> None:
    """Raise InputError unless a scaling is float32 [F, L] for enough heads and positions."""
    if scale.dtype != torch.float32 or scale.ndim != 2 or scale.stride(-1) != 1:
        raise InputError(f"{name} must be float32 [F, L] with stride 1, got {scale.dtype} {tuple(scale.shape)}")
    if scale.shape[0] != heads or scale.shape[1] < length:
        raise InputError(f"{name} must cover {heads} heads and {length} positions, got {tuple(scale.shape)}")
