"""Which kernels really ran in one iteration."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from saf.bench.timing import Call, wait_for

MOST = 250
ATTENTION = ("attention", "sdpa", "flash", "fmha", "toeplitz", "fused_forward", "key_block", "query_block", "prescale")
MARKS = {
    "cudnn": ("cudnn",),
    "flash": ("flash_fwd", "flash_attention"),
    "flex": ("flex_attention", "triton_tem"),
    "fa3": ("flashattnfwd",),
    "fa4": ("flash_attncute",),
}
"""Parts of kernel names that show that an attention kernel ran; those of "flash" are in the names of others too."""


def kernels_of(call: Call, device: torch.device) -> list[dict[str, Any]]:
    """Return name, calls and milliseconds of the kernels of one call (operators on a CPU), longest first."""
    cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        call()
        wait_for(device)
    found = []
    for event in profiler.key_averages():
        if cuda and not str(event.device_type).endswith("CUDA"):
            continue
        microseconds = event.self_device_time_total if cuda else event.self_cpu_time_total
        found.append({"name": event.key[:200], "calls": event.count, "ms": microseconds / 1e3})
    return sorted(found, key=lambda kernel: -kernel["ms"])[:MOST]


def attention_kernels(kernels: Iterable[dict[str, Any]]) -> list[str]:
    """Return the names among them that mix positions."""
    return [kernel["name"] for kernel in kernels if any(part in kernel["name"].lower() for part in ATTENTION)]


def kernel_seen(kernel: str, kernels: list[dict[str, Any]], device: torch.device) -> bool | None:
    """Whether the pinned kernel is among those that ran; None when nothing was recorded or nothing was pinned."""
    if device.type != "cuda" or not kernels or kernel not in MARKS:
        return None
    names = [found["name"].lower() for found in kernels]
    if kernel == "flash":
        names = [name for name in names if not any(mark in name for mark in (*MARKS["cudnn"], *MARKS["fa4"]))]
    return any(mark in name for name in names for mark in MARKS[kernel])
