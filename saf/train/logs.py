"""The logs of a run: elapsed seconds by part, JSON lines, TensorBoard, and progress on the terminal."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from saf.records.files import append_line, flush
from saf.records.table import plain

PARTS = {
    "load": "opening data, building or restoring the model, reading logs",
    "train": "updates, and the time between them",
    "compile": "updates that compile",
    "freeze": "events: calibration, scores, selection, fits, installation, and recording them",
    "evaluate": "losses on the controller's windows, those around events and after the last update included",
    "checkpoint": "writing checkpoints, but for the last one",
}
"""The parts of a run's elapsed time. Reports and the last checkpoint are in none."""


class Elapsed:
    """Seconds of a run by part, over all processes that resumed it; a branch has its parent's beside them.

    >>> elapsed = Elapsed()
    >>> with elapsed("evaluate"):
    ...     pass
    >>> elapsed.parts["evaluate"] < elapsed.total
    True
    """

    def __init__(self):
        self._part: str | None = "load"
        self._since = time.perf_counter()
        self._own = dict.fromkeys(PARTS, 0.0)
        self.parent: dict[str, float] | None = None

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part of this run until now, its parent's left out."""
        self.enter(self._part)
        return dict(self._own)

    @property
    def total(self) -> float:
        """The seconds of this run until now, its parent's left out."""
        return sum(self.parts.values())

    def enter(self, part: str | None) -> None:
        """Count the seconds from now on under `part`; under None they do not count."""
        now = time.perf_counter()
        if self._part is not None:
            self._own[self._part] += now - self._since
        self._part, self._since = part, now

    @contextmanager
    def __call__(self, part: str | None) -> Iterator[None]:
        """Count a block under `part`, but not where nothing counts any more; then go on with the part before."""
        outer = self._part
        self.enter(outer and part)
        try:
            yield
        finally:
            self.enter(outer)

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds of this run and of its parent, as JSON values."""
        return {"parts": self.parts, "parent": self.parent}

    def resume_(self, state: Mapping[str, Any]) -> None:
        """Add the seconds that earlier processes of this run had counted at a checkpoint."""
        self._own = _sum(self._own, state["parts"])
        self.parent = state["parent"]

    def branch_(self, state: Mapping[str, Any]) -> None:
        """Take the seconds of another run until its checkpoint, its own parent's included, as the parent's."""
        self.parent = _sum(state["parts"], state["parent"] or {})

    def record(self) -> dict[str, Any]:
        """Return the entries of result.json: both totals, the parent's part included, and the parts."""
        both = _sum(self.parts, self.parent or {})
        everything = sum(both.values())
        totals = {"everything": everything, "warm": everything - both["load"] - both["compile"]}
        clocks = {name: {"seconds": seconds} for name, seconds in totals.items()}
        return {**clocks, "parts": self.parts, "parent_parts": self.parent}


def with_freeze(state: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return the elapsed seconds of a checkpoint, in `Elapsed.state_dict`'s form, with those of an event upon it."""
    return {**state, "parts": _sum(state["parts"], {"freeze": seconds})}


def _sum(*records: Mapping[str, float]) -> dict[str, float]:
    return {part: sum(each.get(part, 0.0) for each in records) for part in PARTS}


class Progress:
    """Show updates done, loss, speed and time left on standard error: a bar on a terminal, else a line now and then."""

    def __init__(self, *, done: int, total: int, seconds: float | None = None, every: int = 10, quiet: bool = False):
        """Take the updates done and planned, or the seconds left, and the updates between plain lines."""
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self.total, self.every, self.quiet = total, every, quiet
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
        self._ends = None if seconds is None else time.monotonic() + seconds
        self._bar: Bar | None = None
        if self._console.is_terminal and not quiet:
            counts = TextColumn("{task.completed:.0f}/{task.total:.0f}")
            self._bar = Bar(counts, BarColumn(), TextColumn("{task.fields[text]}"), console=self._console)
            self._task = self._bar.add_task("training", total=total, completed=done, text="")
            self._bar.start()

    def advance(self, record: dict[str, Any], *, speed: float, utilisation: float | None, left: float | None) -> None:
        """Show one update, with the seconds left if they are known."""
        if self.quiet:
            return
        update = record["update"]
        parts = [f"loss {record['loss']:.4f}", f"lr {record['lr']:.2e}", f"{speed:,.0f} tokens/s"]
        if utilisation is not None:
            parts.append(f"MFU {utilisation:.1%}")
        if self._ends is not None:
            left = self._ends - time.monotonic()
        if left is not None:
            parts.append(f"{duration(left)} left")
        if self._bar:
            self._bar.update(self._task, completed=update, text="  ".join(parts))
        elif update % self.every == 0 or update == self.total:
            self._console.print(f"update {update}/{self.total}  " + "  ".join(parts))

    def say(self, text: str) -> None:
        """Show a line of its own."""
        if not self.quiet:
            self._console.print(plain(text))

    def close(self) -> None:
        """End the bar."""
        if self._bar:
            self._bar.stop()


def duration(seconds: float) -> str:
    """Return seconds in the units that people use.

    >>> duration(59.6), duration(125), duration(7260)
    ('60s', '2m 05s', '2h 01m')
    """
    whole = max(0, round(seconds))
    if whole <= 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


class Observer:
    """Write metrics.jsonl, evaluations.jsonl, TensorBoard events and progress of one run."""

    def __init__(
        self,
        folder: Path,
        progress: Progress,
        *,
        first_update: int,
        tokens_per_update: int,
        peak_share: float | None,
        tensorboard: bool,
    ):
        """Go on with the logs in `folder`; `peak_share` is the share of the devices' peak of one update a second."""
        self.progress = progress
        self._metrics, self._evaluations = folder / "metrics.jsonl", folder / "evaluations.jsonl"
        self._tokens, self._peak_share, self._board = tokens_per_update, peak_share, None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_update)

    def updated(self, record: dict[str, Any], *, update_seconds: float | None) -> None:
        """Record one update, a line of metrics.jsonl; `update_seconds` are those expected of later ones, if known."""
        append_line(self._metrics, record, wait=False)
        update, seconds = record["update"], record["update_seconds"]
        speed, utilisation = self._tokens / seconds, self._peak_share and self._peak_share / seconds
        if self._board:
            for name in ("loss", "lr", "grad_norm"):
                self._board.add_scalar(f"train/{name}", record[name], update)
            self._board.add_scalar("speed/tokens_per_second", speed, update)
            if utilisation is not None:
                self._board.add_scalar("speed/model_flop_utilisation", utilisation, update)
        left = None if update_seconds is None else update_seconds * (self.progress.total - update)
        self.progress.advance(record, speed=speed, utilisation=utilisation, left=left)

    def evaluated(self, update: int, loss: float, when: str) -> None:
        """Record one loss on the controller partition."""
        line = {"update": update, "partition": "controller", "loss": loss, "when": when}
        append_line(self._evaluations, line, wait=False)
        if self._board and when == "periodic":
            self._board.add_scalar("controller/loss", loss, update)
        self.progress.say(f"update {update}: controller loss {loss:.4f} ({when.replace('_', ' ')})")

    def sync(self) -> None:
        """Wait until the logs are on the disk."""
        for path in filter(Path.exists, (self._metrics, self._evaluations)):
            flush(path)

    def close(self) -> None:
        """Close the board and end the bar."""
        if self._board:
            self._board.close()
        self.progress.close()
