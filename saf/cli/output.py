"""Output of commands: tables for people or JSON alone for machines, and progress on standard error."""

import json
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from saf.records.files import to_json
from saf.records.table import Part, plain, seconds

EVERY = 10.0
"""Seconds between plain lines of progress."""


def show(result: Mapping[str, Any], *parts: Part, as_json: bool) -> None:
    """Print `result` as JSON and nothing else, or the tables and lines for people."""
    if as_json:
        print(json.dumps(to_json(result), indent=2, allow_nan=False))
        return
    for part in parts:
        if isinstance(part, str):
            print("\n".join(map(plain, part.split("\n"))))
        else:
            part.print()


def say(text: str) -> None:
    """Print a line of progress."""
    print(plain(text), file=sys.stderr, flush=True)


class Countdown(AbstractContextManager):
    """Show on standard error how far something is, and the time left: a bar on a terminal, else a line now and then.

    Call it with how many items are done, and how many there are; items of an earlier run come with the first call.
    """

    def __init__(self, verb: str, items: str, *, quiet: bool = False):
        """`verb` and `items` are words of the line: "calibrating", "layers"; nothing is shown where it is `quiet`."""
        self._verb, self._items, self._last = verb, items, time.monotonic()
        console = Console(stderr=True)
        self._plain = not (quiet or console.is_terminal)
        counts = TextColumn(f"{{task.completed:.0f}}/{{task.total:.0f}} {items}")
        columns = (TextColumn(verb), BarColumn(), counts, TimeRemainingColumn())
        disable = quiet or self._plain
        self._bar = Progress(*columns, console=console, disable=disable, speed_estimate_period=600)

    def __exit__(self, *reason: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` items are done."""
        if not self._bar.tasks:
            self._bar.add_task("", total=total)
            self._bar.start()
        task, now = self._bar.tasks[0], time.monotonic()
        self._bar.update(task.id, completed=done)
        if self._plain and done and (done == total or now - self._last >= EVERY):
            self._last, left = now, task.time_remaining
            say(f"{self._verb} {done}/{total} {self._items}" + (f", {seconds(left)} left" if left else ""))
        if done == total:
            self._bar.stop()
