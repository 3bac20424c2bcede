"""Measure on one H200 the numbers that no change may lose, and compare each with its required value.

    python tools/gpu_numbers.py                # under eight minutes; exits 1 when a number misses its bound
    python tools/gpu_numbers.py --dry-run      # the same code at toy sizes, on the CPU too; no bound applies

The loops are this file's own, so that they check `saf bench` too. Ordinary and
live heads run cuDNN's attention: every other kernel of SDPA is switched off. A speedup is the ordinary model's time
over the frozen model's, the median over pairs in ABBA order; a second ordinary model, the control, must come within 1%.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import saf
from saf.prefill import LastToken

LAYERS = {0.25: (8, 7, 3, 5, 2, 4, 2, 2, 1, 2, 0, 0), 0.5: (11, 10, 7, 9, 6, 8, 6, 6, 3, 6, 0, 0)}
"""Frozen heads of each layer of 124M, as variance chose them on a trained model."""
CONTROL = 0.01


class Number(NamedTuple):
    """One measured number, its unit, and the lowest and highest value that pass."""

    name: str
    value: float
    unit: str = "x"
    least: float = float("-inf")
    most: float = float("inf")

    @property
    def required(self) -> str:
        """Return the bounds in words."""
        if self.least == float("-inf"):
            return f"<= {self.most:g}"
        return f">= {self.least:g}" if self.most == float("inf") else f"{self.least:g} to {self.most:g}"


class Sizes(NamedTuple):
    """What one run measures: the real sizes, or toy ones."""

    model: str = "124m"
    large: str = "1b"
    updates: tuple[tuple[int, int, int], ...] = ((4096, 8, 4), (16384, 2, 4))
    """Length, sequences of a micro-batch, micro-batches of an update."""
    prefill: tuple[int, int] = (4096, 64)
    freezing: tuple[int, int] = (4096, 32)
    memory: tuple[int, int] = (8192, 2)
    pairs: int = 8
    compile: bool = True


TOY = Sizes("tiny", "tiny", ((64, 2, 2), (128, 1, 2)), (64, 4), (64, 8), (64, 2), 2, False)


def model_of(name: str, length: int, device: str, counts: tuple[int, ...] = ()) -> saf.GPT:
    """Return a random model whose layer `l` has its first `counts[l]` heads frozen."""
    config = saf.preset(name, max_length=length)
    with torch.device(device):
        model = saf.GPT(config)
    model.reset_parameters(torch.Generator(device).manual_seed(0))
    chosen = [(layer, head) for layer, count in enumerate(counts) for head in range(min(count, config.num_heads))]
    chosen = [(layer, head) for layer, head in chosen if layer < config.num_layers]
    if chosen:
        saf.install_(model, chosen, patterns(len(chosen), length))
    return model


def patterns(heads: int, length: int) -> saf.CompactPattern:
    """Return patterns that decay with distance, with a first key that stands out."""
    generator = torch.Generator().manual_seed(1)
    slope = 0.3 + 0.9 * torch.rand(heads, 1, dtype=torch.float64, generator=generator)
    alpha = 0.1 * torch.randn(heads, length, dtype=torch.float64, generator=generator)
    alpha[:, 0] += 3
    return saf.CompactPattern.from_parameters(alpha, -slope * torch.arange(length).double().log1p())


def tokens_of(model: saf.GPT, batch: int, length: int) -> Tensor:
    """Return random token ids `[batch, length]` on the CPU."""
    return torch.randint(model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(2))


def updater(model: saf.GPT, shape: tuple[int, int, int], *, compiled: bool, layers: bool = False) -> Callable[[], None]:
    """Return what makes one update: micro-batches, clipping, AdamW; compiled whole, or each decoder layer."""
    length, batch, accumulation = shape
    device = next(model.parameters()).device
    ids = tokens_of(model, batch, length + 1).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-8, fused=True)
    call: Callable[..., Tensor] = model
    if compiled and layers:
        for block in model.blocks:
            block.compile(dynamic=False)
    elif compiled:
        call = torch.compile(model, dynamic=False)

    def update() -> None:
        for _ in range(accumulation):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = call(ids[:, :-1], targets=ids[:, 1:]) / accumulation
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def wait() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(call: Callable[[], object], repeats: int = 1) -> float:
    """Return the mean wall-clock seconds of a call, the device waited for."""
    wait()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    wait()
    return (time.perf_counter() - began) / repeats


def speedup(ordinary: Callable[[], object], other: Callable[[], object], pairs: int) -> float:
    """Return the median of ordinary seconds over the other's, over pairs in ABBA order."""
    ratios = []
    for number in range(pairs):
        first, second = (ordinary, other) if number % 2 == 0 else (other, ordinary)
        times = {first: seconds(first, 2), second: seconds(second, 2)}
        ratios.append(times[ordinary] / times[other])
    return statistics.median(ratios)


def compared(
    what: str, arms: Mapping[str, Callable[[], object]], required: Mapping[str, float], pairs: int
) -> Iterator[Number]:
    """Yield the control's ratio and each arm's speedup over the arm `ordinary`, after two untimed calls of each."""
    for call in arms.values():
        seconds(call, 2)
    ordinary = arms["ordinary"]
    yield Number(f"{what}, control", speedup(ordinary, arms["control"], pairs), "x", 1 - CONTROL, 1 + CONTROL)
    for name, least in required.items():
        yield Number(f"{what}, {name} frozen", speedup(ordinary, arms[name], pairs), "x", least)


