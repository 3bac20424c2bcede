"""`saf freeze`: the whole recipe on a checkpoint or a model of transformers."""

import shlex
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from saf.cli.output import Countdown, say, show
from saf.cli.parsing import parse
from saf.freeze_checkpoint import CheckpointFreezing, freeze_checkpoint
from saf.freeze_config import FreezeConfig
from saf.records.run import means_transformers


@dataclass(frozen=True, kw_only=True)
class Command(CheckpointFreezing):
    """Freeze or prune heads of a checkpoint or Hugging Face model, and write the result as a new one.

    Begin with a pretrained model and a file of text by --score forward_kl --rate 0.02 --budget 1%: heads freeze in the
    order of what they cost together, while perplexity rises by less than 1%. Without a budget the rate decides, and
    the cost in perplexity is printed first. A checkpoint takes the data that it was trained on.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
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
                say=say,
                countdown=lambda verb, items: bars.enter_context(Countdown(verb, items)),
            )
        result = {"checkpoint": str(self.out), "hash": written, "parent": parent, **report.to_dict()}
        lines = [f"{kind} written to {self.out}", f"hash {written}", self._next(kind, report.statistics.length)]
        show(result, report.cost, report.table(), *lines, as_json=self.json)
        return result

    def _next(self, kind: str, length: int) -> str:
        """Name the commands that come next: go on training, or measure a pretrained model before and after."""
        if kind == "checkpoint":
            return f"next, train on: saf pretrain --parent {shlex.quote(str(self.out))} --out RUN"
        data = self.data if self.data is not None and self.data.is_dir() else "HELDOUT.txt"
        commands: list[list[Any]] = [
            ["evaluate", model, "--data", data, "--length", length, "--out", out, *["--bos"] * self.bos]
            for model, out in ((self.checkpoint, "before"), (self.out, "after"))
        ]
        commands += [["compare", "before", "after", "--card", self.out], ["report", self.out, "before", "after"]]
        lines = [f"  saf {shlex.join(map(str, words))}" for words in commands]
        return "\n".join(["next, measure the model before and after on other text:", *lines])


FIRST = {
    Command: (
        *("checkpoint", "out", "data", "sequences", "heldout_sequences", "length", "accept_loss", "heal"),
        *("device", "json"),
        "config",
    ),
    FreezeConfig: ("rate", "budget", "max_per_layer", "score", "storage"),
}
"""The settings that `--help` shows."""

parse_words = partial(parse, Command, prog="saf freeze", first=FIRST)
