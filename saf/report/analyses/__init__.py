"""Figures of what `saf analyze` writes: one static SVG for each kind of record."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from saf.errors import InputError
from saf.records.files import to_json, write_atomically
from saf.report.analyses import heads, patterns, tasks

Record = Mapping[str, Any]

FIGURES: dict[str, Callable[[Record], str]] = {
    "one-head": heads.one_head,
    "one-head-partial": heads.one_head,
    "joint-cost": heads.joint_cost,
    "partial-spearman": heads.partial_spearman,
    "profiles": patterns.profiles,
    "stability": patterns.stability,
    "recovery": patterns.recovery,
    "storage": patterns.storage,
    "geometry": patterns.geometry,
    "fits": patterns.fits,
    "distributions": patterns.distributions,
    "zero-shot": tasks.zero_shot,
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
