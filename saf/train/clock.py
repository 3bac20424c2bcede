"""The time a run has spent, for schedules and allowances in seconds."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds since the run began, over all its processes; writing checkpoints does not count."""

    def __init__(self, elapsed: float = 0.0):
        """Start now, `elapsed` seconds in."""
        self._origin = time.perf_counter() - elapsed

    @property
    def elapsed(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._origin

    def advance(self, seconds: float) -> None:
        """Add what an earlier process of the same run had spent."""
        self._origin -= seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._origin += time.perf_counter() - began
