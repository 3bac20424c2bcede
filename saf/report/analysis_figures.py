"""Figures of what `saf analyze` writes: one static SVG for each kind of record."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from saf.errors import InputError
from saf.records.files import to_json, write_atomically
from saf.report.comparison_figures import fits, geometry, joint_cost, partial_spearman, stability
from saf.report.distribution_figure import distributions
from saf.report.one_head_figure import one_head
from saf.report.profile_figure import profiles

Record = Mapping[str, Any]

FIGURES: dict[str, Callable[[Record], str]] = {
    "one-head": one_head,
    "one-head-partial": one_head,
    "joint-cost": joint_cost,
    "partial-spearman": partial_spearman,
    "profiles": profiles,
    "stability": stability,
    "geometry": geometry,
    "fits": fits,
    "distributions": distributions,
}


def analysis_figure(record: Record) -> str:
    """Return the SVG of a record of an analysis; raise InputError for another kind."""
    name = str(record.get("kind"))
    if name not in FIGURES:
        raise InputError(
            f"expected a record of `saf analyze` ({', '.join(FIGURES)}); got kind {record.get('kind')!r}, schema "
            f"{record.get('schema')!r}"
        )
    # A record fresh from an analysis holds tensors and NaN; one from a file lists and null.
    return FIGURES[name](to_json(record))


def check_figure(path: Path) -> None:
    """Raise InputError unless the name ends in .svg."""
    if path.suffix != ".svg":
        raise InputError(f"the figure is an SVG; expected a name ending in .svg, got {path.name}")


def write_figure(record: Record, path: Path) -> Path:
    """Draw a record into an .svg file; raise InputError for another name or a record without a figure."""
    check_figure(path)
    return write_atomically(path, analysis_figure(record).encode())
