"""`saf bench` times a frozen model against an ordinary one, in pairs, on this device."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import tyro

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler prints its starts and stops; read when PyTorch loads

from saf import bench
from saf.cli.output import show
from saf.cli.parsing import parse
from saf.distributed import is_rank0, process_group
from saf.errors import UnsupportedError, check_name
from saf.report.benchmarks import tables

REFUSED = "refused: the machine is not quiet; end other work, measure more --pairs, or accept more with --tolerance"
VERSIONS = ("torch", "triton", "cuda", "cudnn", "driver")
_OF_ALL = ("model", "points", "rates", "backends", "kernels", "pairs", "device", "graphs", "seconds", "tolerance")
HELP_FIELDS = dict.fromkeys(get_args(bench.Benchmark), (*_OF_ALL, "memory", "pruned")) | {bench.Op: _OF_ALL}
"""The settings that `--help` shows."""


@dataclass(kw_only=True)
class Command:
    """Time a frozen model against an ordinary one in pairs, on this device.

    A preset with random weights, or the model of a folder:

      $ saf bench update
      $ saf bench decode FOLDER

    `saf bench NAME --help` shows the settings.
    """

    settings: Annotated[bench.Benchmark, tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes]
    """One of these benchmarks is measured."""
    folder: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER]")] = None
    """Time this folder's model with its own frozen heads, in place of --model; op times presets alone."""
    out: Path | None = None
    """Write the record to this new JSON file."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> dict[str, Any]:
        settings = self.settings if self.folder is None else replace(self.settings, model=str(self.folder))
        with process_group(settings.device):
            record = bench.measure(settings, out=self.out)
            refusals = [row["refused"] for row in record["rows"]]
            if is_rank0():
                notes = []
                if any(refusals) and not all(refusals):  # where all are, the error below says so
                    notes.append(REFUSED)
                if self.out is not None:
                    notes.append(f"written to {self.out}")
                facts = record["provenance"] | record["provenance"]["versions"]
                machine = [f"{name} {facts[name]}" for name in VERSIONS if facts.get(name)]
                show(record, ", ".join([facts["device"], *machine]), *tables(record), *notes, as_json=self.json)
        if not record["rows"] and not record["memory"]:
            reasons = "; ".join(each["why"] for each in record["left_out"])
            raise UnsupportedError(f"nothing could be measured: {reasons}")
        if refusals and all(refusals):
            raise UnsupportedError(REFUSED)
        return record


def parse_words(words: Sequence[str]) -> Command:
    """Parse the benchmark's command; without its name the help lists the benchmarks."""
    named = set(words) & set(bench.KINDS)
    if words and not named and not words[0].startswith("-"):  # which tyro would take for FOLDER
        check_name("the benchmark", words[0], bench.KINDS)
    help_fields = HELP_FIELDS if named else None
    return parse(Command, words or ["--help"], prog="saf bench", help_fields=help_fields, choices=bench.KINDS)
