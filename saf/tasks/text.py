"""Text pretraining: windows of a prepared data folder, judged by their perplexity."""

import warnings
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from saf.data import RandomWindows, ShuffledWindows, TokenData, calibration_windows, sequential_windows
from saf.errors import CheckpointError, DataError, InputError, SafWarning
from saf.evaluate.perplexity import evaluate_perplexity
from saf.machine.execution import Execution
from saf.models import GPT
from saf.tasks.task import FetchedAhead, TaskSettings

SAMPLERS: dict[str, Any] = {"shuffled": ShuffledWindows, "random": RandomWindows}


class TextTask:
    """Predict every next token of the training partition.

    Calibration reads the partition that the folder was prepared for, decisions during a run the controller partition,
    the final report the report partition.
    """

    name: ClassVar[str] = "text"

    def __init__(self, settings: TaskSettings, *, length: int):
        """Open the data folder for windows of `length` tokens; raise DataError when it cannot be used."""
        self.settings = settings
        self.length = length
        self.data = TokenData.open(settings.data)

    @property
    def vocab_size(self) -> int:
        """Return how many token ids the tokenizer has."""
        return self.data.vocab_size

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the tokenizer and of every token in order."""
        return self.data.fingerprint

    @property
    def windows_per_update(self) -> int:
        """Return how many windows one update consumes."""
        return self.settings.batch_size * self.settings.accumulation

    @property
    def targets_per_update(self) -> int:
        """Return how many target tokens one update has: every token of its windows but the first is one."""
        return self.windows_per_update * self.length

    def check(self, *, calibrates: bool, scores_outputs: bool) -> None:
        """Raise DataError now, not in the middle of training, when a partition is too small for its use.

        Too little to calibrate on is a warning where nothing is frozen: it is the next run that will need it.
        """
        try:
            self.calibration()
        except DataError as error:
            if calibrates:
                raise
            told = f"this run freezes nothing, but one that freezes from its checkpoints would be refused: {error}"
            warnings.warn(told, SafWarning, stacklevel=2)
        if scores_outputs:
            self.heldout()
        for partition in ("controller", "report"):
            sequential_windows(self.data.tokens(partition), self.length, 1)

    def training(self, update: int, device: torch.device, *, first: int = 0, every: int = 1) -> FetchedAhead:
        """Return the micro-batches of windows that follow `update` updates; number `first`, and then each `every`."""
        sampler = SAMPLERS[self.settings.sampler]
        windows = sampler(self.data.tokens("train"), length=self.length, seed=self.settings.seed)
        size = self.settings.batch_size
        position = update * self.windows_per_update + first * size
        return FetchedAhead(
            lambda place: windows.batch(place, size), _next_tokens, position=position, step=every * size, device=device
        )

    def calibration(self) -> list[Tensor]:
        """Return the calibration sequences as LongTensors `[<= batch_size, length]`, the same for every arm.

        Raises:
            DataError: The text holds fewer windows than asked for.
        """
        settings = self.settings
        source = None if settings.calibration_source == "auto" else settings.calibration_source
        windows = calibration_windows(
            self.data,
            length=self.length,
            count=settings.calibration_sequences,
            seed=settings.seed,
            source=source,
        )
        return list(windows.split(settings.batch_size))

    def heldout(self) -> list[Tensor]:
        """Return the last windows of the controller partition, as `heldout_batches` does."""
        settings = self.settings
        return heldout_batches(
            self.data, length=self.length, count=settings.heldout_sequences, batch_size=settings.batch_size
        )

    def controller_loss(self, model: GPT, execution: Execution, *, batches: int | None = None) -> float:
        """Return the loss (nats per token) on the first windows of the controller partition, `eval_windows` or batches.

        A partition that holds fewer is read whole.
        """
        settings = self.settings
        record = evaluate_perplexity(
            model,
            self.data,
            partition="controller",
            length=self.length,
            batch_size=self.settings.batch_size,
            limit=settings.eval_windows if batches is None else batches * settings.batch_size,
            precision=execution.precision,
        )
        return record["loss"]

    def report(
        self, model: GPT, execution: Execution, *, folder: Path, checkpoints: dict[str, str | None]
    ) -> dict[str, Any]:
        """Return loss and perplexity on the report partition, and write evaluation.json with the losses there."""
        record = evaluate_perplexity(
            model,
            self.data,
            partition="report",
            length=self.length,
            batch_size=self.settings.batch_size,
            precision=execution.precision,
            out=folder,
            tokens=self.settings.token_losses,
            checkpoints=checkpoints,
        )
        return {
            "report_loss": record["loss"],
            "report_perplexity": record["perplexity"],
            "unigram_entropy": self.data.unigram_entropy("report"),
        }

    def description(self) -> dict[str, Any]:
        """Return the data folder, its fingerprint, and the hash of its tokenizer."""
        tokenizer = self.data.tokenizer_hash
        return {"folder": self.settings.data, "fingerprint": self.data.fingerprint, "tokenizer": tokenizer}

    def state(self, update: int) -> dict[str, Any]:
        """Return how many windows were consumed, and which data and tokenizer they are of."""
        return {
            "sampler_position": update * self.windows_per_update,
            "data_fingerprint": self.data.fingerprint,
            "tokenizer": self.data.tokenizer_hash,
        }

    def check_continues(self, state: dict[str, Any], path: Path) -> None:
        """Raise CheckpointError for a checkpoint of other data, InputError for updates of another size."""
        if state["data_fingerprint"] != self.data.fingerprint:
            raise CheckpointError(
                f"{path} was trained on data with fingerprint {state['data_fingerprint'][:16]}; "
                f"the data folder has {self.data.fingerprint[:16]}. Use the folder it was trained on"
            )
        position, update = state["sampler_position"], state["update"]
        if position != update * self.windows_per_update:
            raise InputError(
                f"the parent used {position // max(update, 1)} windows an update, this run "
                f"{self.settings.batch_size} x {self.settings.accumulation}; keep their product so that the data go on "
                "where they stopped"
            )


def _next_tokens(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Return windows `[size, length + 1]` as inputs and, one token later, targets."""
    return windows[:, :-1], windows[:, 1:]


def heldout_batches(data: TokenData, *, length: int, count: int, batch_size: int) -> list[Tensor]:
    """Return the last `count` windows of the controller partition as LongTensors `[<= batch_size, length]`.

    Evaluations during a run read its first windows, so that what a score saw does not flatter the loss after freezing
    as long as the partition holds both. Raises DataError when it has fewer than `count`.
    """
    windows = sequential_windows(data.tokens("controller"), length)
    if len(windows) < count:
        raise DataError(
            f"the controller partition must have {count} held-out windows of {length:,} tokens, got {len(windows)}; "
            "ask for fewer with heldout_sequences, or prepare more text"
        )
    return list(windows[-count:, :-1].split(batch_size))
