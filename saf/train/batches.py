"""Micro-batches on the training device, and the windows that calibration reads."""

from typing import Any

import torch
from torch import Tensor

from saf.data import RandomWindows, ShuffledWindows, TokenData, calibration_windows, sequential_windows
from saf.errors import DataError
from saf.train.config import TrainConfig

SAMPLERS: dict[str, Any] = {"shuffled": ShuffledWindows, "random": RandomWindows}


class MicroBatches:
    """Hands out the micro-batches that follow `position` (windows consumed so far), one fetched ahead."""

    def __init__(self, windows: Any, *, size: int, position: int, device: torch.device):
        self.windows = windows
        self.size = size
        self.device = device
        self._position = position
        self._next = self._fetch()

    def take(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each `[size, length]`, on the device."""
        inputs, targets = self._next
        self._next = self._fetch()
        return inputs, targets

    def _fetch(self) -> tuple[Tensor, Tensor]:
        batch = self.windows.batch(self._position, self.size)
        self._position += self.size
        if self.device.type == "cuda":
            batch = batch.pin_memory().to(self.device, non_blocking=True)
        return batch[:, :-1], batch[:, 1:]


def calibration_batches(data: TokenData, config: TrainConfig, *, length: int) -> list[Tensor]:
    """Return the calibration sequences as LongTensors `[<= batch_size, length]`, the same for every arm.

    Raises:
        DataError: The text holds fewer windows than asked for.
    """
    source = None if config.calibration_source == "auto" else config.calibration_source
    count = config.calibration_sequences
    windows = calibration_windows(
        data, length=length, count=count, seed=config.seed, source=source, setting="calibration_sequences"
    )
    return list(windows.split(config.batch_size))


def heldout_batches(data: TokenData, *, length: int, count: int, batch_size: int) -> list[Tensor]:
    """Return the last `count` windows of the controller partition as LongTensors `[<= batch_size, length]`.

    Evaluations during a run read its first windows, so that what a score saw does not flatter the loss after freezing
    as long as the partition holds both. Raises DataError when it has fewer than `count`.
    """
    windows = sequential_windows(data.tokens("controller"), length)
    if len(windows) < count:
        raise DataError(
            f"output-aware scores were to read {count} windows of {length:,} tokens, the controller partition has "
            f"{len(windows)}; ask for fewer with heldout_sequences, or prepare more text"
        )
    return list(windows[-count:, :-1].split(batch_size))


def check_heldout(data: TokenData, config: TrainConfig, *, length: int) -> None:
    """Raise DataError now, not in the middle of training, when a partition is too small for its use."""
    if config.freeze is not None:
        calibration_batches(data, config, length=length)
        if "outputs" in config.freeze.needs:
            heldout_batches(data, length=length, count=config.heldout_sequences, batch_size=config.batch_size)
    for partition in ("controller", "report"):
        sequential_windows(data.tokens(partition), length, 1)
