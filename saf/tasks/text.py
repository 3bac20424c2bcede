"""Text pretraining: windows of a prepared data folder, measured by their perplexity."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saf.data import TokenData, calibration_windows, random_windows, sequential_windows, shuffled_windows
from saf.errors import DataError, InputError
from saf.evaluate.perplexity import evaluate_perplexity
from saf.machine import Execution
from saf.models import GPT
from saf.tasks.base import Task

SAMPLERS = {"shuffled": shuffled_windows, "random": random_windows}


class TextTask(Task):
    """Predict every next token of the training partition.

    Calibration reads the partition that the folder was prepared for, decisions during a run the controller partition,
    the final report the report partition.
    """

    name = "text"

    def __init__(self, settings: Any, *, length: int):
        """Open the data folder for windows of `length` tokens; raise DataError when it cannot be used."""
        self.settings, self.length = settings, length
        self.data = TokenData.open(settings.data)
        self.vocab_size, self.tokenizer_hash = self.data.vocab_size, self.data.tokenizer_hash

    @property
    def fingerprint(self) -> str:
        return self.data.fingerprint

    def check(self, *, calibrates: bool, scores_outputs: bool) -> None:
        super().check(calibrates=calibrates, scores_outputs=scores_outputs)
        for partition, count in (("controller", 1), ("report", self._report_windows or 1)):
            if (windows := len(sequential_windows(self.data.tokens(partition), self.length, count))) < count:
                most = f"at most the partition's {windows * self.length:,}, got {count * self.length:,}"
                raise DataError(f"report_tokens must be {most}; prepare more held-out text")

    @cached_property
    def _tokens(self) -> np.ndarray:
        return self.data.tokens("train")

    def batch(self, position: int, size: int) -> Tensor:
        sample = SAMPLERS[self.settings.sampler]
        windows = sample(self._tokens, position, size, length=self.length, seed=self.settings.seed)
        return torch.stack([windows[:, :-1], windows[:, 1:]])

    def calibration(self) -> list[Tensor]:
        settings = self.settings
        source = None if settings.calibration_source == "auto" else settings.calibration_source
        count = settings.calibration_sequences
        windows = calibration_windows(self.data, length=self.length, count=count, seed=settings.seed, source=source)
        return list(windows.split(settings.batch_size))

    def heldout(self) -> list[Tensor]:
        count, size = self.settings.heldout_sequences, self.settings.batch_size
        return heldout_batches(self.data, length=self.length, count=count, batch_size=size)

    @property
    def _report_windows(self) -> int | None:
        """Number of windows to report on; None is all."""
        if (tokens := self.settings.report_tokens) is None:
            return None
        if tokens < self.length:
            raise InputError(f"report_tokens must be at least one window of {self.length:,} tokens, got {tokens:,}")
        return tokens // self.length

    def _evaluate(self, model: GPT, execution: Execution, partition: str, **options: Any) -> dict[str, Any]:
        shape = {"partition": partition, "length": self.length, "batch_size": self.settings.batch_size}
        return evaluate_perplexity(model, self.data, **shape, precision=execution.precision, **options)

    def controller_loss(self, model: GPT, execution: Execution, *, batches: int | None = None) -> float:
        """Loss (nats per token) on the first windows of the controller partition, on all where it holds fewer."""
        return self._evaluate(model, execution, "controller", limit=self.controller_count(batches))["loss"]

    def report(
        self, model: GPT, execution: Execution, *, folder: Path, checkpoints: dict[str, str | None]
    ) -> dict[str, Any]:
        """Return loss and perplexity on the report partition, and write evaluation.json with the losses there."""
        files = {"out": folder, "tokens": self.settings.token_losses, "checkpoints": checkpoints}
        record = self._evaluate(model, execution, "report", limit=self._report_windows, **files)
        entropy = self.data.unigram_entropy("report")
        return {"report_loss": record["loss"], "report_perplexity": record["perplexity"], "unigram_entropy": entropy}

    def description(self) -> dict[str, Any]:
        return {"folder": self.settings.data, "fingerprint": self.fingerprint, "tokenizer": self.tokenizer_hash}


def heldout_batches(data: TokenData, *, length: int, count: int, batch_size: int) -> list[Tensor]:
    """The last `count` windows of the controller partition, LongTensors `[<= batch_size, length]`.

    Evaluations during a run read the first ones, so scores and losses see different text while the partition holds
    both. Raises DataError when it has fewer than `count`.
    """
    windows = sequential_windows(data.tokens("controller"), length)
    if len(windows) < count:
        few = f"the controller partition must have {count} held-out windows of {length:,} tokens, got {len(windows)}"
        raise DataError(f"{few}; ask for fewer with heldout_sequences, or prepare more text")
    return list(windows[-count:, :-1].split(batch_size))
