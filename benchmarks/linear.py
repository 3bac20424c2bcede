"""Frozen heads in linear time on a GPU: errors against float64, and times beside cuDNN's and the Toeplitz product's.

    python -m benchmarks.linear --out results/linear/linear.json [--no-sweep] [--shapes 4096x8 8192x4] [--heads 3 6]

Prints a row as it goes and writes the record: medians of CUDA graph replays, in microseconds. On a CPU, with
TRITON_INTERPRET=1, it checks errors at small sizes and times nothing. Whole updates with exponential patterns are
measured by `saf bench update FOLDER`.
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
from saf.bench.models import synthetic_patterns
from saf.errors import AccuracyError
from saf.machine import GraphPool, GraphReplay
from saf.ops.launch import cdiv
from saf.ops.linear.kernels import WAVE, LinearConfig, choose_config, linear_matmul
from saf.ops.linear.tables import CHUNK, exact_tables, linear_tables
from saf.records.files import write_json


@dataclass(kw_only=True)
class Linear:
    """Check the linear product against float64, and time it on CUDA."""

    out: Path | None = None
    """JSON file for the record."""
    shapes: tuple[str, ...] = ("4096x8", "8192x4", "16384x2", "65536x1")
    """Length x sequences."""
    heads: tuple[int, ...] = (3, 6)
    """Numbers of frozen heads."""
    dim: int = 64
    """Channels of a head."""
    bands: tuple[int, ...] = (64, 128)
    """Bands: two tiles and three."""
    sweep: bool = True
    """Time every configuration worth trying, not the written rule's alone."""


def patterns(heads: int, length: int, band: int, poles: int = 16, seed: int = 0) -> saf.ExponentialPattern:
    """Return patterns with two decays and small damped cosines."""
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.rand(heads, poles, generator=generator, dtype=torch.float64) for _ in range(4)]
    damping, frequency = draw[0] / 400 + 1 / 4000, 0.4 * draw[1]
    cosine, sine = (0.2 / poles) * (2 * draw[2] - 1), (0.2 / poles) * (2 * draw[3] - 1)
    damping[:, 0], damping[:, 1], frequency[:, :2], sine[:, :2] = 1 / 4000, 1 / 40, 0, 0
    cosine[:, :2] = torch.tensor([0.3, 0.7])
    near = torch.randn(heads, band, generator=generator, dtype=torch.float64)
    near = 3 - (torch.arange(band) / 8).clamp(max=3) + 0.1 * near
    alpha = 0.3 * torch.randn(heads, length, generator=generator, dtype=torch.float64)
    return saf.ExponentialPattern(alpha, near, damping, frequency, cosine, sine, length)


def check(device: str, dtype: torch.dtype, *, length: int, dim: int, band: int, heads: int = 3) -> list[float]:
    """Return the relative errors, forward and adjoint, of strided heads against float64; raise beyond the limit."""
    pattern = patterns(heads, length + 5, band)
    tables, before, after = linear_tables(exact_tables(pattern.singles(), torch.device(device)), dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, length, heads + 2, dim, generator=generator).to(device, dtype)[:, :, 1:-1].transpose(1, 2)
    dense = pattern.dense()[:, :length, :length].to(device)
    errors = []
    for transpose, matrix in ((False, dense), (True, dense.mT)):
        scalings = (after, before) if transpose else (before, after)
        result, exact = linear_matmul(x, tables, *scalings, transpose=transpose), matrix @ x.double()
        errors.append(((result - exact).norm() / exact.norm()).item())
    print(f"{dtype} T{length} D{dim} band {band}: error forward {errors[0]:.2e}, adjoint {errors[1]:.2e}", flush=True)
    if not max(errors) <= TOLERANCE[dtype]:
        raise AccuracyError(f"error {max(errors):.2e} is above {TOLERANCE[dtype]:.1e}")
    return errors


def replayed(call: Callable[[], Any], milliseconds: int = 25) -> float:
    """Return the median time of a captured call, in microseconds."""
    call()
    replay = GraphReplay(call, device=torch.device("cuda"), pool=GraphPool())
    median: Any = triton.testing.do_bench(replay, warmup=8, rep=milliseconds, return_mode="median")
    return 1e3 * median


def baselines(length: int, batch: int, heads: int, dim: int) -> dict[str, list[float]]:
    """Return forward, and forward and backward, of the same heads under cuDNN and as the Toeplitz product."""
    query, key, value, gradient = (
        torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for _ in range(4)
    )
    compact = synthetic_patterns(heads, length, torch.Generator().manual_seed(0), "cuda")
    frozen = saf.FrozenHeads.from_patterns(compact, backend="toeplitz", dtype=torch.bfloat16, device="cuda")
    calls: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {
        "cudnn": (lambda: scaled_dot_product_attention(query, key, value, is_causal=True), [query, key, value]),
        "toeplitz": (lambda: saf.frozen_attention(value, frozen), [value]),
    }
    times = {}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for name, (call, inputs) in calls.items():
            with torch.no_grad():
                forward = replayed(call)
            both = replayed(lambda c=call, i=inputs: torch.autograd.grad(c(), i, gradient.detach()))
            times[name] = [forward, both]
    return times


