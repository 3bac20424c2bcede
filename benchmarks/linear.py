"""Frozen heads in linear time on a GPU: errors against float64, and times beside cuDNN's and the Toeplitz product's.

    python benchmarks/linear.py --out results/linear [--no-sweep] [--shapes 4096x8 8192x4] [--heads 3 6] [--dim 64]
    python benchmarks/linear.py --out results/linear --shapes --updates 4096x8x4 [--shares 0.25 0.5]

Prints a table as it goes and writes linear.json: medians of CUDA graph replays, in microseconds; and speedups of whole
updates of 124M over an ordinary one, by the loop of `tools/gpu_numbers.py`, for compact and exponential patterns and
for the same heads pruned. On a CPU, with TRITON_INTERPRET=1, it checks errors at small sizes and times nothing.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import saf
from saf.bench.models import synthetic_patterns
from saf.ops.launch import cdiv
from saf.ops.linear.kernels import WAVE, LinearConfig, choose_config, linear_matmul
from saf.ops.linear.tables import CHUNK, linear_tables
from tools.gpu_numbers import CONTROL, LAYERS, model_of, seconds, speedup, updater

BEGIN = time.time()
SHAPES = ("4096x8", "8192x4", "16384x2", "65536x1")
"""Length and sequences of a batch."""
BUDGET = {torch.float32: 1e-6, torch.bfloat16: 4.5e-3}
BANDS = (64, 128)
"""Bands that are timed: two tiles and three."""


def say(*words: Any) -> None:
    """Print with the seconds since the start, at once."""
    print(f"[{time.time() - BEGIN:5.1f}s]", *words, flush=True)


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


def check(device: str, dtype: torch.dtype, *, length: int, dim: int, band: int, heads: int = 3) -> float:
    """Return the larger relative error, forward and adjoint, of strided heads against float64; raise beyond budget."""
    pattern = patterns(heads, length + 5, band)
    tables, before, after = linear_tables(pattern.singles(), dtype, torch.device(device))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, length, heads + 2, dim, generator=generator).to(device, dtype)[:, :, 1:-1].transpose(1, 2)
    dense = pattern.dense()[:, :length, :length].to(device)
    errors = []
    for transpose, matrix in ((False, dense), (True, dense.mT)):
        scalings = (after, before) if transpose else (before, after)
        found, want = linear_matmul(x, tables, *scalings, transpose=transpose), matrix @ x.double()
        errors.append(((found - want).norm() / want.norm()).item())
    name = f"{str(dtype).removeprefix('torch.')} T{length} D{dim} band {band}"
    say(f"error {name}: forward {errors[0]:.2e}, adjoint {errors[1]:.2e}")
    if not max(errors) <= BUDGET[dtype]:
        raise SystemExit(f"{name}: error {max(errors):.2e} is above {BUDGET[dtype]:.1e}")
    return max(errors)


def replayed(call: Callable[[], Any], milliseconds: int = 25) -> float:
    """Return the median time of a captured call, in microseconds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    found: Any = triton.testing.do_bench(graph.replay, warmup=8, rep=milliseconds, return_mode="median")
    return 1e3 * found


def with_gradient(call: Callable[[], Tensor], inputs: list[Tensor], gradient: Tensor) -> Callable[[], Any]:
    """Return a call of the forward and the backward pass."""
    return lambda: torch.autograd.grad(call(), inputs, gradient)


def baselines(length: int, batch: int, heads: int, dim: int) -> dict[str, list[float]]:
    """Return forward, and forward and backward, of the same heads under cuDNN and as the Toeplitz product."""
    shape = batch, length, heads, dim
    query, key, value, gradient = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(4)
    )
    gradient = gradient.detach()
    made = synthetic_patterns(heads, length, torch.Generator().manual_seed(0), torch.device("cuda"))
    frozen = saf.FrozenHeads.from_patterns(made, backend="toeplitz", dtype=torch.bfloat16, device="cuda")
    times = {}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for name, call, inputs in (
            ("cudnn", lambda: scaled_dot_product_attention(query, key, value, is_causal=True), [query, key, value]),
            ("toeplitz", lambda: saf.frozen_attention(value, frozen), [value]),
        ):
            with torch.no_grad():
                forward = replayed(call)
            times[name] = [forward, replayed(with_gradient(call, inputs, gradient))]
    return times


