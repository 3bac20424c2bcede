"""The second stream of a device: what a captured CUDA graph runs at the same time as what follows it."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch


def captured(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured; called, a second stream costs the host more than it gains."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def beside(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context whose work a captured graph runs beside what comes behind it, up to `meet`.

    In calls it only makes the stream: cuBLAS keeps memory for it. Memory of what runs in it must be made outside, on
    the stream that frees it.
    """
    if device.type != "cuda":
        return nullcontext()
    side = _side_stream(device)
    if not captured(device):
        return nullcontext()
    side.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(side)


def meet(device: torch.device) -> None:
    """Let a captured graph go on only when what ran in `beside` has ended."""
    if captured(device):
        torch.cuda.current_stream(device).wait_stream(_side_stream(device))


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the second stream of a device, made once."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda.current_blas_handle()
    return stream
