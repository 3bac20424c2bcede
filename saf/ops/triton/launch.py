"""Launch a Triton kernel on the device of its tensors."""

from contextlib import nullcontext
from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, device: torch.device, **constants: Any) -> None:
    """Run a kernel; Triton launches on the current device, so make that the tensors' one."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        kernel[grid](*args, **constants)


def cdiv(count: int, size: int) -> int:
    """Return how many blocks of `size` cover `count`, as a plain int."""
    return -(-count // size)
