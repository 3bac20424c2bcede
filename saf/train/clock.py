"""Where a run's seconds go: each is booked under one part, so that the parts add up to the wall time.

Two clocks add parts up. *Everything* is the paper's full path; *warm* leaves out loading and compilation. What comes
after the last update or event is in neither: whatever is measured or saved there, nothing waits for it. Nor are seconds
of updates that a kill lost and that were trained again. A run that starts from a checkpoint of another one counts that
run's seconds up to there as well.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import fsum
from pathlib import Path
from typing import Any

from saf.records.files import append_line, read_lines
from saf.train.checkpoint import Checkpoint

PARTS = {
    "loading": "opening data, building or restoring the model, reading logs",
    "compilation": "what updates that compile take longer than the next one, which does not",
    "training": "updates, and what lies between them and belongs to no other part",
    "intervention": "events: calibration, scores, selection, fits, installation, and recording them",
    "monitoring": "losses on the controller's windows, those around events included, but for the last update's",
    "checkpoints": "writing them, but for those after the last update",
}
"""What the seconds on the clock go into, each with what it includes."""
AFTERWARDS = "afterwards"
"""All that comes after the last update or event, and reports in between: booked, but on no clock."""
LOST = "lost"
"""Updates that came after the checkpoint that a killed run went on from: told, but on no clock."""
OFF_CLOCK = frozenset({AFTERWARDS, LOST})
"""The parts that no clock adds up."""
CLOCKS = {
    "everything": PARTS,
    "warm": tuple(part for part in PARTS if part not in ("loading", "compilation")),
}
"""The parts that each clock adds up."""
LOG = "clock.jsonl"
"""A line for each checkpoint of a run: its hash, and the seconds until it was on the disk. A line for each kill: the
seconds that it lost, and of which updates they were."""


class Clock:
    """Book every second under the part that is going on, over all processes of a run.

    >>> clock = Clock()
    >>> with clock("monitoring"):
    ...     pass
    >>> list(clock.parts)
    ['loading', 'monitoring']
    """

    def __init__(self):
        """Start now, with loading."""
        self._part, self._since = "loading", time.perf_counter()
        self._booked: dict[str, float] = {}
        self._earlier: dict[str, float] = {}
        self._parent: dict[str, float] | None = None
        self._undecided: list[float] = []
        self._counted: dict[str, float] = {}
        self.ended = False
        """Whether no update follows any more."""

    @property
    def parts(self) -> dict[str, float]:
        """Return the seconds of each part of this run until now, its parent's left out."""
        self.enter(self._part)
        return _sum(self._earlier, self._booked)

    @property
    def everything(self) -> float:
        """Return the seconds of this run until now on the clock of everything, its parent's left out."""
        return _read(self.parts, "everything")

    def enter(self, part: str) -> None:
        """Book what comes from now on under `part`."""
        now = time.perf_counter()
        self._book(self._part, now - self._since)
        self._part, self._since = part, now

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Book a block under `part`, then go on with the part before."""
        outer = self._part
        self.enter(part)
        try:
            yield
        finally:
            self.enter(outer)

    def updated(self, seconds: float, *, compiled: bool) -> None:
        """Count all seconds up to an update that was made, and take from training what it spent on compiling.

        It took so many seconds. Compiling is what it took longer than the next update that does not compile, which
        decides it.
        """
        if compiled:
            self._undecided.append(seconds)
            self._move(seconds, "training", "compilation")
        elif self._undecided:
            self._move(self.undecided_training(seconds), "compilation", "training")
            self._undecided = []
        self.count()

    def undecided_training(self, seconds: float) -> float:
        """Return what compilation holds of training where updates take so many `seconds`: the next one moves it."""
        return sum(min(seconds, each) for each in self._undecided)

    def count(self) -> None:
        """Let what was booked until now count, as an update or an event has come of it."""
        self._counted = self.parts

    def end(self) -> None:
        """Book what came since the last update or event as afterwards, and all that is to come."""
        parts = self.parts
        later = sum(seconds - self._counted.get(part, 0.0) for part, seconds in parts.items())
        self._earlier, self._booked = _sum(self._counted, {AFTERWARDS: later}), {}
        self._part, self.ended = AFTERWARDS, True

    def go_on(self, before: Mapping[str, Any]) -> None:
        """Count the seconds that earlier processes of this run had booked at a checkpoint, in `state_dict`'s form."""
        self._earlier, self._parent = dict(before["parts"]), before["parent"]
        self._undecided = [*before["unsettled"]]
        # Earlier versions told no more than the parts.
        self._counted, self.ended = dict(before.get("counted", before["parts"])), before.get("ended", False)

    def start_from(self, parent: Mapping[str, Any]) -> None:
        """Count the seconds of a parent up to its checkpoint, its own parent's included, in `state_dict`'s form."""
        self._parent = _sum(parent["parts"], parent["parent"] or {})
        self._parent.pop(AFTERWARDS, None)  # what was lost is never in a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return everything that was booked, as JSON values."""
        parts = {"parts": self.parts, "parent": self._parent, "unsettled": self._undecided}
        return {**parts, "counted": self._counted, "ended": self.ended}

    def record(self, *, lost: float = 0.0) -> dict[str, Any]:
        """Return what a result tells: both clocks with the parts they include, and this run's and its parent's parts.

        Kills `lost` so many seconds of it, which are a part of their own.
        """
        own, parent = self.parts, self._parent
        both = _sum(own, parent or {})
        record: dict[str, Any] = {}
        for clock, parts in CLOCKS.items():
            seconds = _read(both, clock)
            includes = [part for part in parts if part in PARTS or part in both]
            record[clock] = {"seconds": seconds, "includes": [*includes, *([] if parent is None else ["parent"])]}
        return {**record, "parts": {**own, LOST: lost} if lost else own, "parent_parts": parent}

    def _book(self, part: str, seconds: float) -> None:
        self._booked[part] = self._booked.get(part, 0.0) + seconds

    def _move(self, seconds: float, source: str, target: str) -> None:
        self._book(source, -seconds)
        self._book(target, seconds)


