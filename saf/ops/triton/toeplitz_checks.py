"""What the operands of a Toeplitz product must have in common."""

import torch
from torch import Tensor

from saf.errors import InputError
from saf.ops.triton.config import PRECISIONS, Config
from saf.ops.triton.tables import table_kind, table_length


def check_product(
    x: Tensor, tables: Tensor, pre: Tensor, post: Tensor, out: Tensor, config: Config, precision: str
) -> None:
    """Raise InputError unless operands `[B, F, T, D]`, tables and scalings `[F, L]` fit together and the config."""
    _, heads, length, _ = x.shape
    _check_operands(x, out, precision)
    _check_tables(tables, config, heads, length)
    _check_scale("pre", pre, heads, length)
    _check_scale("post", post, heads, length)
    if len({tensor.device for tensor in (x, tables, pre, post, out)}) != 1:
        raise InputError("x, tables, pre, post and out must be on one device")


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
