"""`saf freeze` runs the whole recipe on a checkpoint or a model of transformers."""

import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from saf.cli.output import ProgressBars, print_progress, show
from saf.cli.parsing import parse
from saf.errors import LengthWarning
from saf.freeze_checkpoint import CheckpointFreezing, freeze_saved
from saf.freeze_config import FreezeConfig
from saf.records.run import is_transformers_model

NEXT_STEPS = {
    "calibrating": "fitting patterns, then measuring the loss with and without the heads of each layer",
    "measuring": "measuring the loss of the chosen heads, then writing the model",
    "healing": "measuring the loss, then writing the model",
}
"""What follows each part of the work that has a progress bar, by the bar's verb; it has no bar itself."""


@dataclass(frozen=True, kw_only=True)
class Command(CheckpointFreezing):
    r"""Freeze heads of a Hugging Face model or a checkpoint, and write the result as a new one.

    Attention is measured on one part of your text, and perplexity before and after on another. A model whose perplexity
    rises by more than 5% is not written.

    Freeze up to 2% of a pretrained model's heads, the cheapest first, while perplexity rises by less than 1%:

      $ saf freeze MODEL --data text.txt --score forward_kl --rate 0.02 \
            --budget 1% --length 1024 --out frozen

    Freeze a quarter of the heads of a run, on the run's own data:

      $ saf freeze runs/ordinary --rate 0.25 --out frozen
    """

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Freeze heads of this checkpoint (step-N), run (its newest checkpoint), or Hugging Face model (its folder, or its
    name on the hub)."""
    config: Annotated[FreezeConfig, tyro.conf.OmitArgPrefixes] = field(default_factory=FreezeConfig)
    """These settings say how heads are frozen."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> dict[str, Any]:
        if self.length is not None:  # whoever names a length knows that it is shorter than the model's longest input
            warnings.filterwarnings("ignore", category=LengthWarning)
        with ProgressBars(next_steps=NEXT_STEPS) as bars:
            report, written, parent = freeze_saved(self, say=print_progress, new_progress=bars)
        result = {"checkpoint": str(self.out), "hash": written, "parent": parent, **report.to_dict()}
        freezes = self.config.operation == "freeze"
        limit = f", for inputs of up to {report.statistics.length:,} tokens" if freezes else ""
        lines = [f"written to {self.out}{limit}", f"hash {written}", f"next: {self._next()}"]
        show(result, report.cost, report.table(), *lines, as_json=self.json)
        return result

    def _next(self) -> str:
        if is_transformers_model(self.checkpoint):
            # Text on which heads were chosen flatters them.
            bos = ", with --bos as here" if self.bos else ""
            return f"`saf compare --help` shows how to measure the model before and after on other text{bos}"
        return f"train on by `saf pretrain --parent {self.out} --out RUN`"


HELP_FIELDS = {
    Command: (
        "checkpoint", "config", "out", "data", "sequences", "length",
        "heldout_sequences", "accept_loss", "heal", "device", "json",
    ),
    FreezeConfig: ("rate", "score", "joint_cost", "budget"),
}  # fmt: skip
"""The settings that `--help` shows."""

parse_words = partial(parse, Command, prog="saf freeze", help_fields=HELP_FIELDS)
