"""A recipe: the rows, metrics, measurements and figures of one of the paper's tables, as data.

A recipe is a module of `experiments.recipes` with a RECIPE. It names arms of `experiments.arms`; it does not say how
they are run.
"""

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Literal

from experiments import recipes
from experiments.arms import ARMS
from experiments.measurements import Measurement
from experiments.paper import NUMBERED, Source
from saf.errors import InputError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a table: an arm, and the arms that its numbers are compared with, each in the same seed."""

    arm: str
    """NAME, or NAME@0 for the first report that its run made before the end."""
    label: str
    reference: str | None = None
    """The arm that its change is from."""
    against: str | None = None
    """The arm that its difference is from, where the paper has one."""
    companions: Mapping[str, str] = field(default_factory=dict)
    """Arms that complete its numbers: at matched "tokens", on the "raw" clock, and the ordinary "exchange" arm, which
    has more tokens."""
    first_seed: bool = False
    """Whether it is of the first seed alone."""
    paper: Mapping[str, str] = field(default_factory=dict)
    """The paper's numbers by metric."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Numbers of a table as lines: by panel, line and tick, the arm and metric of each."""

    name: str
    title: str
    across: str
    panels: Mapping[str, Mapping[str, Mapping[str, tuple[str, str]]]]
    alike: bool = True
    """Whether all panels have one vertical axis."""
    joined: bool = True
    """Whether ticks are steps of one quantity, which a line joins."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One of the paper's tables or figures."""

    title: str
    source: Source | None = None
    """Where the paper has its numbers; None for a question of ours."""
    rows: tuple[Row, ...] = ()
    metrics: tuple[str, ...] = ()
    """Names in `experiments.tables.METRICS`; without any, arms are trained to be measured."""
    headline: tuple[str, ...] = ()
    """Those that answer the question, in a table of their own before all of them."""
    trains: tuple[str, ...] = ()
    """Arms that are run and have no row."""
    measurements: tuple[Measurement, ...] = ()
    figures: tuple[Figure, ...] = ()
    also: tuple[str, ...] = ()
    """Labels of further tables and figures of the paper that it answers."""
    notes: tuple[str, ...] = ()
    seeds: int | None = None
    """How many of the scale's seeds are run where the paper has as many; None is all."""
    intervals: Literal["error", "t"] = "error"
    """What stands beside a mean over seeds: its standard error, or its 95% interval by Student's t."""
    smoke: tuple[str, ...] | None = None
    """Arms of the smoke scale; None is all."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The paper's labels of what it shows."""
        return (*((self.source.label,) if self.source else ()), *self.also)

    def arms(self, scale: str) -> tuple[str, ...]:
        """Return the arms that are run at a scale, without those that they need."""
        named = [name.partition("@")[0] for row in self.rows for name in (row.arm, row.reference, row.against) if name]
        named += [name for row in self.rows for name in row.companions.values()]
        named += [*self.trains, *(name for each in self.measurements for name in each.arms(scale))]
        if scale == "smoke" and self.smoke is not None:
            named = list(self.smoke)
        return tuple(dict.fromkeys(named))


def names() -> list[str]:
    """Return the names of all recipes."""
    return sorted(module.name for module in pkgutil.iter_modules(recipes.__path__))


def answering(word: str) -> list[str]:
    """Return the recipes that a word names: its name, the paper's label of what it shows, or a number as in table-8."""
    labels = {label for label, number in NUMBERED.items() if word in (label, number.lower().replace(" ", "-"))}
    if not labels:
        return [word]
    found = [name for name in names() if labels & {*recipe(name).labels}]
    if not found:
        raise InputError(f"no recipe shows {word}; docs/recipes.md lists the paper's tables and figures")
    return found


def recipe(name: str) -> Recipe:
    """Return a recipe; raise InputError for a name that there is not, or for one of its arms that there is not."""
    if name not in names():
        raise InputError(f"there is no recipe {name!r}{did_you_mean(name, names()) or '; list them without a name'}")
    found = import_module(f"experiments.recipes.{name}").RECIPE
    assert isinstance(found, Recipe), name
    if unknown := [arm for arm in found.arms("paper") if arm not in ARMS]:
        raise InputError(f"recipe {name!r} names the arm {unknown[0]!r}, which is not in experiments/arms.py")
    return found
