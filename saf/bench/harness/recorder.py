"""The JSON file of one benchmark, written while it goes on, and errors in few words for its notes."""

import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from saf.bench.harness.timing import Budget
from saf.errors import InputError
from saf.machine.processes import is_first
from saf.records.files import to_json, write_json
from saf.records.result import result_header
from saf.records.table import Notes, Part

SAVE_EVERY = 5.0
"""Seconds between writes while a point is being measured."""

UNFINISHED = "Not finished: what was measured before the benchmark was stopped."

Say = Callable[[str], None]


def say_on_stderr(line: str) -> None:
    """Print a line at once, leaving standard output to results."""
    print(line, file=sys.stderr, flush=True)


class Recorder:
    """Keep rows and say each finished measurement; the file is whole whenever the process may die.

    In a group the first process says and writes, the others keep theirs.

    Use it as a context: leaving it writes the file, with `finished` false after an exception.
    """

    def __init__(self, path: Path | None, *, kind: str, settings: dict[str, Any], budget: Budget, say: Say):
        """Write nothing yet; raise InputError when `path` exists already."""
        if path is not None and path.exists():
            raise InputError(f"{path} exists already; remove it, or write to another file")
        self._path = path if is_first() else None
        self._say = say if is_first() else lambda line: None
        self._saved = float("-inf")
        self.budget = budget
        self._parts: dict[str, list[dict[str, Any]]] = {"rows": [], "memory": [], "kernels": [], "left_out": []}
        self._current: list[dict[str, Any]] = []
        self._head = result_header(kind, settings)
        self._finished = False
        self._seconds: float | None = None

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.keep()
        self._finished = kind is None
        self._seconds = self.budget.spent
        self.save()

    def trace(self, **facts: Any) -> None:
        """Add to the provenance in the header of the file."""
        self._head["provenance"] |= facts

    def describe(self, **head: Any) -> None:
        """Add to the header of the file."""
        self._head |= head

    def show(self, rows: list[dict[str, Any]]) -> None:
        """Take the rows of the point being measured, in place of those shown before; write now and then."""
        self._current = rows
        if time.perf_counter() - self._saved > SAVE_EVERY:
            self.save()

    def keep(self) -> None:
        """Keep the rows shown last and write."""
        self._parts["rows"] += self._current
        self._current = []
        self.save()

    def add(self, part: str, /, **entry: Any) -> None:
        """Add an entry to `memory` or `kernels` and write."""
        self._parts[part].append(entry)
        self.save()

    def leave_out(self, what: str, why: str) -> None:
        """Record and say what is not measured."""
        why = why.strip().split("\n")[0][:300] or "no reason given"
        self._parts["left_out"].append({"what": what, "why": why})
        self.say(f"left out: {what}: {why}")
        self.save()

    def say(self, line: str) -> None:
        """Print a line with the seconds spent."""
        self._say(f"[{self.budget.spent:6.1f} s] {line}")

    @property
    def record(self) -> dict[str, Any]:
        """Return the file's content."""
        parts = {**self._parts, "rows": self._parts["rows"] + self._current}
        seconds = self.budget.spent if self._seconds is None else self._seconds
        return to_json({**self._head, "finished": self._finished, "seconds": round(seconds, 1), **parts})

    def save(self) -> None:
        """Write the file as it stands."""
        if self._path is not None:
            write_json(self._path, self.record)
        self._saved = time.perf_counter()


MOST = 200
"""Characters of a reason: two lines of a terminal."""
_END = re.compile(r"[.!?](?=\s|$)|(?<!:)\n")
"""Of a sentence: a stop, or a line's end unless a colon announces what follows."""


def in_short(error: BaseException) -> str:
    """Return an exception's type and its first sentence, at most `MOST` characters of it."""
    return f"{type(error).__name__}: {first_sentence(str(error)) or 'no reason given'}"


def first_sentence(text: str) -> str:
    """Return the first sentence of a text on one line, without its stop."""
    sentence = " ".join(_END.split(text.strip(), maxsplit=1)[0].split())
    return sentence if len(sentence) <= MOST else f"{sentence[: MOST - 1]}…"


def left_out(record: Mapping[str, Any]) -> list[str]:
    """Return one line for each reason why something was not measured."""
    reasons: dict[str, list[str]] = {}
    for entry in record.get("left_out") or []:
        reasons.setdefault(entry["why"].rstrip("."), []).append(entry["what"])
    return [f"Left out: {'; '.join(what)}: {why}." for why, what in reasons.items()]


def lacking(record: Mapping[str, Any]) -> list[str]:
    """Return a line for each thing that a record lacks: an end before its time, what was left out."""
    return [*([UNFINISHED] if record.get("finished") is False else []), *left_out(record)]


def unmeasured(record: Mapping[str, Any]) -> list[Part]:
    """Return notes on what a record lacks; or nothing."""
    lines = lacking(record)
    return [Notes(lines)] if lines else []
