"""`saf bench`: speed, memory and errors, each number beside its baseline, its bound and its control."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saf.bench.accuracy.errors import ErrorSettings
from saf.bench.freezing.settings import CalibrationSettings
from saf.bench.harness.settings import BenchSettings
from saf.bench.kinds import BENCHMARKS, measure
from saf.bench.model.attention import AttentionSettings
from saf.bench.model.decode import DecodeSettings
from saf.bench.model.finetune import FinetuneUpdateSettings
from saf.bench.model.prefill import PrefillSettings
from saf.bench.model.update import UpdateSettings
from saf.bench.operator.case import OpSettings
from saf.cli.command import Command
from saf.cli.output import machine, show
from saf.errors import AccuracyError, UnsupportedError
from saf.machine.processes import is_first, joined
from saf.records.table import Part

REFUSED = "refused: the machine is not quiet; end other work, measure more --pairs, or accept more with --tolerance"


@dataclass(kw_only=True)
class _Bench(Command, BenchSettings):
    """Say where the record of a `saf bench` command goes and how it is shown, beside the settings of its kind."""

    out: Path
    """JSON file to write; a new one."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> dict[str, Any]:
        """Measure, write, show and return the record; raise AccuracyError for rows above their limits."""
        with joined(getattr(self, "device", "auto")):
            record = measure(self, out=self.out)
            if is_first():
                show(record, *parts(record), f"written to {self.out}", as_json=self.json)
        if not record["rows"] and not record["memory"]:
            raise UnsupportedError(f"nothing could be measured; {self.out} says why")
        if failed := BENCHMARKS[self.kind].failures(record):
            raise AccuracyError(f"{len(failed)} of {len(record['rows'])} rows: {'; '.join(failed)}")
        return record


@dataclass(kw_only=True)
class Op(_Bench, OpSettings):
    """Time one layer's attention without projections: frozen heads alone, and the mixed layer.

    Ratios are the baseline's time over the arm's: above 1 the arm is faster.
    """


@dataclass(kw_only=True)
class Update(_Bench, UpdateSettings):
    """Time whole optimiser updates of a model: accumulation, backward, clipping, AdamW, gradient reset.

    Data loading is left out. Ratios are the baseline's time over the arm's: above 1 the arm is faster.
    With --parallel, the processes that `torchrun --nproc-per-node N -m saf bench update ...` started share updates.
    """


@dataclass(kw_only=True)
class Finetune(_Bench, FinetuneUpdateSettings):
    """Time updates of finetuning on a task's own examples, padded to the longest of each micro-batch.

    Each order of the examples is measured by itself, the mean of their ratios is told. Ratios are the baseline's time
    over the arm's: above 1 the arm is faster.
    """


@dataclass(kw_only=True)
class Prefill(_Bench, PrefillSettings):
    """Time forward passes over whole prompts, with the output layer on the last token alone.

    Ratios are the baseline's time over the arm's: above 1 the arm is faster.
    """


@dataclass(kw_only=True)
class Attention(_Bench, AttentionSettings):
    """Time a model's attention layers alone, projections inside, one after another as the model calls them.

    Ratios are the baseline's time over the arm's: above 1 the arm is faster.
    """


@dataclass(kw_only=True)
class Decode(_Bench, DecodeSettings):
    """Time one more token of every sequence after a filled cache of fixed size, and tell the cache's bytes.

    Ratios are the baseline's time over the arm's: above 1 the arm is faster.
    """


@dataclass(kw_only=True)
class Errors(_Bench, ErrorSettings):
    """Measure errors against float64 of a mixed layer and of frozen heads alone, outputs and every gradient.

    Ends with an error that names the rows above their budgets.
    """


@dataclass(kw_only=True)
class Calibration(_Bench, CalibrationSettings):
    """Time the whole intervention, warm and at first use: calibration, scoring, selection, fitting, installation.

    Beside it a dense collection of the same queries and keys, whose statistics must agree, and the fit of all heads.
    """


def parts(record: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the machine, what the record's kind says of it, and what to do about refused measurements."""
    yield machine(record["provenance"])
    yield from BENCHMARKS[record["kind"]].tables(record, brief=True)
    if any(row.get("refused") for row in record["rows"]):
        yield REFUSED


COMMANDS = {
    "op": Op,
    "update": Update,
    "finetune": Finetune,
    "prefill": Prefill,
    "attention": Attention,
    "decode": Decode,
    "errors": Errors,
    "calibration": Calibration,
}
