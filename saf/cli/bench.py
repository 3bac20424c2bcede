"""`saf bench`: time a frozen model against an ordinary one, in pairs, on this device."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Any, Union

import tyro

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler prints its starts and stops; read when PyTorch loads

from saf import bench
from saf.cli.output import show
from saf.cli.parsing import parse
from saf.distributed import is_rank0, process_group
from saf.errors import UnsupportedError
from saf.report.benchmarks import tables

REFUSED = "refused: the machine is not quiet; end other work, measure more --pairs, or accept more with --tolerance"
VERSIONS = ("torch", "triton", "cuda", "cudnn")


@dataclass(kw_only=True)
class _Bench:
    """Settings that each benchmark's command adds to its own."""

    folder: tyro.conf.Positional[Path | None] = None
    """Time this checkpoint, run, or output of saf.save or save_pretrained with its own frozen heads, not --model."""
    out: Path | None = None
    """Write the record to this new JSON file."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> dict[str, Any]:
        kind = next(kind for kind in bench.KINDS.values() if isinstance(self, kind))
        settings = kind(**{field.name: getattr(self, field.name) for field in fields(kind)})
        if self.folder is not None:
            settings.model = str(self.folder)
        with process_group(settings.device):
            record = bench.measure(settings, out=self.out)
            refusals = [row["refused"] for row in record["rows"]]
            if is_rank0():
                notes = [REFUSED] * (0 < sum(refusals) < len(refusals))
                notes += [f"written to {self.out}"] * (self.out is not None)
                facts = record["provenance"] | record["provenance"]["versions"]
                machine = [f"{name} {facts[name]}" for name in (*VERSIONS, "driver") if facts.get(name)]
                show(record, ", ".join([facts["device"], *machine]), *tables(record), *notes, as_json=self.json)
        if not record["rows"] and not record["memory"]:
            reasons = "; ".join(each["why"] for each in record["left_out"])
            raise UnsupportedError(f"nothing could be measured: {reasons}")
        if refusals and all(refusals):
            raise UnsupportedError(REFUSED)
        return record


COMMANDS = {
    name: make_dataclass(kind.__name__, [], bases=(_Bench, kind), namespace={"__doc__": kind.__doc__}, kw_only=True)
    for name, kind in bench.KINDS.items()
}
Command: Any = Union[tuple(COMMANDS.values())]  # noqa: UP007 (made of a mapping)
_SHOWN = ("folder", "out", "json", "model", "points", "rates", "backends", "kernels", "pairs", "device", "graphs")
FIRST = dict.fromkeys(COMMANDS.values(), (*_SHOWN, "memory", "seconds", "pruned", "tolerance"))
"""The settings that `--help` shows."""


def parse_words(words: Sequence[str]) -> _Bench:
    """Parse the benchmark's command; without its name the help lists the benchmarks."""
    if words and words[0] in COMMANDS:
        return parse(COMMANDS[words[0]], words[1:], prog=f"saf bench {words[0]}", first=FIRST)
    words = ["--help" if word == "--help-all" else word for word in words or ["--help"]]
    return tyro.cli(Command, args=words, prog="saf bench", description="Time a frozen model against an ordinary one.")
