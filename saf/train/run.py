"""What lasts while a model is trained: the run's folder and its lock, clock, logs, events and checkpoints.

Everything that a run writes goes through `Run`, and only the first process of several writes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from saf.heads import HeadSet
from saf.machine.execution import Execution
from saf.machine.processes import done_once
from saf.machine.stopwatch import untimed_updates
from saf.models import GPT
from saf.records.events import EVENTS, EventRecord, append_event, read_events
from saf.schedules import Event, Proposer
from saf.tasks import Task
from saf.train.allowance import Allowance
from saf.train.checkpoint import (
    capture_random_state,
    latest,
    prune_checkpoints_,
    save_checkpoint,
    step_name,
)
from saf.train.clock import AFTERWARDS, Clock, log_checkpoint
from saf.train.config import TrainConfig
from saf.train.observer import Observer
from saf.train.optimizer import learning_rate, progress_by_share, progress_by_update, rise_after_event
from saf.train.updater import Updater

GRADIENT = "qk_gradient"
"""Name of the Q/K-gradient average in a checkpoint's state.json."""
RECORDS = "records"
"""In a checkpoint's state.json, how many lines each log had and the SHA-256 of its file."""


@dataclass(kw_only=True)
class Run:
    """Hold one training from its start to its end, and write what is kept of it."""

    config: TrainConfig
    folder: Path
    lock: IO[str] | None
    """Held while the run goes on; None in a process that writes nothing."""
    execution: Execution
    task: Task
    model: GPT
    """What is trained; the updater's."""
    updater: Updater
    proposer: Proposer | None
    """What decides when events come; None for a run that changes no heads."""
    clock: Clock
    observer: Observer | None
    """Writes logs and shows progress; None in a process that writes nothing."""
    start: int
    """Update of the checkpoint that the run began at; 0 for a new one."""
    parent_hash: str | None
    allowance: Allowance | None = None
    """What it may use where that is not a number of updates."""
    heads_changed: int | None = None
    """Update after which the newest event of its own came; None before any."""
    peak_memory: int | None = None
    """Largest bytes allocated on CUDA in the updates that count; None elsewhere."""

    @property
    def update(self) -> int:
        """Return how many updates are done."""
        return self.updater.done

    @property
    def tokens(self) -> int:
        """Return how many target tokens were trained on."""
        return self.update * self.task.targets_per_update

    @property
    def changed(self) -> bool:
        """Return whether events came since the last update."""
        return self.heads_changed == self.update

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the run's checkpoints."""
        return self.folder / "checkpoints"

    @property
    def events(self) -> list[EventRecord]:
        """Return the events recorded so far, inherited ones first."""
        return read_events(self.folder)

    @property
    def timed_from(self) -> int:
        """Return the first update whose time and memory count: past the newest event, compilation and cold caches.

        An ordinary arm leaves out as many, so that both are timed over the same updates.
        """
        begin = max(self.start, self.heads_changed or 0, self.config.freeze_update or 0)
        begin = begin if begin < self.config.updates else self.start
        return begin + 1 + untimed_updates(self.config.updates - begin)

    def next_learning_rate(self) -> float:
        """Return the learning rate of the update to come."""
        config = self.config
        progress = progress_by_update(self.update + 1, updates=config.updates, start=config.lr_start)
        if self.allowance is not None:
            begin = progress_by_update(self.start, updates=config.updates, start=config.lr_start)
            progress = progress_by_share(self._used(), begin=max(begin, 0.0))
        rate = learning_rate(progress, peak=config.peak_lr, min_ratio=config.min_lr_ratio, warmup=config.warmup_share)
        since = None if self.heads_changed is None else self.update - self.heads_changed
        return rate * rise_after_event(since, over=config.rewarm_updates)

    def finished(self) -> bool:
        """Return whether the updates are done, or the next one would exceed the allowance.

        Whatever it is that used the allowance up since the last update, such as a loss or a checkpoint, then comes
        after the end and is on no clock. So nothing but an update and an event need be foreseen.
        """
        if self.allowance is None:
            return self.update >= self.config.updates
        return self.clock.ended or self._used() > 1

    def _used(self) -> float:
        """Return the share of the allowance that is used once the next update is done."""
        assert self.allowance is not None
        one, compiling = self.updater.expected_seconds, self.updater.compile_seconds if self.updater.compiling else 0.0
        # Part of what the last update took is still booked as compilation, which may weigh less.
        moved = self.clock.undecided_training(one)
        expected = {"training": one + moved, "compilation": compiling - moved}
        used = self.allowance.used(parts=self.clock.parts, expected=expected, updates=self.update - self.start)
        return self.updater.parallel.first(used)  # clocks differ, and all must stop at the same update

    @property
    def guard_sequences(self) -> None:
        """Return nothing: what an event of a run costs is recorded, and never refused."""

    def say(self, text: str) -> None:
        """Show people a line about this moment of the run."""
        if self.observer:
            self.observer.progress.say(f"update {self.update}: {text}")

    def controller_loss(self, when: str, *, batches: int | None = None) -> float:
        """Return the task's controller loss, nats per target, and log it as `when`; of so many batches if given."""
        with self.clock("monitoring"), self.updater.parallel.whole():
            loss = self.task.controller_loss(self.model, self.execution, batches=batches)
            if self.observer:
                self.observer.evaluated(self.update, loss, when)
        return loss

    def record_event(self, event: Event, heads: HeadSet, values: dict[str, Any], tensors: dict[str, Any]) -> int:
        """Add a line to events.jsonl for an event that was carried out, and return its number."""
        # What was allocated before the heads changed says nothing about the updates to come.
        self.heads_changed, self.peak_memory = self.update, None
        line = {"update": self.update, "reason": event.reason, "heads": heads.to_list(), **values}
        return done_once(lambda: append_event(self.folder, event.kind, line, tensors).number)

    def save(self) -> Path:
        """Save a checkpoint, unless it is there already, and remove the oldest ones that need not be kept.

        Every process of a group calls this.

        Raises:
            CheckpointError: There is no room for it.
        """
        path = self.checkpoints / step_name(self.update, after_freezing=self.changed)
        # The first process looks for all: on a disk that machines share, others may see later what it has written.
        if done_once(path.exists):
            return path
        with self.clock(AFTERWARDS if self.clock.ended else "checkpoints"):
            state = {
                "update": self.update,
                "tokens": self.tokens,
                "clock": self.clock.state_dict(),
                "expected_seconds": self.updater.expected_seconds,
                "compile_seconds": self.updater.compile_seconds,
                "model": self.model.config.to_dict(),
                "settings": self.config.to_dict(),
                "schedule": self.proposer.state_dict() if self.proposer else None,
                GRADIENT: self.updater.gradient.state_dict() if self.updater.gradient else None,
                "random": capture_random_state(),
                **self.task.state(self.update),
            }
            if self.observer:
                self.observer.sync()
                state[RECORDS] = {**self.observer.records(), EVENTS: (len(self.events), "")}
            held = self.updater.engine
            found = save_checkpoint(path, held.module, held.optimizer, state=state, parent=self.parent_hash)
            done_once(lambda: self._saved(path, found))
        return path

    def _saved(self, path: Path, found: str) -> None:
        """Remove the checkpoints that are no longer kept, and log the newest one, of this hash."""
        protect = {step_name(update) for update in self.config.branch_updates}
        prune_checkpoints_(self.checkpoints, keep=self.config.keep, protect=protect)
        log_checkpoint(self.folder, path.name, found, self.clock)

    def last_good(self) -> str:
        """Return a sentence that says from which checkpoint to go on after an error."""
        good = latest(self.checkpoints) or self.config.parent
        if good is None:
            return "There is no checkpoint yet: start again"
        return f"The last good checkpoint is {good}: continue from it"

    def close(self) -> None:
        """Close the logs."""
        if self.observer:
            self.observer.close()
