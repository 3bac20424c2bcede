"""A polite stop: the first SIGINT or SIGTERM asks, the second one ends the process."""

import signal
import threading
from types import FrameType
from typing import Any


class StopRequest:
    """Context in which SIGINT and SIGTERM set `requested`; a second one raises KeyboardInterrupt at once.

    Outside the main thread handlers cannot be set, and nothing is caught.
    """

    def __init__(self):
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
