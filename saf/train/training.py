"""Everything one run holds while it trains."""

from dataclasses import dataclass
from pathlib import Path
from typing import IO

from saf.data import TokenData
from saf.machine.execution import Execution
from saf.models import GPT
from saf.schedules import Proposer
from saf.train.clock import Clock
from saf.train.config import TrainConfig
from saf.train.learning_rate import learning_rate, progress_by_time, progress_by_update
from saf.train.observer import Observer
from saf.train.updater import Updater


@dataclass(kw_only=True)
class Training:
    """The state of a run: `update` counts the updates done."""

    config: TrainConfig
    folder: Path
    lock: IO[str]
    """Held while the run goes on."""
    execution: Execution
    data: TokenData
    length: int
    updater: Updater
    schedule: Proposer | None
    clock: Clock
    observer: Observer
    start: int
    """Update of the checkpoint that the run began at; 0 for a new one."""
    parent_hash: str | None
    peak_memory: int | None = None

    @property
    def model(self) -> GPT:
        """The model that is trained."""
        return self.updater.model

    @property
    def update(self) -> int:
        """How many updates are done."""
        return self.updater.done

    @property
    def windows_per_update(self) -> int:
        """Windows consumed by one update."""
        return self.config.batch_size * self.config.accumulation

    @property
    def tokens_per_update(self) -> int:
        """Target tokens of one update."""
        return self.windows_per_update * self.length

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.folder / "checkpoints"

    @property
    def timed_from(self) -> int:
        """The first update whose time and memory count: past the freezing point, compilation and warm caches."""
        begin = max(self.start, self.config.freeze_update or 0)
        begin = begin if begin < self.config.updates else self.start
        return begin + 1 + min(10, (self.config.updates - begin) // 4)

    def next_learning_rate(self) -> float:
        """Return the learning rate of the update to come."""
        config = self.config
        progress = progress_by_update(self.update + 1, updates=config.updates, start=config.lr_start)
        if config.time_budget_seconds is not None:
            begin = progress_by_update(self.start, updates=config.updates, start=config.lr_start)
            spent = self.clock.elapsed + self.updater.expected_seconds
            progress = progress_by_time(spent, budget=config.time_budget_seconds, begin=max(begin, 0.0))
        return learning_rate(progress, peak=config.peak_lr, min_ratio=config.min_lr_ratio, warmup=config.warmup_share)

    def finished(self) -> bool:
        """Whether the updates are done or the next one would exceed the time allowance."""
        if self.config.time_budget_seconds is None:
            return self.update >= self.config.updates
        return self.clock.elapsed + self.updater.expected_seconds > self.config.time_budget_seconds

    def close(self) -> None:
        """Close the logs and let go of the folder."""
        self.observer.close()
        self.lock.close()
