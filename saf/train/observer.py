"""What a run tells while it goes on: JSON lines, TensorBoard, and for people a bar or a line now and then."""

import time
from collections import deque
from pathlib import Path
from typing import Any

from saf.records.files import LineLog, file_hash
from saf.records.text import plain


class Progress:
    """Show updates done, loss, speed and time left on standard error."""

    def __init__(self, *, done: int, total: int, budget: float | None = None, every: int = 10, quiet: bool = False):
        """Take how many updates are done and planned, or the seconds left, and the updates between plain lines."""
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self.total = total
        self.every = every
        self.quiet = quiet
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
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
            self._console.print(plain(text))

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


class Observer:
    """Write metrics.jsonl, evaluations.jsonl, TensorBoard events and progress of one run."""

    def __init__(
        self,
        folder: Path,
        progress: Progress,
        *,
        tensorboard: bool,
        purge_from: int,
        tokens_per_update: int,
        flops_per_update: float,
        peak_flops: float | None,
    ):
        self.progress = progress
        self._metrics = LineLog(folder / "metrics.jsonl")
        self._evaluations = LineLog(folder / "evaluations.jsonl")
        self._tokens = tokens_per_update
        self._flops = flops_per_update
        self._peak = peak_flops
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_from)

    def updated(self, record: dict[str, Any]) -> None:
        """Tell of one update, as a line of metrics.jsonl."""
        self._metrics.append(record)
        update, seconds = record["update"], record["update_seconds"]
        speed = self._tokens / seconds
        utilisation = self._flops / seconds / self._peak if self._peak else None
        if self._board:
            for name in ("loss", "lr", "grad_norm"):
                self._board.add_scalar(f"train/{name}", record[name], update)
            self._board.add_scalar("speed/tokens_per_second", speed, update)
            if utilisation is not None:
                self._board.add_scalar("speed/model_flop_utilisation", utilisation, update)
        self.progress.advance(record, tokens_per_second=speed, utilisation=utilisation)

    def evaluated(self, update: int, loss: float, when: str) -> None:
        """Tell of one loss on the controller partition."""
        self._evaluations.append({"update": update, "partition": "controller", "loss": loss, "when": when})
        if self._board and when == "periodic":
            self._board.add_scalar("controller/loss", loss, update)
        self.progress.say(f"update {update}: controller loss {loss:.4f} ({when.replace('_', ' ')})")

    def sync(self) -> None:
        """Wait until metrics and evaluations are on the disk: a checkpoint counts on what came before it."""
        self._metrics.sync()
        self._evaluations.sync()

    def records(self) -> dict[str, tuple[int, str]]:
        """Return how many lines each log has, and the SHA-256 of its file."""
        logs = (self._metrics, self._evaluations)
        return {log.path.name: (log.path.read_bytes().count(b"\n"), file_hash(log.path)) for log in logs}

    def close(self) -> None:
        """Flush and close everything."""
        self._metrics.close()
        self._evaluations.close()
        if self._board:
            self._board.close()
        self.progress.close()
