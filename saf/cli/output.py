"""Commands print through these functions: tables for people or JSON for machines, and progress on standard error."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from saf.records.files import to_json
from saf.records.table import Part, plain, seconds

LINE_INTERVAL = 10.0
"""Seconds between lines of progress where there is no terminal to draw bars on."""


def show(result: Mapping[str, Any], *parts: Part, as_json: bool) -> None:
    """Print `result` as JSON and nothing else, or the tables and lines for people."""
    if as_json:
        print(json.dumps(to_json(result), indent=2, allow_nan=False))
        return
    for part in parts:
        if isinstance(part, str):
            # `plain` for each line: names of folders and files may have control codes, and it joins lines.
            print("\n".join(map(plain, part.split("\n"))))
        else:
            part.print()


def print_progress(text: str) -> None:
    """Print a line of progress on standard error; standard output has the result alone."""
    print(plain(text), file=sys.stderr, flush=True)


class ProgressBars(AbstractContextManager):
    """Show on standard error how far work is and the time left: bars on a terminal, else a line now and then.

    `bars("calibrating", "layers")` returns the progress of one part of the work, which has a bar of its own from its
    first call on: a function of how many items are done, and how many there are.
    """

    def __init__(self, *, quiet: bool = False, next_steps: Mapping[str, str] | None = None):
        """Show nothing if `quiet`; `next_steps` has by verb the line that is printed when all its items are done."""
        console = Console(stderr=True)
        self._prints_lines = not (quiet or console.is_terminal)
        self._next_steps = {} if quiet else next_steps or {}
        counts = TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[items]}")
        columns = (TextColumn("{task.description}"), BarColumn(), counts, TimeRemainingColumn())
        hidden = quiet or self._prints_lines
        # Items may take minutes each, and rich estimates from 30 s of history by default.
        self._bars = Progress(*columns, console=console, disable=hidden, speed_estimate_period=600)
        self._tasks: dict[str, TaskID] = {}
        self._last_line = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, verb: str, items: str) -> Callable[[int, int], None]:
        return partial(self._update, verb, items)

    def _update(self, verb: str, items: str, done: int, total: int) -> None:
        if verb not in self._tasks:
            self._tasks[verb] = self._bars.add_task(verb, total=total, items=items)
            self._bars.start()
        task, now = self._bars.tasks[self._tasks[verb]], time.monotonic()
        self._bars.update(task.id, completed=done)
        # A hidden bar still estimates the time left, for the lines.
        if self._prints_lines and done and (done == total or now - self._last_line >= LINE_INTERVAL):
            self._last_line, left = now, task.time_remaining
            print_progress(f"{verb} {done}/{total} {items}" + (f", {seconds(left)} left" if left else ""))
        if done == total and verb in self._next_steps:
            print_progress(self._next_steps[verb])
