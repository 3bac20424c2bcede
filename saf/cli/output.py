"""How commands show results and progress: tables for people, or JSON alone for machines; progress on stderr."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from saf.records.files import to_json
from saf.records.provenance import clock_words
from saf.records.table import Part
from saf.records.text import plain
from saf.train.observer import duration

EVERY = 10.0
"""Seconds between plain lines."""


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
    """Print a line of progress at once, leaving standard output to results."""
    print(text, file=sys.stderr, flush=True)


def machine(provenance: Mapping[str, Any]) -> str:
    """Return the line of a benchmark's record that says where it was made."""
    versions = provenance["versions"]
    named = [f"{name} {versions[name]}" for name in ("torch", "triton", "cuda", "cudnn") if versions.get(name)]
    driver = [f"driver {provenance['driver']}"] if provenance["driver"] else []
    clocks = clock_words(provenance)
    return ", ".join([provenance["device"], *named, *driver, *([clocks] if clocks else [])])


def countdowns(what: str, say: Callable[[str], None]) -> Callable[[str, int, int], None]:
    """Return what tells how far several measurements are, one after the other.

    It is called with the name of one, how many things of it are done, and how many there are; first with none.
    """
    began: dict[str, float] = {}
    told: dict[str, float] = {}

    def tell(name: str, done: int, total: int) -> None:
        """Begin to count, or tell how far one is."""
        now = time.monotonic()
        if not done:
            began[name] = now
        elif done == total or now - told.get(name, 0.0) >= EVERY / 2:
            told[name], each = now, (now - began[name]) / done
            say(f"{done} of {total} {what} of {name}, {each:.2f} s each, {duration(each * (total - done))} left")

    return tell


class LayerProgress(AbstractContextManager):
    """Show layers measured and time left on standard error; call it as `calibrate`'s `progress`."""

    def __init__(self):
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (TextColumn("calibrating"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f} layers"))
        self._bar = Progress(
            *columns, TextColumn("{task.fields[text]}"), console=self._console, disable=not self._console.is_terminal
        )
        self._task: TaskID | None = None
        self._found = 0
        self._began = self._told = time.monotonic()

    def __exit__(self, *reason: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Show a line of its own."""
        self._console.print(plain(text), markup=False)

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` layers are there; the first call tells how many were before anything ran."""
        now = time.monotonic()
        if self._task is None:
            self._found, self._began = done, now
            self._task = self._bar.add_task("layers", total=total, text="")
            self._bar.start()
        measured = done - self._found
        left = f"{duration((now - self._began) / measured * (total - done))} left" if measured else ""
        self._bar.update(self._task, completed=done, text=left)
        if self._bar.disable and (done == total or now - self._told >= EVERY or (done and not measured)):
            self._told = now
            self.say(", ".join(filter(None, [f"calibrated {done}/{total} layers", left or "found"])))
        if done == total:
            self._bar.stop()
