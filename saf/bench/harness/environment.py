"""The machine and process that measure: what they are, and how a point finds nothing that another one left."""

import gc
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from saf.bench.harness.recorder import Recorder
from saf.machine.driver import asked
from saf.machine.peaks import peak_of


def environment(device: torch.device, device_name: str) -> dict[str, Any]:
    """Return what a benchmark adds to its provenance: the device, its driver, memory and peak rates."""
    peak = peak_of(device_name)
    found = {
        "device": device_name,
        "driver": driver() if device.type == "cuda" else None,
        "peak": None if peak is None else {"flops": peak.flops, "bandwidth": peak.bandwidth, "source": peak.source},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["memory_bytes"] = properties.total_memory
        found["multiprocessors"] = properties.multi_processor_count
    return found


DRIVER_SECONDS = 20
"""How long the driver may take to say its version; one that hangs must not stop a benchmark. A round number."""
CLOCKS = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "power_limit_watts": "power.limit"}
"""What a record tells of a device's clocks, and what nvidia-smi calls it."""


def driver() -> str | None:
    """Return the NVIDIA driver's version; None when it cannot be asked."""
    answer = asked("driver_version", seconds=DRIVER_SECONDS)
    return answer.split("\n")[0].strip() or None


@contextmanager
def clocks_recorded(recorder: Recorder, device: torch.device) -> Iterator[None]:
    """Add to a record the clocks of a CUDA device before and after the block; nothing where they cannot be asked.

    The device may have slowed down before it is asked again: what is told afterwards is no more than that moment's.
    """
    before = clocks(device)
    recorder.trace(**({"clocks": {"before": before}} if before else {}))
    yield
    if before and (after := clocks(device)):
        recorder.trace(clocks={"before": before, "after": after})


def clocks(device: torch.device) -> dict[str, float]:
    """Return a CUDA device's clocks at this moment, MHz, and its power limit, W; what it does not tell is left out."""
    if device.type != "cuda":
        return {}
    # The driver numbers devices otherwise than CUDA_VISIBLE_DEVICES.
    which = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    answer = asked(",".join(CLOCKS.values()), which)
    told = dict(zip(CLOCKS, (part.strip() for part in answer.split("\n")[0].split(",")), strict=False))
    return {name: float(number) for name, number in told.items() if number.replace(".", "", 1).isdecimal()}


RECOMPILES = 64
"""Graphs of one function that the compiler may hold: an arm each, and some to spare."""


@contextmanager
def clean_process(*, compiles: bool = True) -> Iterator[None]:
    """Begin a point with an empty compiler and allocator cache, and leave them so.

    Compiled forward and backward graphs are always traced here: the attention kernel that an arm pins is no part
    of the key under which the cache of such graphs would hand them to another arm. Where nothing is compiled the
    compiler is left alone: loading it takes seconds, in a fresh process for every block.
    """
    with ExitStack() as stack:
        if compiles:
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=RECOMPILES))  # type: ignore[attr-defined]
            traced = torch._functorch.config.patch(enable_autograd_cache=False)  # type: ignore[attr-defined]
            stack.enter_context(traced)
        _forget(compiles=compiles)
        try:
            yield
        finally:
            _forget(compiles=compiles)


def _forget(*, compiles: bool) -> None:
    """Empty the compiler's cache, where it is in use, and that of the device's memory."""
    if compiles:
        torch._dynamo.reset()
    if torch.cuda.is_available():
        gc.collect()  # of what still holds the device's memory
        torch.cuda.empty_cache()


@contextmanager
def empty_kernel_cache() -> Iterator[None]:
    """Give Triton an empty folder for compiled kernels, so that the first use compiles what it needs."""
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="saf-bench-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = before
