"""`ANALYSES` lists the analyses of heads, selections and patterns; `python -m experiments.analyses NAME` runs one."""

import sys
from collections.abc import Sequence
from typing import Any

import tyro

from experiments.analyses.common import Analysis
from experiments.analyses.costs import JointCost, OneHead, PartialSpearman
from experiments.analyses.distributions import Distributions
from experiments.analyses.patterns import Geometry, Storage
from experiments.analyses.recovery import Recovery
from experiments.analyses.selections import Profiles, Stability
from experiments.analyses.zero_shot import ZeroShot
from experiments.figures import svg
from experiments.records import Record
from saf.cli.output import show
from saf.errors import InputError, SafError
from saf.records.files import to_json, write_json

ANALYSES: dict[str, type[Analysis]] = {
    each.kind: each
    for each in (
        OneHead, JointCost, PartialSpearman, Profiles, Stability,
        Recovery, Storage, Geometry, ZeroShot, Distributions,
    )
}  # fmt: skip
"""Analyses by their name in commands and records."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the analysis that the words name, write its record and print its tables; return 2 for unusable input."""
    commands: Any = ANALYSES
    try:
        analysis = tyro.extras.subcommand_cli_from_dict(commands, prog="python -m experiments.analyses", args=words)
        if analysis.out is not None and analysis.out.exists():
            raise InputError(f"{analysis.out} exists already; remove it, or write to another file")
        record = to_json(analysis.measure())
    except SafError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if analysis.out is not None:
        write_json(analysis.out, record)
    show(record, *analysis.tables(record), as_json=False)
    return 0


def analysis_figure(records: Sequence[Record]) -> str | None:
    """Return the figure of a record, or of the records of several seeds, as SVG; None for an analysis without one."""
    analysis: Any = ANALYSES.get(records[0]["kind"], Analysis)
    return None if analysis.draw is Analysis.draw else svg(lambda: analysis.draw(to_json(records)))
