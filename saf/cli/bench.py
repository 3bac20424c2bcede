"""`saf bench`: time a frozen model against an ordinary one, in pairs, on this device."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import cleandoc
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import tyro

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler prints its starts and stops; read when PyTorch loads

from saf import bench
from saf.cli.output import show
from saf.cli.parsing import parse
from saf.distributed import is_rank0, process_group
from saf.errors import UnsupportedError, check_name
from saf.report.benchmarks import tables

USAGE = """usage: saf bench NAME [FOLDER] [OPTIONS]

Time a frozen model against an ordinary one in pairs, on this device: a preset
with random weights, or the model of FOLDER.

{benchmarks}

`saf bench NAME --help` shows the settings."""
REFUSED = "refused: the machine is not quiet; end other work, measure more --pairs, or accept more with --tolerance"
VERSIONS = ("torch", "triton", "cuda", "cudnn", "driver")
FIRST = (
    "model", "points", "rates", "backends", "kernels", "pairs", "device", "graphs",
    "memory", "seconds", "pruned", "tolerance",
)  # fmt: skip
"""The settings that `--help` shows, without those of whole models for op."""


@dataclass(kw_only=True)
class Command:
    """One benchmark of `saf.bench`, its settings as flags."""

    settings: Annotated[bench.Speed, tyro.conf.OmitArgPrefixes]
    """These settings say what is timed, and how."""
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
    name, *rest = words or ["--help"]
    if (kind := bench.KINDS.get(name)) is not None:
        default = Command(settings=kind())  # tyro then has the settings of this benchmark, not of the base class
        first = {kind: [each for each in FIRST if name != "op" or each not in ("memory", "pruned")]}
        return parse(Command, rest, prog=f"saf bench {name}", default=default, first=first, doc=kind.__doc__)
    if name not in ("-h", "--help", "--help-all"):
        check_name("the benchmark", name, bench.KINDS)
    lines = []
    for name, kind in bench.KINDS.items():
        summary = " ".join(cleandoc(str(kind.__doc__)).partition("\n\n")[0].split())
        lines.append(fill(f"• {name:<9}{summary}", 80, initial_indent="  ", subsequent_indent=" " * 13))
    print(USAGE.format(benchmarks="\n".join(lines)))
    raise SystemExit
