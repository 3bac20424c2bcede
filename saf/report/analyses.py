"""Tables of what `saf analyze` writes, beside the paper's."""

from collections.abc import Callable, Mapping
from typing import Any

from saf.report import head_tables, pattern_tables
from saf.report.cells import Analysis

Record = Mapping[str, Any]
_KINDS: dict[str, Callable[[Record], Analysis]] = {
    "one-head": head_tables.one_head,
    "joint-cost": head_tables.joint_cost,
    "partial-spearman": head_tables.partial_spearman,
    "profiles": pattern_tables.profiles,
    "geometry": pattern_tables.geometry,
    "stability": pattern_tables.stability,
    "fits": pattern_tables.fits,
    "distributions": pattern_tables.distributions,
}


def is_analysis(record: Record) -> bool:
    """Return whether a record is an analysis that has tables here."""
    return record.get("kind") in _KINDS


def analysis_of(record: Record) -> Analysis | None:
    """Return the tables of an analysis; None for a kind that has none of its own."""
    render = _KINDS.get(str(record.get("kind")))
    return render(record) if render else None
