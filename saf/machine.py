"""The machine that models run on: device, precision and compilation, CUDA graphs, timers, names and rated speeds."""

import gc
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, get_args

import torch

from saf.errors import UnsupportedError, check_name

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "fp32", "bf16"]
Compile = Literal["auto", "on", "off", "layers"]
Call = Callable[[], Any]


# --- where and how a model computes


@dataclass(frozen=True)
class Execution:
    """A resolved device, precision ("fp32" or "bf16") and form of compilation."""

    device: torch.device
    precision: str
    compile: bool
    by_layer: bool = False
    """Compile each decoder layer by itself, one program per layout of heads, instead of the whole model."""
    activation_checkpointing: bool = False
    """Keep only the input of each decoder layer and recompute the layer in the backward pass."""

    @classmethod
    def of(
        cls,
        device: str = "auto",
        *,
        precision: str = "auto",
        compile: str = "auto",
        activation_checkpointing: bool = False,
        several_events: bool = False,
    ) -> "Execution":
        """Resolve every "auto": bf16 autocast and compiled where there is CUDA, fp32 and eager on a CPU.

        With `several_events`, "auto" compiles "layers" on CUDA: a model compiled whole compiles again at each of them.
        """
        check_name("compile", compile, get_args(Compile))  # another word would silently compile the whole model
        resolved = pick_device(device)
        if compile == "auto":
            # Seconds lost at 124M, at the start and at two events: whole 25, 30 and 28.5, by layers 12.6, 26.4 and 3.5.
            # Updates are as fast either way.
            form = "layers" if several_events else "on"
            compile = form if resolved.type == "cuda" else "off"
        return cls(
            device=resolved,
            precision=resolve_precision(resolved, precision),
            compile=compile != "off",
            by_layer=compile == "layers",
            activation_checkpointing=activation_checkpointing,
        )

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.device, self.precision)


def pick_device(name: str) -> torch.device:
    """Return the device that "auto", "cpu" or "cuda" means; raise UnsupportedError for CUDA where there is none."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UnsupportedError('device="cuda", but torch sees no CUDA device; use "cpu" or "auto"')
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def resolve_precision(device: torch.device, precision: str) -> str:
    """Return "fp32" or "bf16"; "auto" is bf16 on CUDA and fp32 elsewhere."""
    check_name("precision", precision, get_args(Precision))  # another word would silently compute in bf16
    if precision == "auto":
        return "bf16" if device.type == "cuda" else "fp32"
    return precision


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return the context that runs a model of float32 weights in `precision`."""
    if resolve_precision(device, precision) == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device, with PyTorch's unused reserve; None where it is unknown."""
    if device.type == "cuda":
        # mem_get_info counts what PyTorch reserved and does not use as taken.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:  # Linux alone has this file
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


_copies = count()


def own_program(function: Callable[..., Any]) -> FunctionType:
    """Return a copy of a function without a closure, to compile a program of its own from.

    The compiler stores programs by code object. It tries all programs of one in every call, generalises the second in
    the sizes that differ, and raises beyond `recompile_limit` (8). Independent programs need a code object each, and
    a name each, by which sizes are remembered.
    """
    name = f"{function.__name__}_{next(_copies)}"
    return FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)


RECOMPILES = 64
"""Programs that the compiler may hold for one function in a clean process; PyTorch allows 8."""


@contextmanager
def clean_process(*, compiles: bool = True) -> Iterator[None]:
    """Begin and end with an empty compiler and allocator cache, as benchmarks do that hold several models in turn.

    Where nothing is compiled the compiler is not loaded, which takes seconds.
    """

    def forget() -> None:
        if compiles:
            torch._dynamo.reset()
        if torch.cuda.is_available():
            gc.collect()  # models with frozen heads are in reference cycles: only this frees their memory
            torch.cuda.empty_cache()

    with ExitStack() as stack:
        if compiles:
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=RECOMPILES))  # type: ignore[attr-defined]
            # The pinned attention kernel is no part of this cache's key: it would hand one model's graph to another.
            stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))  # type: ignore[attr-defined]
        forget()
        stack.callback(forget)
        yield


@contextmanager
def one_host_thread(device: str) -> Iterator[None]:
    """With a GPU, run host operations on one thread in this context.

    Copies of batches wake all threads, which then spin next to the one that launches kernels: an update of 34M at 4K
    takes 0.080 s with 64 threads and 0.055 s with one (four runs on an H200 host). The whole run has one number,
    because compiled code is compiled again where it changes.
    """
    threads = torch.get_num_threads()
    if device != "cpu" and torch.cuda.is_available():
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- CUDA graphs


class GraphPool:
    """Memory that several CUDA graphs share; they never run together, and a replay overwrites the others' output."""

    def __init__(self):
        self.handle: Any = None  # created at the first capture, as the stream is: they need a device
        self.stream: torch.cuda.Stream | None = None


class GraphReplay:
    """A call captured as a CUDA graph: calling this replays it with one launch."""

    def __init__(self, call: Call, *, device: torch.device, pool: GraphPool, same_stream: bool = False):
        """Run `call` on a side stream, then capture it; raise UnsupportedError without CUDA.

        With `same_stream` that is the pool's: graphs reuse memory only of their own stream. Capture inside
        `saf.ops.for_graphs`, which chooses the kernels of frozen layers for graphs. `outcome` is the captured call's
        return value: every replay writes to its memory.
        """
        if device.type != "cuda":
            raise UnsupportedError("CUDA graphs need a CUDA device")
        pool.handle = pool.handle or torch.cuda.graph_pool_handle()
        pool.stream = pool.stream or torch.cuda.Stream(device)
        stream = pool.stream if same_stream else torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            # What happens in the first calls alone must not be captured: cuBLAS takes its workspace, kernels are tuned.
            for _ in range(3):
                call()
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool.handle, stream=stream):
            self.outcome = call()

    def __call__(self) -> None:
        self._graph.replay()


# --- time


def untimed_updates(updates: int) -> int:
    """Return how many of the first `updates` are left out of timings: ten, or a quarter of a short run's.

    The first ones after an event or a resumption compile, and the allocator and caches grow.
    """
    return min(10, max(0, updates) // 4)


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Add up wall-clock seconds by name, waiting for the device so that asynchronous work counts where it was launched.

    >>> watch = Stopwatch()
    >>> with watch("fit"):
    ...     pass
    >>> list(watch.seconds)
    ['fit']
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self.seconds: dict[str, float] = {}
        self._device = torch.device(device)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        wait_for(self._device)  # kernels are launched ahead: without waiting, a part would lend its seconds to the next
        start = time.perf_counter()
        try:
            yield
        finally:
            wait_for(self._device)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


# --- names and rated speeds

RATED_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
"""Dense bf16 FLOP/s of data sheets, by a part of the device's name."""


def rated_flops(device_name: str, precision: str) -> float | None:
    """Return the FLOP/s of the device's data sheet in bf16; None when unknown or another precision is used."""
    if precision != "bf16":
        return None
    return next((flops for part, flops in RATED_FLOPS.items() if part in device_name), None)


def device_name(device: torch.device) -> str:
    """Return the accelerator's name, or the processor's architecture with the threads that PyTorch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"


def visible_devices() -> tuple[str, ...]:
    """Return the CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES names them; none on a CPU."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    return tuple(name for name in named.split(",") if name)


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver; None where nvidia-smi is missing, fails or takes longer than 20 s."""
    # nvidia-smi creates no context on a device, which would take memory there. It prints a line for each GPU; all have
    # one driver.
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return lines.split("\n")[0].strip() or None
