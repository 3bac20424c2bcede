"""Output of commands: tables for people or JSON alone for machines, and progress on standard error."""

import json
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

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
    """Show on standard error how far work is and the time left: bars on a terminal, else a line now and then.

    Call it with the verb and the items of a part of the work ("calibrating", "layers"), how many of them are done, and
    how many there are.
    """

    def __init__(self, *, quiet: bool = False, after: Mapping[str, str] | None = None):
        """Show nothing where it is `quiet`; `after` is the line that follows when all items of a verb are done."""
        console = Console(stderr=True)
        self._plain = not (quiet or console.is_terminal)
        self._after = {} if quiet else after or {}
        counts = TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[items]}")
        columns = (TextColumn("{task.description}"), BarColumn(), counts, TimeRemainingColumn())
        self._bars = Progress(*columns, console=console, disable=quiet or self._plain, speed_estimate_period=600)
        self._tasks: dict[str, TaskID] = {}
        self._last = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, verb: str, items: str, done: int, total: int) -> None:
        if verb not in self._tasks:
            self._tasks[verb] = self._bars.add_task(verb, total=total, items=items)
            self._bars.start()
        task, now = self._bars.tasks[self._tasks[verb]], time.monotonic()
        self._bars.update(task.id, completed=done)
        if self._plain and done and (done == total or now - self._last >= EVERY):
            self._last, left = now, task.time_remaining
            say(f"{verb} {done}/{total} {items}" + (f", {seconds(left)} left" if left else ""))
        if done == total and verb in self._after:
            say(self._after[verb])
