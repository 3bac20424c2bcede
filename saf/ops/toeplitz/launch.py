"""Launching the Toeplitz product: checks of operands, a plan for each layout of them, `toeplitz_matmul`.

A plan holds what follows from shapes, strides and dtypes alone, so that the second call of a layout only launches.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from saf.errors import InputError, UnsupportedError
from saf.ops.launch import ALIGNMENT, MOST, PreparedLaunch, cdiv, shared_memory
from saf.ops.operator import layout_of
from saf.ops.toeplitz.config import PAD, PRECISIONS, TILE, Config, choose_config, table_kind, table_length
from saf.ops.toeplitz.kernels import prescale_kernel, toeplitz_descriptor_kernel, toeplitz_kernel


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
    if out.shape != x.shape or out.dtype not in (x.dtype, torch.float32):
        raise InputError(f"out must be {tuple(x.shape)} {x.dtype} or float32, got {tuple(out.shape)} {out.dtype}")
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


def prescaling(x: Tensor, pre: Tensor, *, fold: int = 1, transpose: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what computes x * pre, for all of this layout, in x's dtype as contiguous [F, T, B D].

    Folded, the result is [F, T rounded up, fold B D]: group r of the columns holds the rows r - fold + 1 tiles away
    (r tiles away transposed), zero beyond T.
    """
    batch, heads, length, dim = x.shape
    rows = rows_of(length, fold)
    columns = fold * batch * dim
    shape = (heads, rows, columns)
    launch = PreparedLaunch(
        prescale_kernel, (cdiv(rows, 32), cdiv(columns, 128), heads), length, batch * dim, rows,
        *x.stride()[:3], pre.stride(0),
        D=dim, BT=32, BN=128, FOLD=fold, FIRST=0 if transpose else 1 - fold, TILE=TILE,
        num_warps=4, device=x.device,
    )  # fmt: skip

    def scale(x: Tensor, pre: Tensor) -> Tensor:
        scaled = x.new_empty(shape)
        launch(x, pre, scaled)
        return scaled

    return scale


def rows_of(length: int, fold: int) -> int:
    """Return how many rows the scaled input of `length` positions has."""
    return length if fold == 1 else cdiv(length, fold * TILE) * fold * TILE


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
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}


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
    multiply = PreparedLaunch(
        toeplitz_descriptor_kernel, (num_m * num_n * heads,), length, columns, rows,
        *out.stride()[:3], post.stride(0), tables.shape[1], num_m, num_n, heads, config.slabs_of(num_n * heads),
        D=dim, BM=config.block_m, BN=config.block_n, BK=config.block_k, TRANSPOSE=transpose, TILE=TILE,
        STAGES=config.num_stages, FOLD=fold,
        **kernel_options(config), device=x.device,
    )  # fmt: skip

    def run(x: Tensor, tables: Tensor, pre: Tensor, post: Tensor, out: Tensor) -> None:
        multiply(post, out, descriptors=(operand(scale(x, pre)), stacked(tables)))

    return run


class Described:
    """Hold descriptors of contiguous memory of one dtype, read as `shape` in blocks.

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


class Plan(NamedTuple):
    """Say how operands of one layout are multiplied; holds none of their memory.

    `strides` are those of `out`; `run` takes x, tables, pre, post, out.
    """

    strides: tuple[int, ...]
    run: Callable[..., None]


_plans: dict[tuple[Any, ...], Plan] = {}


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
        out: [B, F, T, D] view to write into, unit stride in D, of x's dtype or float32, in which sums are kept;
            default: new memory of x's dtype laid out as [B, T, F, D].
        config: how to run; default: the written rule (`choose_config`).
        precision: of float32 products: "ieee" or "tf32".

    Returns:
        `out`.

    Raises:
        InputError: shapes, strides, dtypes or devices that do not fit together.
    """
    key = (
        transpose,
        precision,
        config,
        *map(layout_of, (x, tables, pre, post)),
        None if out is None else layout_of(out),
    )
    plan = _plans.get(key)
    if plan is None:
        if out is None:
            batch, heads, length, dim = x.shape
            out = x.new_empty(batch, length, heads, dim).transpose(1, 2)
        run = _planned(x, tables, pre, post, out, transpose, config or _config_for(x, tables), precision)
        if len(_plans) >= MOST:
            _plans.clear()
        plan = _plans[key] = Plan(out.stride(), run)
    elif out is None:
        out = x.new_empty_strided(x.shape, plan.strides)
    plan.run(x, tables, pre, post, out)
    return out


def _config_for(x: Tensor, tables: Tensor) -> Config:
    """Return how to run a product that no configuration was given for, by the written rule."""
    batch, heads, length, dim = x.shape
    return choose_config(
        length=length,
        columns=batch * dim,
        heads=heads,
        dtype=x.dtype,
        tables=table_kind(tables),
        descriptors=_has_descriptors(x.device),
        shared_memory=shared_memory(x.device),
    )


def _planned(
    x: Tensor, tables: Tensor, pre: Tensor, post: Tensor, out: Tensor, transpose: bool, config: Config, precision: str
) -> Callable[..., None]:
    """Check operands and return what multiplies all of their layout."""
    check_product(x, tables, pre, post, out, config, precision)
    if out.numel() == 0:
        return lambda *_: None
    if config.loads == "descriptor":
        return product_through_descriptors(x, tables, pre, post, out, transpose, config)
    return product_through_pointers(x, tables, pre, post, out, transpose, config, precision)


@cache
def _has_descriptors(device: torch.device) -> bool:
    """Return whether the bulk copy engine is there: compute capability 9.0 and later; not in the interpreter."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
