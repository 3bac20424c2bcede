"""How far preparing data is, on a terminal: a line for each stage, with what it does in a second."""

import sys
import time
from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

# Seconds between two states of the display: people see no more of them.
_BETWEEN_LINES = 0.1


class ReadingProgress(AbstractContextManager):
    """Show progress over text whose amount is known by bytes on disk or by a limit, or not at all."""

    def __init__(self, show: bool | None):
        """Show a bar if `show`; None means only when stderr is a terminal."""
        self._shown = sys.stderr.isatty() if show is None else show
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not self._shown,
        )

    def __enter__(self) -> "ReadingProgress":
        self._bar.start()
        return self

    def __exit__(self, *reason):
        self._bar.stop()

    def stage(self, name: str, total: float | None = None) -> "Stage":
        """Begin a named stage; `total` is 1.0 when the share done will be known."""
        for task in self._bar.tasks:
            self._bar.update(task.id, total=1.0, completed=1.0, rate="")
        return Stage(self._bar, self._bar.add_task(name, total=total, rate=""))


class Stage:
    """Show one line of the progress display."""

    def __init__(self, bar: Progress, task):
        self._bar, self._task = bar, task
        self._start = self._last = time.monotonic()

    def update(self, *, share: float | None, text_bytes: int, tokens: int):
        """Show how far a stage is: share in [0, 1] if known, bytes of text and tokens so far."""
        now = time.monotonic()
        if now - self._last < _BETWEEN_LINES:
            return
        self._last, seconds = now, now - self._start
        rate = f"{text_bytes / seconds / 1e6:.1f} MB/s, {tokens / seconds / 1e6:.2f} M tokens/s"
        completed = min(share, 1.0) if share is not None else 0.0
        self._bar.update(self._task, completed=completed, rate=rate)
