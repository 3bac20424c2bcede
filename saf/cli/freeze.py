"""`saf freeze`: the whole recipe on a checkpoint or a model of transformers."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from saf.cli.output import Countdown, show
from saf.freeze_checkpoint import CheckpointFreezing, freeze_checkpoint
from saf.freeze_config import FreezeConfig
from saf.records.run import means_transformers

FIRST = (
    *(
        "checkpoint",
        "out",
        "data",
        "sequences",
        "length",
        "allow_shorter",
        "accept_loss",
        "heal",
        "device",
        "json",
        "config.rate",
    ),
    *("config.joint_cost", "config.budget", "config.max_per_layer", "config.score", "config.storage"),
    *("config.max_fit_kl", "config.operation", "config.heads"),
)
"""The flags that `--help` shows."""


@dataclass(frozen=True, kw_only=True)
class Command(CheckpointFreezing):
    """Freeze or prune heads of a checkpoint or Hugging Face model, and write the result as a new one.

    The result holds the optimiser's state, so `saf pretrain --parent OUT` continues from there. For a Hugging Face
    model OUT is a folder that from_pretrained opens, after `import saf.integrations.transformers`.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """Freeze heads of this checkpoint (step-N), run (its newest checkpoint), or Hugging Face model (its folder, or its
    name on the hub)."""
    config: Annotated[FreezeConfig, tyro.conf.OmitArgPrefixes] = field(default_factory=FreezeConfig)
    """These settings say how heads are frozen."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> dict[str, Any]:
        freeze, kind = freeze_checkpoint, "checkpoint"
        if means_transformers(self.checkpoint):
            from saf.hf.folders import freeze_folder

            freeze, kind = freeze_folder, "model"
        with ExitStack() as bars:
            report, written, parent = freeze(
                self,
                say=bars.enter_context(Countdown("", "")).say,
                countdown=lambda verb, items: bars.enter_context(Countdown(verb, items)),
            )
        result = {"checkpoint": str(self.out), "hash": written, "parent": parent, **report.to_dict()}
        show(result, report.table(), f"{kind} {self.out}", f"hash {written}", as_json=self.json)
        return result
