"""`saf evaluate`: held-out perplexity of one model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from saf.arguments import at_least
from saf.cli.command import Command
from saf.cli.output import show
from saf.errors import InputError
from saf.evaluate.perplexity import WRITTEN, evaluate_perplexity
from saf.machine.execution import pick_device
from saf.opening import find_model, open_data
from saf.records.table import Table


@dataclass(kw_only=True)
class Evaluate(Command):
    """Measure the perplexity of a model on held-out text it was neither trained nor tuned on."""

    model: Annotated[Path, tyro.conf.Positional]
    """A checkpoint (step-N), a run (its newest checkpoint), or a folder written by saf.save."""
    data: Path | None = None
    """Folder made by `saf data prepare`; the one it was trained on if not given."""
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
        if self.out is not None:
            _check_own(self.out)
        found = find_model(self.model)
        data = open_data(self.data, found)
        record = evaluate_perplexity(
            found.model(pick_device(self.device)),
            data,
            partition=self.partition,
            length=self.length,
            batch_size=self.batch_size,
            limit=self.limit,
            precision=self.precision,
            out=self.out,
            checkpoints={"model": found.checkpoint.hash if found.checkpoint else None},
        )
        rows = {
            "perplexity": f"{record['perplexity']:.4f}",
            "loss, nats per token": f"{record['loss']:.5f}",
            "partition": f"{record['partition']} of {data.folder}",
            "windows": f"{record['windows']:,} of {record['length']:,} tokens",
            "precision": record["precision"],
            "written to": self.out,
        }
        show({"model": found.folder, **record}, Table.facts(str(found.folder), rows), as_json=self.json)
        return record


def _check_own(folder: Path) -> None:
    """Raise InputError unless the folder is new, empty or from an earlier evaluation: a run keeps its own there."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; --out takes a folder")
    others = sorted({path.name for path in folder.iterdir()} - set(WRITTEN)) if folder.exists() else []
    if others:
        raise InputError(f"{folder} holds {others[0]}, which `saf evaluate` did not write; give --out a new folder")


COMMAND = Evaluate
