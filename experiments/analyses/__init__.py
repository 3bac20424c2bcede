"""`ANALYSES` lists the analyses of heads, selections and patterns: `python -m experiments.analyses NAME --help`."""

from collections.abc import Sequence
from typing import Any

from experiments.analyses.common import Analysis
from experiments.analyses.costs import JointCost, OneHead, PartialSpearman
from experiments.analyses.distributions import Distributions
from experiments.analyses.patterns import Geometry, Storage
from experiments.analyses.recovery import Recovery
from experiments.analyses.selections import Profiles, Stability
from experiments.analyses.zero_shot import ZeroShot
from experiments.figures import svg
from experiments.records import Record
from saf.records.files import to_json

ANALYSES: dict[str, type[Analysis]] = {
    each.kind: each
    for each in (
        OneHead, JointCost, PartialSpearman, Profiles, Stability,
        Recovery, Storage, Geometry, ZeroShot, Distributions,
    )
}  # fmt: skip
"""Analyses by their name in commands and records."""


def analysis_figure(records: Sequence[Record]) -> str | None:
    """Return the figure of a record, or of the records of several seeds, as SVG; None for an analysis without one."""
    analysis: Any = ANALYSES.get(records[0]["kind"], Analysis)
    return None if analysis.draw is Analysis.draw else svg(lambda: analysis.draw(to_json(records)))
