"""A polite stop: the first SIGINT, SIGTERM or SIGHUP asks, the second one ends the process."""

import os
import signal
import threading
from types import FrameType
from typing import Any

_HANGUP: int | None = getattr(signal, "SIGHUP", None)
"""Sent when the terminal of a run is closed; unknown to some platforms."""


class StopRequest:
    """Context in which SIGINT, SIGTERM and SIGHUP set `requested`; a second one raises KeyboardInterrupt at once.

    Outside the main thread handlers cannot be set, and nothing is caught. A SIGHUP that the process was started to
    ignore (`nohup`) stays ignored.
    """

    def __init__(self):
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in _asking():
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == _HANGUP:
            _silence_lost_terminal_()
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()


def _asking() -> list[int]:
    hangup = [] if _HANGUP is None or signal.getsignal(_HANGUP) is signal.SIG_IGN else [_HANGUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def _silence_lost_terminal_() -> None:
    """Send standard output and error nowhere where their terminal is gone: telling of the stop must not prevent it."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
