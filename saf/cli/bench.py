"""`saf bench`: does freezing pay on this device, for this model, at these lengths? Ratios of paired measurements."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import tyro

from saf import bench
from saf.cli.output import show
from saf.cli.parsing import parse
from saf.distributed import is_rank0, process_group
from saf.errors import UnsupportedError
from saf.records.provenance import clock_words
from saf.report.benchmarks import tables

REFUSED = "refused: the machine is not quiet; end other work, measure more --pairs, or accept more with --tolerance"
FIRST = (
    *("folder", "out", "json", "model", "points", "rates", "backends", "kernels", "others", "pairs", "device"),
    *("compile", "graphs", "memory", "seconds"),
)
"""The flags that `--help` shows."""


@dataclass(kw_only=True)
class _Bench:
    """Settings that each benchmark's command adds to its own."""

    folder: tyro.conf.Positional[Path | None] = None
    """A checkpoint, a run, or the output of saf.save or save_pretrained, with its own frozen heads; instead of
    --model."""
    out: Path | None = None
    """Write the record to this new JSON file."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> dict[str, Any]:
        """Measure, write, show and return the record."""
        kind = next(kind for kind in bench.KINDS.values() if isinstance(self, kind))
        settings = kind(**{field.name: getattr(self, field.name) for field in fields(kind)})
        if self.folder is not None:
            settings.model = str(self.folder)
        with process_group(settings.device):
            record = bench.measure(settings, out=self.out)
            if is_rank0():
                notes = [REFUSED] * any(row["refused"] for row in record["rows"])
                notes += [f"written to {self.out}"] * (self.out is not None)
                show(record, _machine(record["provenance"]), *tables(record), *notes, as_json=self.json)
        if not record["rows"] and not record["memory"]:
            reasons = "; ".join(each["why"] for each in record["left_out"])
            raise UnsupportedError(f"nothing could be measured: {reasons}")
        return record


def _machine(provenance: dict[str, Any]) -> str:
    """Return a line on the device, versions, driver and clocks of a record."""
    versions = provenance["versions"]
    words = [f"{name} {versions[name]}" for name in ("torch", "triton", "cuda", "cudnn") if versions.get(name)]
    words += [f"driver {provenance['driver']}"] * bool(provenance["driver"]) + [clock_words(provenance)]
    return ", ".join(filter(None, [provenance["device"], *words]))


@dataclass(kw_only=True)
class Update(_Bench, bench.Update):
    """Time whole optimiser updates: accumulation, backward, clipping, AdamW, gradient reset; no data loading.

    Ratios are the baseline's time over the arm's: above 1 the arm is faster. With --parallel, the processes that
    `torchrun --nproc-per-node N -m saf bench update ...` started share updates.
    """


@dataclass(kw_only=True)
class Prefill(_Bench, bench.Prefill):
    """Time forward passes over whole prompts, with the output layer on the last token alone.

    Ratios are the baseline's time over the arm's: above 1 the arm is faster.
    """


@dataclass(kw_only=True)
class Decode(_Bench, bench.Decode):
    """Time one more token of every sequence after a filled cache, and report the cache's bytes.

    Ratios are the baseline's time over the arm's: above 1 the arm is faster.
    """


@dataclass(kw_only=True)
class Op(_Bench, bench.Op):
    """Time one layer's attention without projections: frozen heads alone, and the mixed layer.

    Ratios are the baseline's time over the arm's: above 1 the arm is faster.
    """


COMMANDS: dict[str, type[_Bench]] = {"update": Update, "prefill": Prefill, "decode": Decode, "op": Op}


def parse_words(words: Sequence[str]) -> _Bench:
    """Return the benchmark's command."""
    if words and words[0] in COMMANDS:
        kind = COMMANDS[words[0]]
        return parse(kind, words[1:], prog=f"saf bench {words[0]}", first=FIRST)
    return parse(Update | Prefill | Decode | Op, words, prog="saf bench")
