"""Run one analysis: `python -m experiments.analyses NAME ... [--out FILE.json] [--figure FILE.svg] [--json]`."""

import sys
from collections.abc import Sequence

import tyro

from experiments.analyses import ANALYSES, FIGURES, analysis_figure
from experiments.analyses.common import Output
from saf.cli.output import show
from saf.errors import InputError, SafError
from saf.records.files import to_json, write_atomically, write_json


def run(name: str, settings: Output) -> None:
    """Measure, write the record and its figure, and print the tables or the record."""
    if settings.out is not None and settings.out.exists():
        raise InputError(f"{settings.out} exists already; remove it, or write to another file")
    if settings.figure is not None and (settings.figure.suffix != ".svg" or name not in FIGURES):
        raise InputError(f"--figure must be an .svg file of {', '.join(FIGURES)}, got {settings.figure.name}")
    record = to_json(ANALYSES[name].measure(settings))
    if record is None:
        return
    if settings.out is not None:
        write_json(settings.out, record)
    if settings.figure is not None:
        write_atomically(settings.figure, (analysis_figure([record]) or "").encode())
    show(record, *ANALYSES[name].tables(record), as_json=settings.json)


def main(words: Sequence[str] | None = None) -> int:
    """Run the analysis that the words name; return 0, or 2 for input that cannot be used."""
    commands = {name: each.Settings for name, each in ANALYSES.items()}
    settings = tyro.extras.subcommand_cli_from_dict(commands, prog="python -m experiments.analyses", args=words)
    try:
        run(next(name for name, kind in commands.items() if type(settings) is kind), settings)
    except SafError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
