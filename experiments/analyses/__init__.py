"""Analyses of heads, selections and patterns, a file each: settings, `measure`, `tables` and `figure`.

`python -m experiments.analyses NAME --help` lists the settings of one.
"""

import io
import re
from collections.abc import Mapping
from typing import Any

import matplotlib as mpl

from experiments.analyses import (
    distributions,
    fits,
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
from saf.records.files import to_json

ANALYSES: dict[str, Any] = {
    "one-head": one_head,
    "joint-cost": joint_cost,
    "partial-spearman": partial_spearman,
    "profiles": profiles,
    "stability": stability,
    "recovery": recovery,
    "storage": storage,
    "geometry": geometry,
    "fits": fits,
    "zero-shot": zero_shot,
    "distributions": distributions,
}
"""Modules by the name that the command line and the records have for them.

Each has `Settings` (a dataclass), `measure(settings) -> record`, `tables(record) -> list[str | DataFrame]` and
`figure(record) -> matplotlib Figure`; the last two take a record as JSON has it.
"""
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "saf",  # the same picture has the same ids
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def svg(record: Mapping[str, Any]) -> str:
    """Return the figure of a record as SVG."""
    text = io.StringIO()
    with mpl.rc_context(_STYLE):
        drawn = ANALYSES[record["kind"]].figure(to_json(record))
        drawn.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    # Without a file's declarations, so that a page can hold it; a hundredth of a point is fine enough.
    return re.sub(r"(\.\d\d)\d+", r"\1", text.getvalue()[text.getvalue().index("<svg") :])
