"""What a run asks of its task: what it trains on, what freezing calibrates on, and what the model is judged by.

Nothing of a run assumes text: where it stands in the data, what must be the same to go on from a checkpoint, and what a
loss is of are the task's to say.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from saf.calibration.capture import Batch
from saf.machine.execution import Execution
from saf.models import GPT


class MicroBatches(Protocol):
    """Hand out micro-batches, one after the other."""

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the next inputs and targets, each `[sequences, length]`, on the device; -100 is no target."""
        ...


class FetchedAhead:
    """Hand out the micro-batches that follow a position (sequences consumed so far), one fetched ahead."""

    def __init__(
        self,
        make: Callable[[int], Tensor],
        part: Callable[[Tensor], tuple[Tensor, Tensor]],
        *,
        position: int,
        step: int,
        device: torch.device,
    ):
        """Fetch the first micro-batch: `make` gives what begins at a position, `part` its inputs and targets.

        The next one begins `step` sequences later.
        """
        self.make = make
        self.part = part
        self.step = step
        self.device = device
        self._position = position
        self._next = self._fetch()

    def take(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each `[size, length]`, on the device."""
        inputs, targets = self._next
        self._next = self._fetch()
        return inputs, targets

    def _fetch(self) -> tuple[Tensor, Tensor]:
        """Return the next inputs and targets on the device, and move on."""
        batch = self.make(self._position)
        self._position += self.step
        if self.device.type == "cuda":
            batch = batch.pin_memory().to(self.device, non_blocking=True)
        return self.part(batch)


def inputs_and_targets(both: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and targets that were stacked as `[2, size, length]`."""
    return both[0], both[1]


class TaskSettings(Protocol):
    """Name what a task may read of a run's settings, `saf.train.TrainConfig`, which describes each and its default."""

    data: str
    batch_size: int
    accumulation: int
    seed: int
    sampler: Any
    eval_windows: int
    calibration_sequences: int
    calibration_source: Any
    heldout_sequences: int
    token_losses: bool
    finetuning: Any
    mqar: Any


class Task(Protocol):
    """Say what a run trains on and is judged by."""

    name: ClassVar[str]
    """Its name in the registry and in settings."""
    length: int
    """Tokens of a sequence that the model is given."""

    @property
    def vocab_size(self) -> int:
        """Return how many token ids inputs and targets may have."""
        ...

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of all data, for training and judging; results name it."""
        ...

    @property
    def targets_per_update(self) -> int:
        """Return how many target tokens one update has, those that are not counted included."""
        ...

    def check(self, *, calibrates: bool, scores_outputs: bool) -> None:
        """Raise DataError now, not in the middle of training, for data too few for their use.

        `calibrates` says that events will measure attention, `scores_outputs` that their scores read held-out windows.
        """
        ...

    def training(self, update: int, device: torch.device, *, first: int = 0, every: int = 1) -> MicroBatches:
        """Return the micro-batches that follow `update` updates, every one by default.

        Otherwise they begin with number `first`, from 0, and go on `every` later: so several processes share them out,
        and see together what one would see.
        """
        ...

    def calibration(self) -> Sequence[Batch]:
        """Return the calibration sequences as LongTensors `[<= batch_size, length]`, the same for every arm.

        Mappings with `input_ids` and `targets` where the loss is not of every next token.
        """
        ...

    def heldout(self) -> list[Tensor]:
        """Return the sequences that output-aware scores read, as LongTensors `[<= batch_size, length]`."""
        ...

    def controller_loss(self, model: GPT, execution: Execution, *, batches: int | None = None) -> float:
        """Return the loss on the controller's windows, nats per counted target: what decisions during a run read.

        With `batches` it is that of so many fixed ones of `batch_size` windows. Every process of a group calls it with
        the same model; they share the windows out and all get the same.
        """
        ...

    def report(
        self, model: GPT, execution: Execution, *, folder: Path, checkpoints: dict[str, str | None]
    ) -> dict[str, Any]:
        """Judge the trained model and return the entries for result.json, `report_loss` among them.

        Writes its own files into `folder`, with the hashes of `checkpoints` by role. Every process of a group calls it
        with the same model; they share the work out, the first one writes, and all get the same.
        """
        ...

    def description(self) -> dict[str, Any]:
        """Return what config.json says of the data, its `fingerprint` among them."""
        ...

    def state(self, update: int) -> dict[str, Any]:
        """Return what a checkpoint after `update` updates holds of the task, as JSON values beside the run's own."""
        ...

    def check_continues(self, state: dict[str, Any], path: Path) -> None:
        """Raise unless training can go on from the checkpoint at `path`, whose state.json is `state`.

        Raises:
            CheckpointError: It was trained on other data.
            InputError: The data could not go on where they stopped.
        """
        ...
