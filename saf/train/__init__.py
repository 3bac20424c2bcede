"""Training runs: settings, the loop with its events, finetuning."""

from saf.checkpoint import latest, open_checkpoint
from saf.train.config import TrainConfig, continue_from
from saf.train.loop import EXIT_STOPPED, pretrain

__all__ = ["EXIT_STOPPED", "TrainConfig", "continue_from", "latest", "open_checkpoint", "pretrain"]
