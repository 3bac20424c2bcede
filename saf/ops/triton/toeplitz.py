"""Launcher of the batch-shared Toeplitz product, forward and transposed."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saf.ops.operator import layout_of
from saf.ops.triton.choices import choices_of, config_for
from saf.ops.triton.config import Config
from saf.ops.triton.launch import MOST
from saf.ops.triton.tables import table_kind
from saf.ops.triton.toeplitz_checks import check_product
from saf.ops.triton.toeplitz_descriptor import product_through_descriptors
from saf.ops.triton.toeplitz_pointer import product_through_pointers


class Plan(NamedTuple):
    """How operands of one layout are multiplied; holds none of their memory.

    `choices` are the kept choices it was made under; `strides` those of `out`; `run` takes x, tables, pre, post, out.
    """

    choices: Any
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
        out: [B, F, T, D] view to write into, unit stride in D; default: new memory laid out as [B, T, F, D].
        config: how to run; default: what tuning kept for the shape, else the written rule (`config_for`).
        precision: of float32 products: "ieee" or "tf32".

    Returns:
        [B, F, T, D] in x's dtype.

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
    choices = choices_of(x.device) if config is None else None
    plan = _plans.get(key)
    if plan is None or plan.choices is not choices:
        if out is None:
            batch, heads, length, dim = x.shape
            out = x.new_empty(batch, length, heads, dim).transpose(1, 2)
        run = _planned(x, tables, pre, post, out, transpose, config or _config_for(x, tables, transpose), precision)
        if len(_plans) >= MOST:
            _plans.clear()
        plan = _plans[key] = Plan(choices, out.stride(), run)
    elif out is None:
        out = x.new_empty_strided(x.shape, plan.strides)
    plan.run(x, tables, pre, post, out)
    return out


def _config_for(x: Tensor, tables: Tensor, transpose: bool) -> Config:
    """Return how to run a product that no configuration was given for."""
    batch, heads, length, dim = x.shape
    return config_for(
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
    """Whether the bulk copy engine is there: compute capability 9.0 and later; not in the interpreter."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
