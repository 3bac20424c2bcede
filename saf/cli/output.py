"""Output of commands: tables for people or JSON alone for machines, and progress on standard error."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from saf.records.files import to_json
from saf.records.table import Part
from saf.records.text import plain
from saf.train.logs import duration

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
    """Print a line of progress at once; standard output is for results."""
    print(text, file=sys.stderr, flush=True)


def countdowns(what: str, say: Callable[[str], None]) -> Callable[[str, int, int], None]:
    """Return a reporter of the progress of several measurements, one after the other.

    It is called with a measurement's name, how many of its items are done, and how many there are; first with none.
    """
    began: dict[str, float] = {}
    last: dict[str, float] = {}

    def report(name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if not done:
            began[name] = now
        elif done == total or now - last.get(name, 0.0) >= EVERY / 2:
            last[name], each = now, (now - began[name]) / done
            say(f"{done} of {total} {what} of {name}, {each:.2f} s each, {duration(each * (total - done))} left")

    return report


class LayerProgress(AbstractContextManager):
    """Show measured layers and time left on standard error; call it as `calibrate`'s `progress`."""

    def __init__(self):
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (TextColumn("calibrating"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f} layers"))
        self._bar = Progress(
            *columns, TextColumn("{task.fields[text]}"), console=self._console, disable=not self._console.is_terminal
        )
        self._task: TaskID | None = None
        self._resumed = 0
        self._began = self._last = time.monotonic()

    def __exit__(self, *reason: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Show a line of its own."""
        self._console.print(plain(text), markup=False)

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` layers are there; the first call gives those of an earlier, stopped run."""
        now = time.monotonic()
        if self._task is None:
            self._resumed, self._began = done, now
            self._task = self._bar.add_task("layers", total=total, text="")
            self._bar.start()
        measured = done - self._resumed
        left = f"{duration((now - self._began) / measured * (total - done))} left" if measured else ""
        self._bar.update(self._task, completed=done, text=left)
        if self._bar.disable and (done == total or now - self._last >= EVERY or (done and not measured)):
            self._last = now
            self.say(", ".join(filter(None, [f"calibrated {done}/{total} layers", left or "found"])))
        if done == total:
            self._bar.stop()
