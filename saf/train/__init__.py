"""Pretraining: configuration, the loop, exact checkpoints and the events."""

from saf.train.checkpoint import latest, load_model, open_checkpoint
from saf.train.config import TrainConfig
from saf.train.loop import EXIT_STOPPED, pretrain
from saf.train.run_config import continue_from

__all__ = ["EXIT_STOPPED", "TrainConfig", "continue_from", "latest", "load_model", "open_checkpoint", "pretrain"]
