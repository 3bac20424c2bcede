"""Run one analysis: `python -m experiments.analyses NAME ... [--out FILE.json] [--figure FILE.svg] [--json]`."""

import sys
from collections.abc import Sequence
from typing import Any

import tyro

from experiments.analyses import ANALYSES, Analysis, analysis_figure
from saf.cli.output import show
from saf.errors import InputError, SafError
from saf.records.files import to_json, write_atomically, write_json


def run(analysis: Analysis) -> None:
    """Measure, write the record and its figure, and print the tables or the record."""
    out, figure = analysis.out, analysis.figure
    if out is not None and out.exists():
        raise InputError(f"{out} exists already; remove it, or write to another file")
    if figure is not None and (figure.suffix != ".svg" or type(analysis).draw is Analysis.draw):
        raise InputError(f"--figure must be an .svg file of an analysis that draws one, got {figure.name}")
    record = to_json(analysis.measure())
    if out is not None:
        write_json(out, record)
    if figure is not None:
        write_atomically(figure, (analysis_figure([record]) or "").encode())
    show(record, *analysis.tables(record), as_json=analysis.json)


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
