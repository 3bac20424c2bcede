"""Time configurations of the Toeplitz product on the device at hand; asked for by name, never by a kernel call."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.testing
from torch import Tensor

from saf.errors import AccuracyError, UnsupportedError
from saf.ops.toeplitz.choices import keep_choice, shape_key
from saf.ops.toeplitz.config import Config, in_slabs, make_tables
from saf.ops.toeplitz.launch import toeplitz_matmul
from saf.ops.toeplitz.operator import blocked_product, reversed_product

WRONG = 2e-2
"""Relative L2 error beyond which a 16-bit result is not rounding."""
SHAPES: tuple[dict[str, int], ...] = (
    {"num_warps": 4, "num_stages": 3},
    {"num_warps": 8, "num_stages": 3, "max_registers": 128},
    {"block_n": 256, "num_warps": 8, "num_stages": 3},
    {"block_m": 64, "block_n": 128, "num_warps": 4, "num_stages": 4},
    {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 4},
)
DESCRIPTOR_SHAPES: tuple[dict[str, int], ...] = (
    *SHAPES,
    {"num_stages": 4},
    {"block_m": 64, "block_n": 64, "block_k": 128, "num_stages": 3},
    {"block_n": 64, "num_stages": 4},
    {"block_n": 64, "num_stages": 5},
    {"block_n": 256, "num_warps": 8, "num_stages": 4},
    {"num_warps": 8, "num_stages": 3, "fold": 2},
    {"num_warps": 8, "num_stages": 4, "fold": 2},
)
CANDIDATES = tuple(
    dataclasses.replace(Config(prescale=prescale, loads=loads), **shape)
    for prescale, loads, shapes in (
        ("pass", "pointer", SHAPES),
        ("pass", "descriptor", DESCRIPTOR_SHAPES),
        ("tile", "pointer", SHAPES),
        ("packed", "pointer", SHAPES),
    )
    for shape in shapes
)


@dataclass(frozen=True)
class Tuned:
    """What tuning one shape found."""

    shape: str
    """As `shape_key` names it."""
    config: Config
    """The fastest, kept for this device model."""
    microseconds: dict[str, float]
    """By candidate, those that run here."""


def tune(
    *,
    length: int,
    batch: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    transpose: bool,
    device: torch.device | str = "cuda",
    candidates: Iterable[Config] = CANDIDATES,
    report: Callable[[str], None] = print,
) -> Tuned:
    """Time candidates on one shape and keep the fastest; every product of that shape uses it from now on.

    Args:
        length: positions T.
        batch: B.
        heads: frozen heads F.
        dim: channels D.
        dtype: of the operands.
        transpose: which direction.
        device: a CUDA device.
        candidates: what to try; one that does not fit the device is reported and skipped.
        report: receives a line a candidate.

    Raises:
        UnsupportedError: no CUDA device, or no candidate runs.
        AccuracyError: a candidate whose result is wrong; nothing is kept then.
    """
    where = torch.device(device)
    if where.type != "cuda":
        raise UnsupportedError(f"tuning times kernels on a CUDA device, got {where}")
    key = shape_key(length=length, batch=batch, heads=heads, dim=dim, dtype=dtype, transpose=transpose)
    generator = torch.Generator(where).manual_seed(0)
    x = torch.randn(batch, length, heads, dim, device=where, generator=generator).to(dtype).transpose(1, 2)
    weights = torch.rand(heads, length, device=where, generator=generator).to(dtype)
    before, after = torch.rand(2, heads, length, device=where, generator=generator)
    after = after / length
    expected = (reversed_product if transpose else blocked_product)(x, weights, before, after)
    times: dict[Config, float] = {}
    for candidate in candidates:
        config = in_slabs(candidate, length=length, columns=batch * dim, heads=heads, dtype=dtype)
        tables = make_tables(weights, kind=config.tables, dtype=dtype)
        out = torch.empty_like(x)

        def call(config: Config = config, tables: Tensor = tables, out: Tensor = out) -> None:
            toeplitz_matmul(x, tables, before, after, transpose=transpose, out=out, config=config)

        try:
            call()
            times[config] = _microseconds(call)
        except (triton.OutOfResources, triton.CompilationError) as error:
            report(f"{key}  {config.name}  not possible: {str(error).splitlines()[0]}")
            continue
        error = ((out - expected).norm() / expected.norm()).item()
        if not error <= WRONG:
            raise AccuracyError(f"{key}: {config.name} is {error:.1e} off, at most {WRONG:.0e} is rounding; not kept")
        report(f"{key}  {config.name}  {times[config]:.1f} us")
    if not times:
        raise UnsupportedError(f"no candidate runs for {key} on {torch.cuda.get_device_name(where)}")
    best = min(times, key=lambda config: times[config])
    keep_choice(where, key, best, times[best])
    report(f"{key}  chosen: {best.name}")
    return Tuned(key, best, {config.name: time for config, time in times.items()})


def _microseconds(call: Callable[[], None]) -> float:
    """Return the median time of one call under graph replay."""
    times: Any = triton.testing.do_bench_cudagraph(call, rep=20, return_mode="all")
    return 1e3 * statistics.median(times)
