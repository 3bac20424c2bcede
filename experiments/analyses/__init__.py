"""Analyses of heads, selections and patterns, a file each: `python -m experiments.analyses NAME --help`.

Each module has `Settings` (a dataclass), `measure(settings) -> record` and `tables(record) -> list[Part]`;
some have `figure(records) -> matplotlib Figure` of one record or of several seeds'. Both take records as JSON has them.
"""

from collections.abc import Sequence
from typing import Any

from experiments.analyses import (
    distributions,
    geometry,
    joint_cost,
    one_head,
    partial_spearman,
    profiles,
    recovery,
    stability,
    storage,
    zero_shot,
)
from experiments.figures import svg
from experiments.records import Record
from saf.records.files import to_json

_MODULES = (one_head, joint_cost, partial_spearman, profiles, stability, recovery, storage, geometry, zero_shot)
ANALYSES: dict[str, Any] = {
    module.__name__.rpartition(".")[2].replace("_", "-"): module for module in (*_MODULES, distributions)
}
"""Modules by the name that the command line and the records have for them."""
FIGURES = ("one-head", "profiles", "stability", "recovery", "zero-shot", "distributions")
"""The analyses whose records are drawn."""


def analysis_figure(records: Sequence[Record]) -> str | None:
    """Return the figure of a record, or of the records of several seeds, as SVG; None for an analysis without one."""
    if (kind := records[0]["kind"]) not in FIGURES:
        return None
    return svg(lambda: ANALYSES[kind].figure(to_json(records)))
