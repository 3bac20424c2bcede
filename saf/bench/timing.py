"""Timed blocks of calls, called or replayed as CUDA graphs, and the kernels that a call runs."""

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from saf.errors import UnsupportedError
from saf.machine import Call

CALL, GRAPH = "call", "graph"
SETTLE_MS = 400.0
"""Untimed calls before a timed block of a model on CUDA, ms: clocks follow the load over more than 100 ms."""
REST_MS = 200.0
"""Idle time before a timed block of an operator on CUDA, ms: clocks are at their highest again after about 150."""
MAX_KERNELS = 250
"""Kernels of a pass that are recorded, the longest ones; a compiled update runs some 200."""


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_block(call: Call, *, repeats: int, device: torch.device, settle: int = 0) -> float:
    """Return the median milliseconds of `repeats` calls, each synchronised, after `settle` untimed ones."""
    for _ in range(settle):
        call()
    return statistics.median(row_block(call, repeats=1, device=device) for _ in range(repeats))


def row_block(call: Call, *, repeats: int, device: torch.device) -> float:
    """Return the mean milliseconds of `repeats` calls in a row, synchronised before the first and after the last."""
    wait_for(device)
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    wait_for(device)
    return 1e3 * (time.perf_counter() - began) / repeats


def event_block(call: Call, *, repeats: int, device: torch.device, rest_ms: float = 0.0) -> float:
    """Return the median milliseconds between CUDA events around `repeats` calls, after an idle time.

    A GPU at its power limit lowers its clocks some 20 ms after a demanding arm began and raises them over more than
    100 ms: short blocks after a rest see neither (docs/log.md). Without CUDA it is the wall clock.
    """
    wait_for(device)
    time.sleep(1e-3 * rest_ms)
    if device.type != "cuda":
        return wall_block(call, repeats=repeats, device=device)
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        call()
        end.record()
    wait_for(device)
    return statistics.median(start.elapsed_time(end) for start, end in events)


def repeats_within(block_ms: float, once_ms: float, most: int) -> int:
    """Return how many calls of `once_ms` fill a timed block of `block_ms`: 1 to `most`."""
    return min(most, max(1, math.ceil(block_ms / once_ms)))


def launch_modes(graphs: str, device: torch.device) -> tuple[str, ...]:
    """Return the modes that `graphs` ("off", "on", "both") times: called, replayed as a CUDA graph.

    Without CUDA only calls are timed, and "on" raises UnsupportedError.
    """
    if device.type == "cuda":
        return {"off": (CALL,), "on": (GRAPH,), "both": (CALL, GRAPH)}[graphs]
    if graphs == "on":
        raise UnsupportedError("CUDA graphs need a CUDA device; use --graphs off")
    return (CALL,)


# Kernels

ATTENTION = (
    *("attention", "sdpa", "flash", "fmha", "toeplitz", "fused_forward", "key_block", "query_block", "prescale"),
    "flash_decode_kernel",
)
MARKS = {
    "cudnn": ("cudnn",),
    "flash": ("flash_fwd", "flash_attention"),
    "flex": ("flex_attention", "triton_tem"),
    "fa3": ("flashattnfwd",),
    "fa4": ("flash_attncute",),
    "flash_decode": ("flash_decode_kernel",),
}
"""Parts of names of GPU kernels that show which attention kernel ran; those of "flash" are in the names of others."""


def kernels_of(call: Call, device: torch.device, *, most: int | None = MAX_KERNELS) -> list[dict[str, Any]]:
    """Return name, calls and milliseconds of the `most` longest kernels of one call (operators on a CPU)."""
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        call()
        wait_for(device)
    kernels = []
    for event in profiler.key_averages():
        if not cuda or str(event.device_type).endswith("CUDA"):
            microseconds = event.self_device_time_total if cuda else event.self_cpu_time_total
            kernels.append({"name": event.key[:200], "calls": event.count, "ms": microseconds / 1e3})
    return sorted(kernels, key=lambda kernel: -kernel["ms"])[:most]


def attention_kernels(kernels: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of kernels that mix positions."""
    return [kernel["name"] for kernel in kernels if any(part in kernel["name"].lower() for part in ATTENTION)]


def kernel_seen(kernel: str, kernels: Sequence[Mapping[str, Any]], device: torch.device) -> bool | None:
    """Return whether the pinned kernel is among those that ran; None where nothing was recorded or pinned."""
    if device.type != "cuda" or not kernels or kernel not in MARKS:
        return None
    names = [entry["name"].lower() for entry in kernels]
    if kernel == "flash":
        names = [name for name in names if not any(mark in name for mark in (*MARKS["cudnn"], *MARKS["fa4"]))]
    return any(mark in name for name in names for mark in MARKS[kernel])
