"""`saf evaluate`: held-out perplexity of one model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from saf.arguments import at_least
from saf.cli.command import Command
from saf.cli.models import open_model
from saf.cli.output import show
from saf.data.text_data import TextData
from saf.errors import InputError
from saf.evaluate.perplexity import WRITTEN, evaluate_perplexity
from saf.machine.processes import agreed, is_first, joined
from saf.records.table import Table


@dataclass(kw_only=True)
class Evaluate(Command):
    """Measure the perplexity of a model on held-out text it was neither trained nor tuned on.

    Several processes share the windows out when `torchrun --nproc-per-node N -m saf evaluate ...` starts them.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """A checkpoint (step-N), a run (its newest checkpoint), a folder written by saf.save, or a model of transformers:
    its folder, or its name on the hub."""
    data: Path | None = None
    """Folder made by `saf data prepare`; the one it was trained on if not given. For a model of transformers its
    tokenizer must be the model's (`--tokenizer FOLDER`); a file of text will do, too."""
    out: Path | None = None
    """Write evaluation.json and log_probs.safetensors into this folder, which may hold nothing else."""
    partition: Literal["report", "controller", "calibration", "train"] = "report"
    """Which text."""
    length: Annotated[int | None, at_least(1)] = None
    """Tokens of context in a window (the model's longest)."""
    batch_size: Annotated[int, at_least(1)] = 8
    """Windows in a forward pass."""
    limit: Annotated[int | None, at_least(1)] = None
    """Stop after this many windows."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto is bf16 autocast on CUDA and fp32 on CPU."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> dict[str, Any]:
        """Evaluate, show and return the record of evaluation.json; raise InputError for an `out` of something else."""
        with joined(self.device):
            return self._run()

    def _run(self) -> dict[str, Any]:
        """Do what `run` does, in the group of processes that is there."""
        with agreed():  # all have looked before the first one writes
            if self.out is not None:
                _check_own(self.out)
        model, data, folder, identity, longest = open_model(self.model, self.data, self.device)
        if isinstance(data, TextData) and self.partition != "report":
            raise InputError(f"{self.data} is text, all of which is read; leave --partition out")
        record = evaluate_perplexity(
            model,
            data,
            partition=self.partition,
            length=self.length or longest,
            batch_size=self.batch_size,
            limit=self.limit,
            precision=self.precision,
            out=self.out,
            checkpoints={"model": identity},
        )
        rows = {
            "perplexity": f"{record['perplexity']:.4f}",
            "loss, nats per token": f"{record['loss']:.5f}",
            "partition": f"{'all' if isinstance(data, TextData) else record['partition']} of {data.folder}",
            "windows": f"{record['windows']:,} of {record['length']:,} tokens",
            "precision": record["precision"],
            "written to": self.out,
        }
        if is_first():
            show({"model": folder, **record}, Table.facts(str(folder), rows), as_json=self.json)
        return record


def _check_own(folder: Path) -> None:
    """Raise InputError unless the folder is new, empty or from an earlier evaluation: a run keeps its own there."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; --out takes a folder")
    others = sorted({path.name for path in folder.iterdir()} - set(WRITTEN)) if folder.exists() else []
    if others:
        raise InputError(f"{folder} holds {others[0]}, which `saf evaluate` did not write; give --out a new folder")


COMMAND = Evaluate
