"""Frozen heads in linear time on a GPU: errors against float64, and times beside cuDNN's and the Toeplitz product's.

    python -m benchmarks.linear --out results/linear/linear.json [--shapes 4096x8 8192x4] [--heads 3 6]

Prints a row as it goes and writes the record: medians of CUDA graph replays, in microseconds. On a CPU it
checks errors at small sizes and times nothing.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import tyro
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import saf
from saf.bench.layer import TOLERANCE
from saf.bench.models import exponential_patterns, synthetic_patterns
from saf.errors import AccuracyError
from saf.machine import GraphPool, GraphReplay
from saf.records.files import write_json


@dataclass(kw_only=True)
class Linear:
    """Check heads in linear time against float64, and time them on CUDA."""

    out: Path | None = None
    """Write the record into this JSON file."""
    shapes: tuple[str, ...] = ("4096x8", "8192x4", "16384x2", "65536x1")
    """Time these lengths x sequences."""
    heads: tuple[int, ...] = (3, 6)
    """Time these numbers of frozen heads."""
    dim: int = 64
    """Give a head this number of channels."""
    bands: tuple[int, ...] = (64, 128)
    """Time these bands: two tiles and three."""


def frozen_heads(pattern: Any, backend: str, dtype: torch.dtype, device: str) -> saf.FrozenHeads:
    """Return heads that a backend executes."""
    return saf.FrozenHeads.from_patterns(pattern, backend=backend, dtype=dtype, device=device)


def check(device: str, dtype: torch.dtype, *, length: int, dim: int, band: int, heads: int = 3) -> list[float]:
    """Return the relative errors of strided heads and of their values' gradient against float64, within the limit."""
    generator = torch.Generator().manual_seed(1)
    pattern = exponential_patterns(heads, length, generator, band=band)
    value, upstream = (
        torch.randn(2, length, heads + 2, dim, generator=generator).to(device, dtype)[:, :, 1:-1].transpose(1, 2)
        for _ in range(2)
    )
    leaf = value.detach().requires_grad_()
    result = saf.frozen_attention(leaf, frozen_heads(pattern, "linear", dtype, device))
    (gradient,) = torch.autograd.grad(result, leaf, upstream)
    dense = pattern.dense().to(device)
    pairs = ((result.detach(), dense @ value.double()), (gradient, dense.mT @ upstream.double()))
    errors = [((found - exact).norm() / exact.norm()).item() for found, exact in pairs]
    print(f"{dtype} T{length} D{dim} band {band}: error {errors[0]:.2e}, of the gradient {errors[1]:.2e}", flush=True)
    if not max(errors) <= TOLERANCE[dtype]:
        raise AccuracyError(f"error {max(errors):.2e} is above {TOLERANCE[dtype]:.1e}")
    return errors


def replayed(call: Callable[[], Any]) -> float:
    """Return the median time of a captured call, in microseconds."""
    call()
    replay = GraphReplay(call, device=torch.device("cuda"), pool=GraphPool())
    median: Any = triton.testing.do_bench(replay, warmup=8, rep=25, return_mode="median")
    return 1e3 * median


def timed(settings: Linear, length: int, batch: int, heads: int) -> dict[str, Any]:
    """Return the times, forward alone and both passes, of the same heads under cuDNN, Toeplitz and all bands."""
    shape = batch, length, heads, settings.dim
    query, key, value, gradient = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(4)
    )
    seed = torch.Generator().manual_seed(0)
    patterns = {"toeplitz": synthetic_patterns(heads, length, seed, "cuda")}
    patterns |= {f"band {band}": exponential_patterns(heads, length, seed, band=band) for band in settings.bands}

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(query, key, value, is_causal=True)

    calls: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {"cudnn": (cudnn, [query, key, value])}
    for name, pattern in patterns.items():
        frozen = frozen_heads(pattern, "toeplitz" if name == "toeplitz" else "linear", torch.bfloat16, "cuda")
        calls[name] = (lambda frozen=frozen: saf.frozen_attention(value, frozen)), [value]
    times: dict[str, list[float]] = {}
    for name, (call, inputs) in calls.items():
        with torch.no_grad():
            forward = replayed(call)
        both = replayed(lambda call=call, inputs=inputs: torch.autograd.grad(call(), inputs, gradient.detach()))
        times[name] = [forward, both]
        share = both / times["cudnn"][1]
        print(f"T {length} B {batch} heads {heads} {name}: {forward:.1f} / {both:.1f} us, {share:.4f}", flush=True)
    row: dict[str, Any] = {"length": length, "batch": batch, "heads": heads, "dim": settings.dim}
    row |= {name: times[name] for name in ("cudnn", "toeplitz")}
    bands = {band: times[f"band {band}"] for band in settings.bands}
    share = {band: both / times["cudnn"][1] for band, (_, both) in bands.items()}
    linear = [{"band": band, "forward": each[0], "both": each[1], "share": share[band]} for band, each in bands.items()]
    return row | {"linear": linear}


def main(words: Sequence[str] | None = None) -> int:
    """Check errors, then time."""
    settings = tyro.cli(Linear, args=words, prog="python -m benchmarks.linear")
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else "cpu"
    versions = {"torch": torch.__version__, "triton": triton.__version__, "cudnn": torch.backends.cudnn.version()}
    record: dict[str, Any] = {"device": device, **versions, "errors": [], "rows": []}
    shapes = [(4096, 64, 64), (4096, 64, 128), (1000, 96, 128), (2049, 256, 128)]
    shapes = shapes if cuda else [(150, 16, 64), (270, 16, 128)]
    for dtype in (torch.float32, torch.bfloat16) if cuda else (torch.float32,):
        for length, dim, band in shapes:
            errors = check("cuda" if cuda else "cpu", dtype, length=length, dim=dim, band=band)
            record["errors"].append([str(dtype), length, dim, band, max(errors)])
    for shape, heads in itertools.product(settings.shapes, settings.heads) if cuda else ():
        length, batch = map(int, shape.split("x"))
        record["rows"].append(timed(settings, length, batch, heads))
    if settings.out is not None:
        write_json(settings.out, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
