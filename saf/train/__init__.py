"""Training runs: settings, the loop with its events, finetuning."""

from saf.checkpoint import latest, open_checkpoint
from saf.train.config import TrainConfig, continue_from
from saf.train.loop import EXIT_STOPPED, pretrain
