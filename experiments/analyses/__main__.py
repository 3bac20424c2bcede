"""Run one analysis: `python -m experiments.analyses NAME ... [--out FILE.json] [--figure FILE.svg] [--json]`."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from experiments.analyses import ANALYSES, svg
from experiments.analyses.common import Output, save, shown
from experiments.analyses.zero_shot import unfinished
from saf.errors import InputError, SafError
from saf.records.files import to_json, write_atomically
from saf.records.result import read_result


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Draw the figure of a record that an analysis wrote."""

    record: tyro.conf.Positional[Path]
    """JSON file that --out named."""
    figure: tyro.conf.Positional[Path]
    """SVG file to write."""


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Write the figure of a record as an SVG file."""
    if record["kind"] not in ANALYSES:
        raise InputError(f"the record must be of an analysis, got {record['kind']!r}")
    write_atomically(path, svg(record).encode())


def run(name: str, settings: Output) -> None:
    """Measure, write the record and its figure, and print the tables or the record."""
    if settings.out is not None and settings.out.exists() and (name != "zero-shot" or unfinished(settings.out) is None):
        raise InputError(f"{settings.out} exists already; remove it, or write to another file")
    if settings.figure is not None and settings.figure.suffix != ".svg":
        raise InputError(f"--figure must end in .svg, got {settings.figure.name}")
    record = ANALYSES[name].measure(settings)
    save(record, settings)
    if settings.figure is not None:
        draw(record, settings.figure)
    plain = to_json(record)
    print(json.dumps(plain, indent=2) if settings.json else shown(ANALYSES[name].tables(plain)))


def main(words: Sequence[str] | None = None) -> int:
    """Run the analysis that the words name; return 0, or 2 for input that cannot be used."""
    words = sys.argv[1:] if words is None else words
    commands = {"draw": Draw} | {name: each.Settings for name, each in ANALYSES.items()}
    settings = tyro.extras.subcommand_cli_from_dict(commands, prog="python -m experiments.analyses", args=words)
    try:
        if isinstance(settings, Draw):
            draw(read_result(settings.record), settings.figure)
        else:
            run(next(name for name, each in ANALYSES.items() if type(settings) is each.Settings), settings)
    except SafError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
