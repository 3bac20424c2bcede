"""Run one analysis: `python -m experiments.analyses NAME ... [--out FILE.json]`."""

import sys
from collections.abc import Sequence
from typing import Any

import tyro

from experiments.analyses import ANALYSES, Analysis
from saf.cli.output import show
from saf.errors import InputError, SafError
from saf.records.files import to_json, write_json


def run(analysis: Analysis) -> None:
    """Measure, write the record, and print its tables."""
    if analysis.out is not None and analysis.out.exists():
        raise InputError(f"{analysis.out} exists already; remove it, or write to another file")
    record = to_json(analysis.measure())
    if analysis.out is not None:
        write_json(analysis.out, record)
    show(record, *analysis.tables(record), as_json=False)


def main(words: Sequence[str] | None = None) -> int:
    """Run the analysis that the words name; return 0, or 2 for input that cannot be used."""
    commands: Any = ANALYSES
    try:
        run(tyro.extras.subcommand_cli_from_dict(commands, prog="python -m experiments.analyses", args=words))
    except SafError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