class Problem:
    """One length, number of heads and form of the tables, with operands of both directions."""

    def __init__(self, length: int, batch: int, heads: int, dim: int, band: int):
        self.length, self.heads, self.columns = length, heads, batch * dim
        pattern = patterns(heads, length, band)
        exact = exact_tables(pattern.singles(), torch.device("cuda"))
        self.tables, self.before, self.after = linear_tables(exact, torch.bfloat16)
        shape = batch, length, heads, dim
        self.x, self.gradient, self.out = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)
        )

    def forward(self, config: LinearConfig) -> Tensor:
        """Compute the forward product by a configuration."""
        rest = {"transpose": False, "out": self.out, "config": config}
        return linear_matmul(self.x, self.tables, self.before, self.after, **rest)

    def both(self, config: LinearConfig) -> None:
        """Compute both products."""
        self.forward(config)
        rest = {"transpose": True, "out": self.out, "config": config}
        linear_matmul(self.gradient, self.tables, self.after, self.before, **rest)

    def configs(self, *, sweep: bool) -> list[LinearConfig]:
        """Return the written rule's configuration, then those worth trying: a third of a wave of programs to two."""
        shape = {"length": self.length, "columns": self.columns, "heads": self.heads}
        configs = [choose_config(**shape, dtype=torch.bfloat16)]
        for columns, stages in itertools.product((64, 32), (2, 3, 4)) if sweep else ():
            for share in (1 / 3, 1 / 2, 2 / 3, 1, 4 / 3, 2):
                stretches = max(1, int(WAVE * share) // (self.heads * -(-self.columns // columns)))
                stretch = cdiv(cdiv(self.length, CHUNK), stretches)
                configs.append(LinearConfig(stretch, columns, (4, 4), (stages, stages)))
        return list(dict.fromkeys(each for each in configs if each.columns <= self.columns))


def timed(settings: Linear, length: int, batch: int, heads: int) -> dict[str, Any]:
    """Time one shape and number of heads with all bands; print a row for each."""
    times = baselines(length, batch, heads, settings.dim)
    row: dict[str, Any] = {"length": length, "batch": batch, "heads": heads, "dim": settings.dim, **times, "linear": []}
    words = ", ".join(f"{name} {forward:.0f} / {both:.0f} us" for name, (forward, both) in times.items())
    print(f"T {length} B {batch} heads {heads}: {words}", flush=True)
    for band in settings.bands:
        problem = Problem(length, batch, heads, settings.dim, band)
        rule, *others = problem.configs(sweep=settings.sweep)
        expected = problem.forward(rule).clone()
        ranked = [(replayed(lambda: problem.forward(rule), 12), rule)]  # noqa: B023
        for config in others:
            try:
                ranked.append((replayed(lambda: problem.forward(config), 12), config))  # noqa: B023
            except Exception as error:  # a configuration that the device cannot hold is no candidate
                print(f"  {config}: {str(error)[:100]}", flush=True)
                continue
            if not torch.allclose(problem.out, expected, rtol=0.05, atol=0.01):
                raise AccuracyError(f"{config} gives another product than the written rule")
        ranked.sort(key=lambda each: each[0])
        (forward, best), *_ = ranked
        both, by_rule = (replayed(lambda c=config: problem.both(c)) for config in (best, rule))  # noqa: B023
        entry = {"band": band, "forward": forward, "both": both, "share": both / times["cudnn"][1], "rule": by_rule}
        row["linear"].append(entry | {"config": best._asdict(), "all": [[each, *config] for each, config in ranked]})
        print(f"  band {band}: forward {forward:.1f}, both {both:.1f} us, {entry['share']:.4f} of cudnn by {best}; "
              f"rule {by_rule:.1f}", flush=True)  # fmt: skip
    return row


def main(words: Sequence[str] | None = None) -> int:
    """Check errors, then time."""
    settings = tyro.cli(Linear, args=words, prog="python -m benchmarks.linear")
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else "cpu"
    versions = {"torch": torch.__version__, "triton": triton.__version__, "cudnn": torch.backends.cudnn.version()}
    record: dict[str, Any] = {"device": device, **versions, "errors": [], "rows": []}
    small = [(150, 16, 64), (270, 16, 128)]
    shapes = [(4096, 64, 64), (4096, 64, 128), (1000, 96, 128), (2049, 256, 128)] if cuda else small
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
