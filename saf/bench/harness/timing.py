"""Milliseconds of a call: warm-up, synchronised wall clock, device events."""

import math
import statistics
import time

import torch

from saf.errors import UnsupportedError
from saf.machine.cuda_graphs import Call
from saf.machine.processes import done_once

CALL, GRAPH = "call", "graph"
UPDATE = "update"
"""What `saf bench update` times, by its name in records: called; replayed as CUDA graphs it is "update graph"."""
SETTLE_MS = 400.0
"""Untimed calls before a timed block of a model on CUDA, milliseconds: clocks follow the load over more than 100 ms."""
REST_MS = 200.0
"""Idle time before a timed block of an operator on CUDA, ms: clocks are back at their highest after about 150."""

BEGIN_SHARE = 0.5
"""Something is begun when this share of the longest before it is left; it then ends with fewer pairs."""


def wait_for(device: torch.device) -> None:
    """Wait until the device has done everything asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_block(call: Call, *, repeats: int, device: torch.device, settle: int = 0) -> float:
    """Return the median milliseconds of `repeats` calls, the device waited for before and after each.

    `settle` calls come before them untimed: clocks follow what ran last, which was another arm.
    """
    for _ in range(settle):
        call()
    times = []
    for _ in range(repeats):
        wait_for(device)
        began = time.perf_counter()
        call()
        wait_for(device)
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def event_block(call: Call, *, repeats: int, device: torch.device, rest: float = 0.0) -> float:
    """Return the median milliseconds between device events around `repeats` calls; wall clock without CUDA.

    The device idles for `rest` milliseconds before them.
    """
    wait_for(device)
    time.sleep(1e-3 * rest)
    if device.type != "cuda":
        return wall_block(call, repeats=repeats, device=device)
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        call()
        end.record()
    wait_for(device)
    return statistics.median(start.elapsed_time(end) for start, end in events)


def resting_ms(rest_ms: float | None, device: torch.device) -> float:
    """Return for how long the device idles before a timed block of an operator's calls, milliseconds.

    A GPU at its power limit lowers its clocks some 20 ms after a demanding arm began and raises them again over more
    than 100 ms; short blocks after a rest see neither (docs/log.md).
    """
    usual = REST_MS if device.type == "cuda" else 0.0
    return usual if rest_ms is None else rest_ms


def settling_calls(settle_ms: float | None, once_ms: float, device: torch.device) -> int:
    """Return how many untimed calls of `once_ms` come before a model's timed block; none where one alone takes longer.

    Models run at the clocks that their own load leaves, and those follow it over more than 100 ms (docs/log.md).
    """
    usual = SETTLE_MS if device.type == "cuda" else 0.0
    return int((usual if settle_ms is None else settle_ms) / once_ms)


def ways_of(graphs: str, device: torch.device) -> tuple[str, ...]:
    """Return what `graphs` ("off", "on" or "both") asks to time: "call", "graph"; calls alone without CUDA.

    Raises UnsupportedError when graphs alone are asked for without CUDA.
    """
    if device.type == "cuda":
        return {"off": (CALL,), "on": (GRAPH,), "both": (CALL, GRAPH)}[graphs]
    if graphs == "on":
        raise UnsupportedError("CUDA graphs need a CUDA device; use --graphs off")
    return (CALL,)


def variant_of(what: str, way: str) -> str:
    """Return the name of what is timed in a way: its own where it is called."""
    return what if way == CALL else f"{what} {way}"


def parted(variant: str) -> tuple[str, str]:
    """Return what a variant times, and in which way."""
    return (variant.removesuffix(f" {GRAPH}"), GRAPH) if variant.endswith(f" {GRAPH}") else (variant, CALL)


def repeats_within(block_ms: float, once_ms: float, most: int) -> int:
    """Return how many repeats of `once_ms` fill a timed block of `block_ms`: at least 1, at most `most`."""
    return min(most, max(1, math.ceil(block_ms / once_ms)))


class Budget:
    """Count the seconds that a benchmark may take from its start; None is no limit."""

    def __init__(self, seconds: float | None = None):
        self._limit = seconds
        self._began = time.perf_counter()

    @property
    def spent(self) -> float:
        """Return the seconds so far."""
        return time.perf_counter() - self._began

    @property
    def left(self) -> float:
        """Return the seconds left; infinite without a limit."""
        return float("inf") if self._limit is None else self._limit - self.spent

    def fits(self, seconds: float) -> bool:
        """Return whether something that takes `seconds` would end in time: in a group, by the first process's clock."""
        return self._limit is None or done_once(lambda: self.left > seconds)

    def begins(self, longest: float) -> bool:
        """Return whether enough is left to begin something of which the longest so far took `longest` seconds."""
        return self.fits(BEGIN_SHARE * longest)
