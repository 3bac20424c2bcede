"""Benchmarks for developers, on the paired protocol of `saf.bench`: `python -m benchmarks.NAME`, from a checkout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from saf.cli.output import show
from saf.distributed import process_group
from saf.report.benchmarks import tables


def command(
    kind: type,
    measure: Callable[..., dict[str, Any]],
    *,
    prog: str,
    exit_code: Callable[[dict[str, Any]], int] = lambda record: 0,
) -> Callable[..., int]:
    """Return a script's `main`: it parses settings of a dataclass, measures, and prints the tables of the record."""

    def run(settings: Any, out: Path | None = None, json: bool = False) -> int:
        with process_group(settings.device):
            record = measure(settings, out=out)
        show(record, *tables(record), as_json=json)
        return exit_code(record)

    # tyro reads flags and help of a function from these.
    run.__annotations__["settings"] = tyro.conf.OmitArgPrefixes[kind]  # type: ignore[valid-type]
    run.__doc__ = kind.__doc__
    return lambda words=None: tyro.cli(run, args=words, prog=f"python -m benchmarks.{prog}")
