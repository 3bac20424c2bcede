"""Analyses of heads, selections and patterns: measurements around freezing that decide nothing by themselves.

Each is one file: settings, the measurement that makes a record of them, and the tables of that record.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saf.analysis import (
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
from saf.analysis.model import Record
from saf.records.result import read_result
from saf.records.table import Part


@dataclass(frozen=True)
class Analysis:
    """Hold the three parts of an analysis."""

    settings: type[Any]
    """A dataclass, of which the command line makes its flags."""
    measure: Callable[..., dict[str, Any]]
    """Takes the settings, and a `Watch` as `watch`; returns the record."""
    tables: Callable[[Record], list[Part]]
    """Takes a record as JSON has it; returns its conditions, tables and notes, beside the paper's numbers."""
    lacks: Callable[[Record], bool] | None = None
    """Takes a record; tells whether it was cut off. None of an analysis that begins anew whatever was kept of it."""

    def cut_off(self, path: Path) -> Record | None:
        """Return the record of a file that an earlier command began and this analysis goes on with; None for another.

        Raises InputError where the file cannot be read.
        """
        if self.lacks is None:
            return None
        record = read_result(path)
        return record if ANALYSES.get(record["kind"]) is self and self.lacks(record) else None


ANALYSES: dict[str, Analysis] = {
    "one-head": Analysis(one_head.OneHead, one_head.measure, one_head.tables),
    "joint-cost": Analysis(joint_cost.JointCost, joint_cost.measure, joint_cost.tables),
    "partial-spearman": Analysis(partial_spearman.PartialSpearman, partial_spearman.measure, partial_spearman.tables),
    "profiles": Analysis(profiles.Profiles, profiles.measure, profiles.tables),
    "stability": Analysis(stability.Stability, stability.measure, stability.tables),
    "recovery": Analysis(recovery.Recovery, recovery.measure, recovery.tables),
    "storage": Analysis(storage.Storage, storage.measure, storage.tables),
    "geometry": Analysis(geometry.Geometry, geometry.measure, geometry.tables),
    "fits": Analysis(fits.Fits, fits.measure, fits.tables),
    "zero-shot": Analysis(zero_shot.ZeroShot, zero_shot.measure, zero_shot.tables, zero_shot.lacks),
    "distributions": Analysis(distributions.Distributions, distributions.measure, distributions.tables),
}
"""By the name that the command line and the records have for it."""