def log_checkpoint(folder: Path, name: str, hash: str, clock: Clock) -> None:
    """Add a line about a checkpoint that was just written: only now is it known what writing it took."""
    append_line(folder / LOG, {"checkpoint": name, "hash": hash, **clock.state_dict()})


def log_lost_(folder: Path, lost: list[dict[str, Any]]) -> None:
    """Add a line about updates that a run is about to train again, if there are any, given their lines of metrics."""
    if not lost:
        return
    seconds, updates = fsum(line["update_seconds"] for line in lost), [lost[0]["update"], lost[-1]["update"]]
    line = {LOST: seconds, "updates": updates}
    if line not in read_lines(folder / LOG):  # a resumed run that was killed at once has told it already
        append_line(folder / LOG, line)


def lost_seconds(folder: Path) -> float:
    """Return the seconds of updates that kills of a run lost."""
    return fsum(line.get(LOST, 0.0) for line in read_lines(folder / LOG))


def seconds_until(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the seconds of a run until a checkpoint was written, in the form of `Clock.state_dict`.

    Where the run's log of them is not beside it, they are those in the checkpoint, taken before it was written.
    """
    lines = read_lines(checkpoint.path.parents[1] / LOG)
    if logged := next((line for line in lines if line.get("hash") == checkpoint.hash), None):
        return logged
    return checkpoint.state["clock"]


def with_intervention(until: Mapping[str, Any], cost: Mapping[str, float]) -> dict[str, Any]:
    """Return the seconds until a checkpoint, in `state_dict`'s form, with those of an event carried out on it."""
    parts = {name: until[name] for name in ("parent", "unsettled")}
    return {**parts, "parts": _sum(until["parts"], {"intervention": sum(cost.values())})}


def _sum(*parts: Mapping[str, float]) -> dict[str, float]:
    names = dict.fromkeys(name for each in parts for name in each)
    return {name: sum(each.get(name, 0.0) for each in parts) for name in names}


def _read(parts: Mapping[str, float], clock: str) -> float:
    return sum(parts.get(part, 0.0) for part in CLOCKS[clock])
