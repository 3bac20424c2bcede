"""Launching the linear product: tiles, and a plan for each layout of operands."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saf.errors import InputError
from saf.ops.launch import MOST, PreparedLaunch, cdiv
from saf.ops.linear.kernels import mix_kernel, scan_kernel, states_kernel
from saf.ops.linear.operator import CHUNK, LinearTables
from saf.ops.operator import layout_of

WAVE = 396
"""Programs that run at once: three on each of the 132 multiprocessors of an H100 or H200. Programs beyond
them wait for a second wave, and fewer leave room unused (4K x 8, 6 heads: 768 programs 68 us, 384 52 us, 192 68 us)."""
SCAN_COLUMNS = 32
"""Columns of a program that adds states up: few, since it waits for memory and not for arithmetic."""


class LinearConfig(NamedTuple):
    """Say how the kernels run.

    Attributes:
        stretch: chunks that a program walks.
        columns: of B x D that it computes, a power of two.
        warps: of `states_kernel` and of `mix_kernel`.
        stages: loads in flight, of each.
    """

    stretch: int
    columns: int
    warps: tuple[int, int] = (4, 4)
    stages: tuple[int, int] = (2, 2)


def choose_config(*, length: int, columns: int, heads: int, dtype: torch.dtype, chunk: int = CHUNK) -> LinearConfig:
    """Return the written rule: as many programs as run at once, or as little more as there are heads and columns.

    Shorter stretches than two chunks would read more for the chunks before them than for their own.
    """
    exact = dtype == torch.float32  # sums in registers, without matrix units
    block = min(16 if exact else 64, max(16, 1 << (columns - 1).bit_length()))
    chunks, others = cdiv(length, chunk), heads * cdiv(columns, block)
    stretch = max(2, cdiv(chunks, max(1, WAVE // others)))
    # Loads three chunks ahead: 5% sooner than two, and four are no better.
    warps, stages = (8, (2, 1)) if exact else (4 if chunk == 64 else 8, (3, 3))
    return LinearConfig(stretch, block, (4, warps), stages)


_plans: dict[tuple[Any, ...], Any] = {}


def linear_matmul(
    x: Tensor,
    tables: LinearTables,
    before: Tensor,
    after: Tensor,
    sources: Tensor | None = None,
    *,
    transpose: bool,
    out: Tensor | None = None,
    config: LinearConfig | None = None,
    precision: str = "ieee",
) -> Tensor:
    """Compute `after[i] sum_j g(i - j) before[j] x[j]` over j <= i, with `transpose` over j >= i, head by head.

    Deterministic; neither memory beyond the T positions of x nor scalings beyond T are read.

    Args:
        x: `[B, H, T, D]`, unit stride in D, any others; bfloat16, float16 or float32.
        tables: of F heads, in x's dtype.
        before: `[F, >=T]` float32, scales the input.
        after: `[F, >=T]` float32, scales the output.
        sources: `[F]` int32, the head of x that each of the F reads; None where H = F and each reads its own.
        transpose: multiply by the transpose.
        out: `[B, F, T, D]` view to write into, unit stride in D; default: new memory laid out as `[B, T, F, D]`.
        config: how to run; default: the written rule.
        precision: of float32 products, "ieee" or "tf32".

    Raises:
        InputError: operands that do not fit together.
    """
    key = (
        transpose, precision, config, sources is None, *map(layout_of, (x, *tables, before, after)),
        None if out is None else layout_of(out),
    )  # fmt: skip
    plan = _plans.get(key)
    if out is None:
        batch, _, length, dim = x.shape
        out = x.new_empty(batch, length, len(before), dim).transpose(1, 2)
    if plan is None:
        plan = _planned(x, tables, before, after, sources, out, transpose, config, precision)
        if len(_plans) >= MOST:
            _plans.clear()
        _plans[key] = plan
    plan(x, tables, before, after, before if sources is None else sources, out)
    return out


def _planned(
    x: Tensor, tables: LinearTables, before: Tensor, after: Tensor, sources: Tensor | None, out: Tensor,
    transpose: bool, config: LinearConfig | None, precision: str,
) -> Any:  # fmt: skip
    """Check operands and return what multiplies all of their layout."""
    _check(x, tables, before, after, sources, out)
    batch, _, length, dim = x.shape
    heads, reach, rows, _ = tables.near.shape
    poles = tables.write.shape[1] // 2
    columns = batch * dim
    if config is None:
        config = choose_config(length=length, columns=columns, heads=heads, chunk=rows, dtype=x.dtype)
    if not out.numel():
        return lambda *_: None
    block, stretches = config.columns, cdiv(cdiv(length, rows), config.stretch)
    product, own, mixing = linear_constants(
        config, rows=rows, reach=reach, poles=poles, powers=tables.turns.shape[1], dim=dim, columns=columns,
        reverse=transpose, mapped=sources is not None, precision=precision,
    )  # fmt: skip
    blocks = cdiv(columns, block)
    add = PreparedLaunch(
        states_kernel, (stretches - 1, heads, blocks), length, columns, config.stretch, *x.stride()[:3],
        before.stride(0), **product, **own, device=x.device,
    )  # fmt: skip
    scan = PreparedLaunch(
        scan_kernel, (heads, cdiv(columns, SCAN_COLUMNS)), columns, stretches - 1, config.stretch,
        P=poles, BN=SCAN_COLUMNS, POWERS=product["POWERS"], num_warps=4, device=x.device,
    )  # fmt: skip
    mix = PreparedLaunch(
        mix_kernel, (stretches, heads, blocks), length, columns, config.stretch, *x.stride()[:3],
        *out.stride()[:3], before.stride(0), after.stride(0), **product, **mixing, device=x.device,
    )  # fmt: skip
    shape = (heads, max(1, stretches - 1), 2, poles, columns)

    def run(x: Tensor, tables: LinearTables, before: Tensor, after: Tensor, sources: Tensor, out: Tensor) -> None:
        """Launch the kernels on new memory for the states."""
        states = before.new_empty(shape, dtype=torch.float32)
        if stretches > 1:
            add(x, before, sources, tables.write, tables.turns, states)
            if stretches > 2:
                scan(states, tables.turns)
        mix(x, before, sources, after, tables.near, tables.write, tables.read, tables.turns, states, out)

    return run


def linear_constants(
    config: LinearConfig, *, rows: int, reach: int, poles: int, powers: int, dim: int, columns: int, reverse: bool,
    mapped: bool, precision: str,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Return the compile-time arguments of both kernels, those of `states_kernel` alone and of `mix_kernel` alone."""
    product = {
        "D": dim, "C": rows, "P": poles, "BN": config.columns, "REACH": reach, "POWERS": powers,
        "REVERSE": reverse, "MAPPED": mapped, "EVEN_N": columns % config.columns == 0, "PRECISION": precision,
    }  # fmt: skip
    own, mixing = (
        {"STAGES": stages, "num_warps": warps, "num_stages": stages}
        for warps, stages in zip(config.warps, config.stages, strict=True)
    )
    return product, own, mixing