class Problem:
    """One length, number of heads and form of the tables, with operands of both directions."""

    def __init__(self, length: int, batch: int, heads: int, dim: int, band: int):
        self.length, self.heads, self.columns = length, heads, batch * dim
        pattern = patterns(heads, length, band)
        self.tables, self.before, self.after = linear_tables(pattern.singles(), torch.bfloat16, torch.device("cuda"))
        shape = batch, length, heads, dim
        self.x, self.gradient, self.out = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)
        )

    def forward(self, config: LinearConfig | None) -> Callable[[], Tensor]:
        """Return the forward product by a configuration, or by the written rule."""
        rest = {"transpose": False, "out": self.out, "config": config}
        return lambda: linear_matmul(self.x, self.tables, self.before, self.after, **rest)

    def both(self, config: LinearConfig | None) -> Callable[[], Any]:
        """Return both products."""
        forward, rest = self.forward(config), {"transpose": True, "out": self.out, "config": config}
        return lambda: (forward(), linear_matmul(self.gradient, self.tables, self.after, self.before, **rest))

    def rule(self) -> LinearConfig:
        """Return the written rule's configuration."""
        shape = {"length": self.length, "columns": self.columns, "heads": self.heads}
        return choose_config(**shape, dtype=torch.bfloat16)

    def candidates(self) -> list[LinearConfig]:
        """Return configurations worth trying: from a third of a wave of programs to two and a half."""
        found = []
        for columns, warps, stages in itertools.product((64, 32), (4,), (2, 3, 4)):
            others = self.heads * -(-self.columns // columns)
            for share in (1 / 3, 1 / 2, 2 / 3, 1, 4 / 3, 2):
                stretches = max(1, int(WAVE * share) // others)
                stretch = cdiv(cdiv(self.length, CHUNK), stretches)
                found.append(LinearConfig(stretch, columns, (warps, warps), (stages, stages)))
        return [one for one in found if one.columns <= self.columns]


def timed(length: int, batch: int, heads: int, dim: int, bands: list[int], *, sweep: bool) -> dict[str, Any]:
    """Time one shape and number of heads with all bands; print a row for each."""
    row: dict[str, Any] = {"length": length, "batch": batch, "heads": heads, "dim": dim}
    row |= baselines(length, batch, heads, dim)
    cudnn, toeplitz = row["cudnn"], row["toeplitz"]
    say(
        f"T {length} B {batch} heads {heads} D {dim}: cudnn {cudnn[0]:.0f} / {cudnn[1]:.0f} us, "
        f"toeplitz {toeplitz[0]:.0f} / {toeplitz[1]:.0f} ({toeplitz[1] / cudnn[1]:.3f})"
    )
    row["linear"] = []
    for band in bands:
        problem = Problem(length, batch, heads, dim, band)
        tried = [problem.rule()] + (problem.candidates() if sweep else [])
        found: list[tuple[float, LinearConfig]] = []
        answer = problem.forward(None)().clone()
        for config in dict.fromkeys(tried):
            try:
                found.append((replayed(problem.forward(config), 12), config))
                if not torch.allclose(problem.out, answer, rtol=0.05, atol=0.01):
                    raise SystemExit(f"{config} gives another product than the written rule")
            except Exception as error:  # a configuration that the device cannot hold is no candidate
                say(f"  {config}: {str(error)[:100]}")
        ranked = sorted(found, key=lambda one: one[0])
        best = ranked[0][1]
        pair = replayed(problem.both(best))
        rule = replayed(problem.both(problem.rule()))
        row["linear"].append(
            {
                "band": band,
                "forward": ranked[0][0],
                "both": pair,
                "share": pair / cudnn[1],
                "rule": rule,
                "config": best._asdict(),
                "all": [[time, *config] for time, config in ranked],
            }
        )
        nexts = "; ".join(f"{time:.1f} {tuple(config)}" for time, config in ranked[1:4])
        say(
            f"  band {band}: forward {ranked[0][0]:.1f}, both {pair:.1f} us = {pair / cudnn[1]:.4f} of "
            f"cudnn by {tuple(best)}; rule {rule:.1f}; next {nexts}"
        )
    return row


def frozen(share: float, how: str, length: int, device: str) -> saf.GPT:
    """Return a random 124M with a share of its heads frozen by one kind of pattern, or pruned."""
    counts = LAYERS[share]
    if how == "compact":
        return model_of("124m", length, device, counts)
    model = model_of("124m", length, device)
    chosen = [(layer, head) for layer, count in enumerate(counts) for head in range(count)]
    if how == "pruned":
        saf.prune_(model, chosen)
    else:
        saf.install_(model, chosen, patterns(len(chosen), length, band=128))
    return model


def updates(shape: tuple[int, int, int], shares: list[float], pairs: int = 6) -> dict[str, Any]:
    """Return speedups of whole updates over an ordinary model's; a second ordinary one is the control."""
    torch.compiler.reset()
    row: dict[str, Any] = {"length": shape[0], "batch": shape[1], "micro_batches": shape[2], "speedups": {}}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        arms = {name: updater(model_of("124m", shape[0], "cuda"), shape, compiled=True) for name in ("", "control")}
        for share, how in itertools.product(shares, ("compact", "exponential", "pruned")):
            arms[f"{share:.0%} {how}"] = updater(frozen(share, how, shape[0], "cuda"), shape, compiled=True)
        for name, call in arms.items():
            seconds(call, 2)
            say(f"  {name or 'ordinary'}: {1e3 * seconds(call, 2):.1f} ms")
        ordinary = arms.pop("")
        for name, call in arms.items():
            row["speedups"][name] = speedup(ordinary, call, pairs)
            say(f"update {shape}: {name} {row['speedups'][name]:.4f}")
    row["valid"] = abs(row["speedups"]["control"] - 1) <= CONTROL
    return row


def main() -> None:
    """Check errors, then time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="Folder to write linear.json into.")
    parser.add_argument("--shapes", nargs="*", default=SHAPES, help="Length and sequences, such as 4096x8.")
    parser.add_argument("--heads", type=int, nargs="+", default=[3, 6])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--sweep", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--bands", type=int, nargs="+", default=BANDS)
    parser.add_argument("--updates", nargs="*", default=[], help="Length, sequences, micro-batches: 4096x8x4.")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5])
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    say(torch.cuda.get_device_name() if cuda else "interpreter", torch.__version__, triton.__version__)
    shapes = [(4096, 64, 64), (4096, 64, 128), (1000, 96, 128), (2049, 256, 128)]
    if not cuda:
        shapes = [(150, 16, 64), (270, 16, 128)]
    record = {"device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__}
    record |= {"triton": triton.__version__, "cudnn": torch.backends.cudnn.version()}
    record |= {"errors": [], "rows": [], "updates": []}

    def write() -> None:
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / "linear.json").write_text(json.dumps(record, indent=1))

    for dtype in (torch.float32, torch.bfloat16) if cuda else (torch.float32,):
        for length, dim, band in shapes:
            error = check("cuda" if cuda else "cpu", dtype, length=length, dim=dim, band=band)
            record["errors"].append([str(dtype), length, dim, band, error])
    shapes_timed: Any = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes] if cuda else []
    for (length, batch), heads in itertools.product(shapes_timed, arguments.heads):
        record["rows"].append(timed(length, batch, heads, arguments.dim, arguments.bands, sweep=arguments.sweep))
        write()
    for shape in arguments.updates:
        length, batch, micro_batches = map(int, shape.split("x"))
        record["updates"].append(updates((length, batch, micro_batches), arguments.shares))
        write()


if __name__ == "__main__":
    main()
