"""What a run tells while it goes on: JSON lines, TensorBoard and progress."""

from pathlib import Path
from typing import Any

from saf.records.files import LineLog
from saf.train.progress import Progress


class Observer:
    """Writes metrics.jsonl, evaluations.jsonl, TensorBoard events and progress of one run."""

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

    def close(self) -> None:
        """Flush and close everything."""
        self._metrics.close()
        self._evaluations.close()
        if self._board:
            self._board.close()
        self.progress.close()