def _check(x: Tensor, tables: LinearTables, before: Tensor, after: Tensor, sources: Tensor | None, out: Tensor) -> None:
    """Raise InputError unless operands `[B, H, T, D]`, tables and scalings fit together."""
    batch, given, length, dim = x.shape
    heads, reach, rows, _ = tables.near.shape
    if out.shape != (batch, heads, length, dim) or (sources is None and given != heads):
        raise InputError(f"out must be {(batch, heads, length, dim)}, got {tuple(out.shape)} for x {tuple(x.shape)}")
    if x.numel() and (x.stride(3) != 1 or out.stride(3) != 1):
        raise InputError("the channels of x and out must have stride 1; pass x.contiguous()")
    for name, scale in (("before", before), ("after", after)):
        if scale.dtype != torch.float32 or scale.shape[0] != heads or scale.shape[1] < length or scale.stride(1) != 1:
            raise InputError(f"{name} must be float32 [{heads}, >={length}] with stride 1, got {list(scale.shape)}")
    if any(table.dtype != x.dtype for table in tables[:3]) or not all(table.is_contiguous() for table in tables):
        raise InputError(f"tables must be contiguous and {x.dtype}, as values are; got {tables.near.dtype}")
    if reach > 3:
        raise InputError(f"a band must end within two chunks of {rows} rows; this one reaches {reach - 1}")
