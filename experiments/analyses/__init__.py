"""Analyses of heads, selections and patterns, a file each: `python -m experiments.analyses NAME --help`.

Each module has `Settings` (a dataclass), `measure(settings) -> record` and `tables(record) -> list[Part]`;
some have `figure(records) -> matplotlib Figure` of one record or of several seeds'. Both take records as JSON has them.
"""

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl

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
from experiments.analyses.common import Record
from saf.records.files import to_json

_MODULES = (one_head, joint_cost, partial_spearman, profiles, stability, recovery, storage, geometry, zero_shot)
ANALYSES: dict[str, Any] = {
    module.__name__.rpartition(".")[2].replace("_", "-"): module for module in (*_MODULES, distributions)
}
"""Modules by the name that the command line and the records have for them."""
FIGURES = ("one-head", "profiles", "stability", "recovery", "zero-shot", "distributions")
"""The analyses whose records are drawn."""
_STYLE: dict[Any, Any] = {
    **{"svg.fonttype": "none", "svg.hashsalt": "saf"},  # the same picture has the same ids
    **{"font.size": 8, "axes.titlesize": 8, "axes.spines.top": False, "axes.spines.right": False},
}


def svg(records: Sequence[Record]) -> str:
    """Return the figure of a record, or of the records of several seeds, as SVG."""
    file = io.StringIO()
    with mpl.rc_context(_STYLE):
        figure = ANALYSES[records[0]["kind"]].figure(to_json(records))
        for axis in figure.axes:
            axis.minorticks_off()  # they take a third of the time
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    # Without a file's declarations, so that a page can hold it; a hundredth of a point is fine enough.
    text = file.getvalue()
    return re.sub(r"(\.\d\d)\d+", r"\1", text[text.index("<svg") :])
