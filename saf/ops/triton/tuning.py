"""Measure configurations of the Toeplitz product on the device at hand; never called by a kernel call."""

import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.testing
from torch import Tensor

from saf.errors import UnsupportedError
from saf.ops.triton.config import Config
from saf.ops.triton.tables import make_tables
from saf.ops.triton.toeplitz import toeplitz_matmul

SHAPES: tuple[dict[str, int], ...] = (
    {"num_warps": 4, "num_stages": 3},
    {"num_warps": 8, "num_stages": 3, "max_registers": 128},
    {"block_n": 256, "num_warps": 8, "num_stages": 3},
    {"block_m": 64, "block_n": 128, "num_warps": 4, "num_stages": 4},
    {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 4},
)
CANDIDATES = tuple(
    dataclasses.replace(Config(prescale=prescale, loads=loads), **shape)
    for prescale, loads in (("pass", "pointer"), ("pass", "descriptor"), ("tile", "pointer"), ("packed", "pointer"))
    for shape in SHAPES
)


def cache_file(device: torch.device) -> Path:
    """Path of the file that keeps the choices for one device model."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    return root / "saf" / f"toeplitz-{name}-triton-{triton.__version__}.json"


def shape_key(*, length: int, batch: int, heads: int, dim: int, dtype: torch.dtype, transpose: bool) -> str:
    """Name one shape in the cache."""
    direction = "transposed" if transpose else "forward"
    return f"T{length} B{batch} F{heads} D{dim} {str(dtype).removeprefix('torch.')} {direction}"


def read_choices(device: torch.device) -> dict[str, Config]:
    """Return the cached choices by `shape_key`; empty if there are none."""
    path = cache_file(device)
    if not path.exists():
        return {}
    return {key: Config(**entry["config"]) for key, entry in json.loads(path.read_text()).items()}


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
) -> Config:
    """Time candidates on one shape, keep the fastest in the user's cache directory and return it.

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
    """
    where = torch.device(device)
    if where.type != "cuda":
        raise UnsupportedError(f"tuning times kernels on a CUDA device, got {where}")
    key = shape_key(length=length, batch=batch, heads=heads, dim=dim, dtype=dtype, transpose=transpose)
    generator = torch.Generator(where).manual_seed(0)
    x = torch.randn(batch, length, heads, dim, device=where, generator=generator).to(dtype).transpose(1, 2)
    g = torch.rand(heads, length, device=where, generator=generator)
    scale = torch.rand(heads, length, device=where, generator=generator)
    best: tuple[float, Config] | None = None
    for config in candidates:
        tables = make_tables(g, kind=config.tables, dtype=dtype)
        try:
            milliseconds = _time(x, tables, scale, config, transpose)
        except (triton.OutOfResources, triton.CompilationError) as error:
            report(f"{key}  {config.name}  not possible: {str(error).splitlines()[0]}")
            continue
        report(f"{key}  {config.name}  {milliseconds * 1e3:.1f} us")
        if best is None or milliseconds < best[0]:
            best = (milliseconds, config)
    if best is None:
        raise UnsupportedError(f"no candidate runs for {key} on {torch.cuda.get_device_name(where)}")
    _store(cache_file(where), key, {"config": best[1].to_dict(), "microseconds": best[0] * 1e3})
    report(f"{key}  chosen: {best[1].name}")
    return best[1]


def _time(x: Tensor, tables: Tensor, scale: Tensor, config: Config, transpose: bool) -> float:
    """Return the median milliseconds of one call under graph replay."""
    out = torch.empty_like(x)

    def call() -> None:
        toeplitz_matmul(x, tables, scale, scale, transpose=transpose, out=out, config=config)

    call()
    times: Any = triton.testing.do_bench_cudagraph(call, rep=20, return_mode="all")
    return statistics.median(times)


def _store(path: Path, key: str, entry: dict) -> None:
    """Add one choice to the cache file, replacing it as a whole."""
    choices = json.loads(path.read_text()) if path.exists() else {}
    choices[key] = entry
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(choices, indent=1, sort_keys=True))
    temporary.replace(path)
