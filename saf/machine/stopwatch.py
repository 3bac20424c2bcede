"""Seconds of the named parts of a piece of work."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_UNTIMED = 10
"""The first updates after an event or a resumption compile and let the allocator and caches grow. A round number."""


def untimed_updates(updates: int) -> int:
    """Return how many of the first `updates` do not count when they are timed: ten, or a quarter of a short run's."""
    return min(_UNTIMED, max(0, updates) // 4)


class Stopwatch:
    """Add up wall-clock seconds by name; waits for the device, so asynchronous work is counted where it was asked.

    >>> watch = Stopwatch()
    >>> with watch("fit"):
    ...     pass
    >>> list(watch.seconds)
    ['fit']
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self.seconds: dict[str, float] = {}
        self._cuda = torch.device(device).type == "cuda"

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block."""
        self._wait()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._wait()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def _wait(self) -> None:
        """Wait for the device, so that what was asked of it is counted."""
        if self._cuda:
            torch.cuda.synchronize()
