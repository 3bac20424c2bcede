"""Progress of a run for people: a bar on a terminal, a line now and then elsewhere."""

import time
from collections import deque
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar


class Progress:
    """Shows updates done, loss, speed and time left on standard error."""

    def __init__(self, *, done: int, total: int, budget: float | None = None, every: int = 10, quiet: bool = False):
        """Take how many updates are done and planned, or the seconds left, and the updates between plain lines."""
        self.total = total
        self.every = every
        self.quiet = quiet
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._ends = None if budget is None else time.monotonic() + budget
        self._recent: deque[float] = deque(maxlen=50)
        self._compiling = False
        self._bar: Bar | None = None
        if self._console.is_terminal and not quiet:
            columns = (
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
            )
            self._bar = bar = Bar(*columns, console=self._console)
            self._task = bar.add_task("training", total=total, completed=done, text="")
            bar.start()

    def advance(self, record: dict[str, Any], *, tokens_per_second: float, utilisation: float | None) -> None:
        """Show one update."""
        if self.quiet:
            return
        update = record["update"]
        if not self._compiling:
            self._recent.append(record["update_seconds"])
        self._compiling = False
        left = self._left(self.total - update)
        parts = [f"loss {record['loss']:.4f}", f"lr {record['lr']:.2e}", f"{tokens_per_second:,.0f} tokens/s"]
        if utilisation is not None:
            parts.append(f"MFU {utilisation:.1%}")
        if left is not None:
            parts.append(f"{duration(left)} left")
        if self._bar:
            self._bar.update(self._task, completed=update, text="  ".join(parts))
        elif update % self.every == 0 or update == self.total:
            self._console.print(f"update {update}/{self.total}  " + "  ".join(parts))

    def compiling(self, update: int) -> None:
        """Say that an update compiles first; its time foretells nothing about those after it."""
        self._compiling = True
        self.say(f"compiling the model for update {update:,}, which may take a minute or more ...")

    def say(self, text: str) -> None:
        """Show a line of its own."""
        if not self.quiet:
            self._console.print(text)

    def close(self) -> None:
        """End the bar."""
        if self._bar:
            self._bar.stop()

    def _left(self, updates: int) -> float | None:
        """Return the seconds that so many updates will take; None while no update has been timed."""
        if self._ends:
            return self._ends - time.monotonic()
        return sorted(self._recent)[len(self._recent) // 2] * updates if self._recent else None


def duration(seconds: float) -> str:
    """Return seconds as people say them.

    >>> duration(59.6), duration(125), duration(7260)
    ('60s', '2m 05s', '2h 01m')
    """
    whole = max(0, round(seconds))
    if whole <= 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
