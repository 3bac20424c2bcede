"""Milliseconds of a call: warm-up, synchronised wall clock, device events, CUDA-graph replay."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from saf.errors import UnsupportedError

Call = Callable[[], Any]


def wait_for(device: torch.device) -> None:
    """Wait until the device has done everything asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_block(call: Call, *, repeats: int, device: torch.device) -> float:
    """Return the median milliseconds of `repeats` calls, the device waited for before and after each."""
    times = []
    for _ in range(repeats):
        wait_for(device)
        began = time.perf_counter()
        call()
        wait_for(device)
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def event_block(call: Call, *, repeats: int, device: torch.device) -> float:
    """Return the median milliseconds between device events around `repeats` calls; wall clock without CUDA."""
    if device.type != "cuda":
        return wall_block(call, repeats=repeats, device=device)
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
    wait_for(device)
    for start, end in events:
        start.record()
        call()
        end.record()
    wait_for(device)
    return statistics.median(start.elapsed_time(end) for start, end in events)


def repeats_within(block_ms: float, once_ms: float, most: int) -> int:
    """Return how many repeats of `once_ms` fill a block of `block_ms`: at least 1, at most `most`."""
    return min(most, max(1, math.ceil(block_ms / once_ms)))


class GraphPool:
    """Memory that the graphs of one measurement share; they never run at the same time, nor is their output kept."""

    def __init__(self):
        self._handle: Any = None

    @property
    def handle(self) -> Any:
        """The pool, made at first use."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle


class GraphReplay:
    """A call captured as a CUDA graph: calling this replays it, with one launch."""

    def __init__(self, call: Call, *, device: torch.device, pool: GraphPool, warmup: int = 3):
        """Run `call` on a side stream, then capture it; raise UnsupportedError without CUDA."""
        if device.type != "cuda":
            raise UnsupportedError("CUDA graphs need a CUDA device")
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(warmup):
                call()
        torch.cuda.current_stream(device).wait_stream(stream)
        wait_for(device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool.handle, stream=stream):
            call()

    def __call__(self) -> None:
        """Replay."""
        self._graph.replay()


class Budget:
    """The seconds a benchmark may take, counted from its start; None is no limit."""

    def __init__(self, seconds: float | None = None):
        self._limit = seconds
        self._began = time.perf_counter()

    @property
    def spent(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._began

    @property
    def left(self) -> float:
        """Seconds left; infinite without a limit."""
        return float("inf") if self._limit is None else self._limit - self.spent

    def fits(self, seconds: float) -> bool:
        """Whether something that takes `seconds` would end in time."""
        return self.left > seconds
