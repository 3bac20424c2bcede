"""Output of commands: tables for people or JSON alone for machines, and progress on standard error."""

import json
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from saf.records.files import to_json
from saf.records.table import Part, duration, plain

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


class Countdown(AbstractContextManager):
    """Show on standard error how far something is, and the time left: a bar on a terminal, else a line now and then.

    Call it with how many items are done, and how many there are; items of an earlier run come with the first call.
    """

    def __init__(self, verb: str, items: str, *, quiet: bool = False):
        """`verb` and `items` are words of the line: "calibrating", "layers"; nothing is shown where it is `quiet`."""
        self._verb, self._items, self._quiet = verb, items, quiet
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        counts = TextColumn(f"{{task.completed:.0f}}/{{task.total:.0f}} {items}")
        columns = (TextColumn(verb), BarColumn(), counts, TextColumn("{task.fields[left]}"))
        self._bar = Progress(*columns, console=self._console, disable=quiet or not self._console.is_terminal)
        self._task: TaskID | None = None
        self._first, self._last = 0, time.monotonic()
        self._began = self._last

    def __exit__(self, *reason: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Show a line of its own."""
        self._console.print(plain(text), markup=False)

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` items are done."""
        now = time.monotonic()
        if self._task is None:
            self._first, self._began = done, now
            self._task = self._bar.add_task("", total=total, left="")
            self._bar.start()
        measured = done - self._first
        left = f"{duration((now - self._began) / measured * (total - done))} left" if measured else ""
        self._bar.update(self._task, completed=done, left=left)
        if self._bar.disable and not self._quiet and done and (done == total or now - self._last >= EVERY):
            self._last = now
            self.say(", ".join(filter(None, [f"{self._verb} {done}/{total} {self._items}", left])))
        if done == total:
            self._bar.stop()