def updates(sizes: Sizes, device: str) -> Iterator[Number]:
    """Measure whole updates of 124M at 4K and 16K with 25 and 50% of the heads frozen."""
    for shape, required in zip(sizes.updates, ((1.075, 1.17), (1.14, 1.335)), strict=True):
        torch.compiler.reset()
        counts = {"ordinary": (), "control": (), "25%": LAYERS[0.25], "50%": LAYERS[0.5]}
        arms = {
            name: updater(model_of(sizes.model, shape[0], device, frozen), shape, compiled=sizes.compile)
            for name, frozen in counts.items()
        }
        yield from compared(
            f"update at {shape[0]:,}", arms, dict(zip(("25%", "50%"), required, strict=True)), sizes.pairs
        )


def prefill(sizes: Sizes, device: str) -> Iterator[Number]:
    """Measure the prefill of 64 prompts of 4K with 25 and 50% of the heads frozen."""
    torch.compiler.reset()
    length, batch = sizes.prefill
    arms = {}
    for name, frozen in {"ordinary": (), "control": (), "25%": LAYERS[0.25], "50%": LAYERS[0.5]}.items():
        model = model_of(sizes.model, length, device, frozen).eval()
        ids = tokens_of(model, batch, length).to(device)
        run = LastToken(model)
        call = run.compiled() if sizes.compile else run
        arms[name] = called(call, ids)
    yield from compared(f"prefill {batch} x {length:,}", arms, {"25%": 1.055, "50%": 1.15}, sizes.pairs)


def called(run: Callable[[Tensor], Tensor], ids: Tensor) -> Callable[[], Tensor]:
    """Return a call of prompts as users make it: in bfloat16 on CUDA, without gradients."""

    def call() -> Tensor:
        with torch.no_grad(), torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            return run(ids)

    return call


@torch.no_grad()
def structure_(model: saf.GPT) -> None:
    """Give heads of random weights logits by distance: fits then take as long as on trained ones.

    Every embedding gets a direction in common, which queries and keys read; rotation turns it into logits by distance.
    """
    generator = torch.Generator().manual_seed(3)
    config = model.config
    common = (2.0 * torch.randint(2, (config.hidden_size,), generator=generator) - 1).to(model.embed.weight)
    model.embed.weight += model.embed.weight.std() * common
    for attention in model.attention_layers():
        strength, content = torch.rand(2, config.num_heads, 1, 1, generator=generator).to(common)
        for weight, scale in ((attention.q_proj.weight, 0.5 + 3.5 * content), (attention.k_proj.weight, 1.0)):
            rows = weight.view(config.num_heads, config.head_dim, -1)
            rows *= scale
            rows += (0.2 + 1.1 * strength).sqrt() * common * (2**0.5 / config.hidden_size)


def freezing(sizes: Sizes, device: str) -> Iterator[Number]:
    """Measure warm seconds of `saf.freeze_` at 25% on 32 sequences of 4K: the median of four after a first one."""
    length, sequences = sizes.freezing
    model = model_of(sizes.model, length, device)
    structure_(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    batches = tokens_of(model, sequences, length).split(8)
    found = []
    for _ in range(5):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            found.append(seconds(lambda: saf.freeze_(model, batches, saf.FreezeConfig(rate=0.25), optimizer=optimizer)))
        saf.uninstall_(model, optimizer=optimizer)
    yield Number(f"freezing {sequences} x {length:,}, warm", statistics.median(found[1:]), "s", most=0.5)


def memory(sizes: Sizes, device: str) -> Iterator[Number]:
    """Measure the change of an update's peak memory of 1B at 8K with half of each layer's heads frozen."""
    length, batch = sizes.memory
    config = saf.preset(sizes.large)
    peaks = []
    for frozen in ((), (config.num_heads // 2,) * config.num_layers):
        torch.compiler.reset()
        update = updater(
            model_of(sizes.large, length, device, frozen), (length, batch, 1), compiled=sizes.compile, layers=True
        )
        update()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        update()
        peaks.append(torch.cuda.max_memory_allocated() if device == "cuda" else 1)
        del update
    yield Number(f"{sizes.large} update's peak memory, 50% frozen", 100 * (peaks[1] / peaks[0] - 1), "%", most=-7.0)


def main() -> int:
    """Print a row a number as it is measured; return 1 when one misses its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, on any device; bounds do not apply")
    parser.add_argument("--compile", action="store_true", help="compile in a dry run too")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not arguments.dry_run:
        parser.error("the numbers need a CUDA device; without one only --dry-run runs")
    sizes = TOY._replace(compile=arguments.compile) if arguments.dry_run else Sizes()
    if device == "cuda":
        print(torch.cuda.get_device_name(), flush=True)
    began, missed = time.perf_counter(), 0
    print(f"{'number':<42}{'required':>18}{'measured':>12}  verdict", flush=True)
    for part in (updates, prefill, freezing, memory):
        pinned = device == "cuda" and part is not freezing
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if pinned else nullcontext():
            for number in part(sizes, device):
                passed = number.least <= number.value <= number.most
                missed += not passed
                verdict = "dry run" if arguments.dry_run else "pass" if passed else "FAIL"
                measured = f"{number.value:.3f} {number.unit}"
                print(f"{number.name:<42}{number.required:>18}{measured:>12}  {verdict}", flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    return 1 if missed and not arguments.dry_run else 0


if __name__ == "__main__":
    sys.exit(main())
