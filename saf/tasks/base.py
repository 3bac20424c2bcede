"""`Task`: what a run trains on, what freezing calibrates on, and what the model is measured by.

A run assumes no text: its position in the data, and what must be equal to continue from a checkpoint, come from here.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saf.calibration import Batch
from saf.errors import CheckpointError, InputError
from saf.machine import Execution
from saf.models import GPT


class Task(ABC):
    """What a run trains on and is measured by.

    In a group of processes every one calls `controller_loss` and `report` with the same model: they share the sequences
    out, the first one writes, and all get the same.
    """

    name: str
    """Its name in settings and in `TASKS`."""
    settings: Any
    """Those of the run, `saf.train.TrainConfig`, whose module imports this one."""
    length: int
    """Tokens of a sequence that the model is given."""
    vocab_size: int
    """Number of token ids of inputs and targets."""
    tokenizer_hash: str | None = None
    """SHA-256 of the tokenizer, where there is one."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 of all data, for training and measuring."""

    @property
    def windows_per_update(self) -> int:
        """Sequences of an update."""
        return self.settings.batch_size * self.settings.accumulation

    @property
    def targets_per_update(self) -> int:
        """Tokens of an update, those that are not counted in the loss included."""
        return self.windows_per_update * self.length

    def check(self, *, calibrates: bool, scores_outputs: bool) -> None:
        """Raise DataError now, not in the middle of training, for too few data.

        `calibrates` says that events measure attention, `scores_outputs` that their scores read held-out sequences.
        """
        if calibrates:
            self.calibration()
        if scores_outputs:
            self.heldout()

    @abstractmethod
    def batch(self, position: int, size: int) -> Tensor:
        """Inputs and targets `[2, size, length]` of the training sequences from `position` on; -100 is no target."""

    def training(
        self, update: int, device: torch.device, *, first: int = 0, every: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the micro-batches after `update` updates: number `first`, then each `every`, for a process of several.

        The next one is fetched before this one is used.
        """
        size = self.settings.batch_size
        position = update * self.windows_per_update + first * size

        def fetch(position: int) -> Tensor:
            batch = self.batch(position, size)
            return batch.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch

        pending = fetch(position)
        while True:
            position += every * size
            (inputs, targets), pending = pending, fetch(position)
            yield inputs, targets

    @abstractmethod
    def calibration(self) -> Sequence[Batch]:
        """Calibration sequences, the same for every arm: LongTensors `[<= batch_size, length]`, or mappings of them."""

    @abstractmethod
    def heldout(self) -> list[Tensor]:
        """Sequences that output-aware scores read, LongTensors `[<= batch_size, length]`."""

    @abstractmethod
    def controller_loss(self, model: GPT, execution: Execution, *, batches: int | None = None) -> float:
        """Loss that decisions during a run read, nats per target: of `eval_windows` sequences, or of some batches."""

    def controller_count(self, batches: int | None) -> int:
        """Sequences of `controller_loss`."""
        return self.settings.eval_windows if batches is None else batches * self.settings.batch_size

    @abstractmethod
    def report(
        self, model: GPT, execution: Execution, *, folder: Path, checkpoints: dict[str, str | None]
    ) -> dict[str, Any]:
        """Measure the trained model and return the entries for result.json, `report_loss` among them.

        Writes the task's own files into `folder`, with the hashes of `checkpoints` by role.
        """

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """The entries of config.json about the data, `fingerprint` among them."""

    def state(self, update: int) -> dict[str, Any]:
        """The entries of a checkpoint's state.json about the data after `update` updates."""
        position = update * self.windows_per_update
        state = {"sampler_position": position, "data_fingerprint": self.fingerprint, "tokenizer": self.tokenizer_hash}
        return {name: value for name, value in state.items() if value is not None}

    def check_continues(self, state: dict[str, Any], path: Path) -> None:
        """Raise unless training can continue from the checkpoint at `path`, whose state.json is `state`."""
        if state["data_fingerprint"] != self.fingerprint:
            other = f"fingerprint {state['data_fingerprint'][:16]}, this run's is {self.fingerprint[:16]}"
            raise CheckpointError(
                f"{path} was trained on other data: {other}; use its data, settings and seed, or --fresh"
            )
        if state["sampler_position"] != state["update"] * self.windows_per_update:
            used = state["sampler_position"] // max(state["update"], 1)
            sizes = f"{self.settings.batch_size} x {self.settings.accumulation}"
            raise InputError(f"batch_size x accumulation must be {used} as in {path}, got {sizes}")
