"""`Run` is the state of a training run: its progress through the budget, its next update, and the files it writes."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from saf.checkpoint import capture_random_state, latest, prune_checkpoints_, save_checkpoint, step_name
from saf.distributed import on_rank0
from saf.errors import CheckpointError
from saf.heads import HeadSet
from saf.machine import Execution, untimed_updates
from saf.models import GPT
from saf.records.events import EventRecord, append_event, read_events
from saf.records.files import append_line, no_room
from saf.schedules import Event, Proposer
from saf.tasks import Task
from saf.train.config import TrainConfig
from saf.train.events import GRADIENT
from saf.train.logs import Elapsed, Observer
from saf.train.step import Updater, learning_rate

CHECKPOINT_LOG = "clock.jsonl"
"""A line for each checkpoint of a run, also of those removed since: its hash and the elapsed seconds."""


@dataclass(kw_only=True)
class Run:
    """One training run; of several ranks only rank 0 writes."""

    config: TrainConfig
    folder: Path
    execution: Execution
    task: Task
    model: GPT
    updater: Updater
    proposer: Proposer | None
    """Decides when events come; None for a run that changes no heads."""
    elapsed: Elapsed
    start: int
    """Update of the checkpoint that the run began at; 0 for a new one."""
    parent_hash: str | None
    observer: Observer | None = None
    """Writes logs and shows progress; None on a rank that writes nothing."""
    heads_changed: int | None = None
    """Update after which the newest event of its own came; None before any."""
    peak_memory: int | None = None
    """Largest bytes allocated on CUDA in the updates that count; None elsewhere."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    """Seconds of the newest updates since heads changed. A time budget expects the next one to take as long as the
    longest of them: every second update would exceed an average."""
    guard_sequences: None = None
    """Events are recorded with their cost, and never refused for it."""

    @property
    def update(self) -> int:
        """How many updates are done."""
        return self.updater.done

    @property
    def tokens(self) -> int:
        """How many target tokens were trained on."""
        return self.update * self.task.targets_per_update

    @property
    def changed(self) -> bool:
        """Whether events came since the last update."""
        return self.heads_changed == self.update

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.folder / "checkpoints"

    @property
    def events(self) -> list[EventRecord]:
        """The events recorded so far, inherited ones first."""
        return read_events(self.folder)

    @property
    def timed_from(self) -> int:
        """The first update whose time and memory count: past the newest event, compilation and cold caches.

        An ordinary arm leaves out as many, so that both are timed over the same updates.
        """
        begin = max(self.start, self.heads_changed or 0, self.config.freeze_update or 0)
        begin = begin if begin < self.config.updates else self.start
        return begin + 1 + untimed_updates(self.config.updates - begin)

    # --- updates

    def budget_share(self) -> float | None:
        """Return the share of the run's own budget that is used once the next update is done; None without one."""
        if (updates := self.config.update_budget) is not None:
            return (self.update - self.start + 1) / updates
        if (seconds := self.config.time_budget_seconds) is None:
            return None
        expected = self.elapsed.total + max(self.recent, default=0.0)
        return self.updater.parallel.first(expected / seconds)  # all ranks must stop at the same update

    def finished(self) -> bool:
        """Return whether the updates are done, or the next one would exceed the budget."""
        share = self.budget_share()
        return self.update >= self.config.updates if share is None else share > 1

    def next_learning_rate(self) -> float:
        """Return the learning rate of the next update; a budget stretches the rest of the schedule over itself.

        After an event it rises again from zero, over `rewarm_updates`.
        """
        config = self.config

        def progress_of(update: int) -> float:
            return (update - config.lr_start) / (config.updates - config.lr_start)

        if (share := self.budget_share()) is None:
            progress = progress_of(self.update + 1)
        else:
            begin = max(progress_of(self.start), 0.0)
            progress = begin + (1 - begin) * min(share, 1.0)
        rate = learning_rate(progress, peak=config.peak_lr, min_ratio=config.min_lr_ratio, warmup=config.warmup_share)
        if self.heads_changed is None or config.rewarm_updates == 0:
            return rate
        return rate * min((self.update - self.heads_changed + 1) / config.rewarm_updates, 1.0)

    def run_update(self) -> dict[str, Any]:
        """Do one update and return its line for metrics.jsonl; raise DivergenceError as `Updater.update` does."""
        cuda = self.execution.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        rate, compiling = self.next_learning_rate(), self.updater.compiling
        if compiling:
            self.say("compiling the model for the next update, which may take a minute or more ...")
        with self.elapsed("compile" if compiling else "train"):
            done = self.updater.update(rate)
        if not compiling:
            self.recent.append(done.seconds)
        if cuda and self.update >= self.timed_from:
            self.peak_memory = max(self.peak_memory or 0, torch.cuda.max_memory_allocated())
        record = {"update": self.update, "tokens": self.tokens, "loss": done.loss, "lr": rate}
        record |= {"grad_norm": done.grad_norm, "update_seconds": done.seconds}
        if self.observer:
            self.observer.updated(record, update_seconds=median(self.recent) if self.recent else None)
        return record

    # --- logs and checkpoints

    def say(self, text: str) -> None:
        """Show a line about this moment of the run."""
        if self.observer:
            self.observer.progress.say(f"update {self.update}: {text}")

    def controller_loss(self, when: str, *, batches: int | None = None) -> float:
        """Return the task's controller loss, nats per target, of so many batches if given, and log it as `when`."""
        with self.elapsed("evaluate"), self.updater.parallel.whole():
            loss = self.task.controller_loss(self.model, self.execution, batches=batches)
            if self.observer:
                self.observer.evaluated(self.update, loss, when)
        return loss

    def record_event(self, event: Event, heads: HeadSet, values: dict[str, Any], tensors: dict[str, Any]) -> int:
        """Add a line to events.jsonl for an event that took place, and return its number."""
        # Memory and times from before the heads changed say nothing about the updates to come.
        self.heads_changed, self.peak_memory = self.update, None
        self.recent.clear()
        line = {"update": self.update, "reason": event.reason, "heads": heads.to_list(), **values}
        return on_rank0(lambda: append_event(self.folder, event.kind, line, tensors).number)

    def save(self) -> None:
        """Save a checkpoint, unless it is there already, and remove the oldest ones; every rank calls this."""
        path = self.checkpoints / step_name(self.update, after_freezing=self.changed)
        # Rank 0 looks for all: on a disk that machines share, others may see later what it has written.
        if on_rank0(path.exists):
            return
        with self.elapsed("checkpoint"):
            state = {
                "update": self.update,
                "tokens": self.tokens,
                "elapsed": self.elapsed.state_dict(),
                "recent": list(self.recent),
                "model": self.model.config.to_dict(),
                "settings": self.config.to_dict(),
                "schedule": self.proposer.state_dict() if self.proposer else None,
                GRADIENT: self.updater.gradient.state_dict() if self.updater.gradient else None,
                "random": capture_random_state(),
                **self.task.state(self.update),
            }
            if self.observer:
                self.observer.sync()  # a checkpoint counts on the logs before it
            engine = self.updater.engine
            saved = save_checkpoint(path, engine.module, engine.optimizer, state=state, parent=self.parent_hash)
            on_rank0(lambda: self._log_checkpoint(path, saved))

    def _log_checkpoint(self, path: Path, saved: str) -> None:
        protect = {step_name(update) for update in self.config.branch_updates}
        prune_checkpoints_(self.checkpoints, keep=self.config.keep, protect=protect)
        line = {"checkpoint": path.name, "hash": saved, "elapsed": self.elapsed.state_dict()}
        append_line(self.folder / CHECKPOINT_LOG, line)

    # --- failures

    def last_good(self) -> str:
        """Return a sentence that says from which checkpoint to go on after an error."""
        good = latest(self.checkpoints) or self.config.parent
        if good is None:
            return "There is no checkpoint yet: start again"
        return f"The last good checkpoint is {good}: continue from it"

    @contextmanager
    def full_disk_explained(self, files: str) -> Iterator[None]:
        """Raise CheckpointError, which says how to go on, in place of an error about a full disk."""
        try:
            yield
        except OSError as error:
            if (reason := no_room(error)) is None:
                raise
            raise CheckpointError(
                f"{reason}: the run's {files} could not be written to {self.folder}. {self.last_good()}; "
                "nothing up to there is lost: make room, then resume"
            ) from error

    def close(self) -> None:
        """Close the logs."""
        if self.observer:
            self.observer.close()
