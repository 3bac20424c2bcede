"""`saf bench`: does freezing pay on this device, for this model, at these lengths? Ratios of paired measurements."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import tyro

from saf import bench
from saf.cli.output import machine, show
from saf.errors import UnsupportedError
from saf.machine.processes import is_first, joined
from saf.report.benchmarks import KINDS

REFUSED = "refused: the machine is not quiet; end other work, measure more --pairs, or accept more with --tolerance"


@dataclass(kw_only=True)
class _Bench:
    """What each benchmark's command adds to its settings."""

    folder: tyro.conf.Positional[Path | None] = None
    """A checkpoint, a run, or what saf.save or save_pretrained wrote, with its own frozen heads; instead of --model."""
    out: Path | None = None
    """JSON file to write; a new one."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> dict[str, Any]:
        """Measure, write, show and return the record."""
        kind = next(kind for kind in bench.KINDS.values() if isinstance(self, kind))
        values: Any = {field.name: getattr(self, field.name) for field in fields(kind)}
        settings = kind(**values)
        if self.folder is not None:
            settings.model = str(self.folder)
        with joined(settings.device):
            record = bench.measure(settings, out=self.out)
            if is_first():
                refused = [REFUSED] * any(row["refused"] for row in record["rows"])
                written = [f"written to {self.out}"] * (self.out is not None)
                tables = KINDS[record["kind"]].tables(record)
                show(record, machine(record["provenance"]), *tables, *refused, *written, as_json=self.json)
        if not record["rows"] and not record["memory"]:
            reasons = "; ".join(each["why"] for each in record["left_out"])
            raise UnsupportedError(f"nothing could be measured: {reasons}")
        return record


@dataclass(kw_only=True)
class Op(_Bench, bench.Op):
    """Time one layer's attention without projections: frozen heads alone, and the mixed layer.

    Ratios are the baseline's time over the arm's: above 1 the arm is faster.
    """


@dataclass(kw_only=True)
class Update(_Bench, bench.Update):
    """Time whole optimiser updates of a model: accumulation, backward, clipping, AdamW, gradient reset.

    Data loading is left out. Ratios are the baseline's time over the arm's: above 1 the arm is faster. With --parallel,
    the processes that `torchrun --nproc-per-node N -m saf bench update ...` started share updates.
    """


@dataclass(kw_only=True)
class Prefill(_Bench, bench.Prefill):
    """Time forward passes over whole prompts, with the output layer on the last token alone.

    Ratios are the baseline's time over the arm's: above 1 the arm is faster.
    """


@dataclass(kw_only=True)
class Decode(_Bench, bench.Decode):
    """Time one more token of every sequence after a filled cache of fixed size, and tell the cache's bytes.

    Ratios are the baseline's time over the arm's: above 1 the arm is faster.
    """


Command = Update | Prefill | Decode | Op
