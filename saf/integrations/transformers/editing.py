"""What a callback that edits heads is to its `Trainer`, which finds it by this class."""

from pathlib import Path
from typing import Any

from torch import nn
from transformers.trainer_callback import TrainerCallback


class Editing(TrainerCallback):
    """Be a callback that edits heads: it knows its Trainer, and its model takes the heads of checkpoints."""

    trainer: Any = None
    """The Trainer that trains, from when it begins."""
    called: bool = False
    """Whether `train` was called and its loop has not begun yet; a loop that begins later starts over."""
    longest: int | None = None
    """Tokens of the longest rows that the model takes once heads were edited; None for no such limit."""
    first: int | None = None
    """After which update heads are edited at the earliest; None where none will be."""

    def start_over_(self, model: nn.Module, optimizer: Any = None) -> None:
        """Take back what events changed: the Trainer is about to start over, with what the model has learned."""
        raise NotImplementedError

    def follow_(self, model: nn.Module, folder: Path, optimizer: Any = None) -> None:
        """Give a model the heads of a checkpoint, whose weights are loaded next."""
        raise NotImplementedError


def editing(trainer: Any) -> list[Editing]:
    """Return a Trainer's callbacks that edit heads."""
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Editing)]
