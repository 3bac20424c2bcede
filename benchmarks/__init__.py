"""Benchmarks for developers, on the paired protocol of `saf.bench`: `python -m benchmarks.NAME`, from a checkout."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro

from saf.cli.output import show
from saf.distributed import process_group
from saf.report.benchmarks import tables


def run(
    kind: type, measure: Callable[..., dict[str, Any]], words: Sequence[str] | None, *, prog: str
) -> dict[str, Any]:
    """Parse settings of a dataclass, measure, print the tables of the record, and return it."""

    def command(settings: Any, out: Path | None = None, json: bool = False) -> dict[str, Any]:
        with process_group(getattr(settings, "device", "auto")):
            record = measure(settings, out=out)
        show(record, *tables(record), as_json=json)
        return record

    command.__annotations__["settings"] = tyro.conf.OmitArgPrefixes[kind]  # type: ignore[valid-type]
    command.__doc__ = kind.__doc__
    return tyro.cli(command, args=words, prog=f"python -m benchmarks.{prog}")
