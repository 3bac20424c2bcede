"""What a recipe is: the arms and measurements of one table or figure, as data.

A recipe is a module of the folder `recipes` with a `RECIPE`. It says nothing of how runs are made:
`saf.experiments.scales` says how large they are, `saf.experiments.plan` turns arms into runs of `saf pretrain` and
`saf finetune`, `saf.experiments.render` makes their table.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import saf
from saf.errors import InputError, did_you_mean
from saf.experiments.figure import Figure
from saf.experiments.measurement import Measurement, RecordOf
from saf.experiments.speeds import OWN_CLOCK
from saf.freezing.config import BUDGETS
from saf.records.paper import Source

Flags = Mapping[str, Any]
"""Settings of a run by the names of its command's flags, without dashes: {"freeze.rate": 0.25, "batch_size": 8}."""
Axis = Literal["pretraining", "finetuning", "chain", "none"]
"""Which seed of an arm varies; that of the other stage is the plan's first, so that the two are never pooled.

Of a chain both vary together: each seed is a whole repetition, and seeds can be run by commands of their own.
"""


MOST_NAMES = 8
"""Arms that a message names; of more it says how many there are."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Describe one row of a table: a run for each seed."""

    name: str
    """By which other arms and `--arms` name it."""
    settings: Flags = field(default_factory=dict)
    """What it changes: of the scale's settings, or of its parent's."""
    scaled: Mapping[str, Flags] = field(default_factory=dict)
    """What it changes further at single scales, by their names."""
    parent: str | None = None
    """The arm whose run it goes on from; None starts from initialisation."""
    at: float | None = None
    """The share of the parent's updates after which it does; None is half of them, and the end to finetune."""
    task: str | None = None
    """What it finetunes its parent on; None pretrains on text."""
    like: str | None = None
    """The finetuned ordinary arm whose examples, epochs and settings it takes over; None chooses its own."""
    axis: Axis = "pretraining"
    """Which seed varies: that of pretraining; that of finetuning, from the parent of the plan's first seed; both, of
    the whole chain; or none, a run of the first seed alone."""
    report: int | None = None
    """Which of the reports that its run made before the end its row is of, counted from 0; None is the end."""
    row: bool = True
    """Whether the table shows it; an arm that others go on from alone needs none."""
    more: float = 0.0
    """Updates that it adds to its parent's whole schedule, as a share of them; its learning rate begins anew there.
    Without a parent, those that it adds to the scale's."""
    match: str | None = None
    """The arm whose time it gets, from its parent on; None trains as many updates as the scale says."""
    reseed: int = 0
    """What is added to the seed from its parent on, so that it goes through the data in another order."""
    heads: str | None = None
    """The arm whose heads it freezes or prunes, exactly those; None lets its settings choose."""
    context: int = 4_096
    """Tokens of context in the paper; other scales have their own for it."""
    reference: str | None = "ordinary"
    """The arm, of the same seed, that its perplexity is compared with; None for one that is only compared with."""
    against: str | None = None
    """The arm that its paired difference is taken from, where the paper gives one."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Other arms that its row is made with, by what they are to it: "raw", the same on the raw clock; "tokens", the
    same at matched tokens; "exchange", the ordinary arm with more tokens. Each has its own reference; `--arms` leaves
    them out unless it names them."""
    paper: Mapping[str, str] = field(default_factory=dict)
    """The paper's numbers, by the names of columns."""
    smoke: bool = True
    """Whether it is run at the smoke scale, which has two values of each axis."""

    @property
    def others(self) -> tuple[str, ...]:
        """Return the arms that its numbers are made with."""
        return tuple(filter(None, (self.reference, self.against, *self.beside.values())))

    @property
    def needs(self) -> dict[str, str]:
        """Return the arms whose runs must have ended before its own begins, by what they are to it, in words."""
        named = {"goes on from": self.parent, "gets the time of": self.match}
        named |= {"has the heads of": self.heads, "is finetuned like": self.like}
        return {what: other for what, other in named.items() if other is not None}

    def obstacle(self) -> str | None:
        """Return what contradicts itself in it; None where nothing does."""
        if (self.match or self.task) and self.parent is None:
            return f"{'gets the time of' if self.match else 'finetunes'} a parent, and names none"
        if self.task and (self.match or self.at is not None or self.more):
            return "finetunes its parent from its end; leave match, at and more out"
        if not self.task and (self.like or self.axis in ("finetuning", "chain")):
            return "is not finetuned; name its task, or leave like and axis out"
        if self.heads and (said := [f"freeze.{name}" for name in BUDGETS if f"freeze.{name}" in self.settings]):
            return f"has the heads of {self.heads!r}; leave {' and '.join(said)} out"
        return None

    @property
    def on_own_clock(self) -> bool:
        """Return whether it says that its own seconds are charged as they are."""
        own = OWN_CLOCK.items() <= self.settings.items()
        return self.match is not None and own and "match_speed" not in self.settings


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Describe one table or figure: its arms, in the order of its rows, what is shown of each, and what is measured."""

    title: str
    source: Source
    """The paper's table, and the conditions of its numbers."""
    arms: tuple[Arm, ...] = ()
    columns: tuple[str, ...] = ()
    """Names in `saf.experiments.columns.COLUMNS`; without any, arms are only trained to be measured."""
    headline: tuple[str, ...] = ()
    """Those of them that hold what is asked, shown first in a table of their own; none where all of them do."""
    measurements: tuple[Measurement, ...] = ()
    """Benchmarks and analyses, those that others read before them."""
    figures: tuple[Figure, ...] = ()
    """Numbers of the table as lines, beside the figure of its first signed column that every page has."""
    also: tuple[str, ...] = ()
    """Labels of the paper's further tables, figures and sections that it answers."""
    notes: tuple[str, ...] = ()
    """Sentences below the table."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Arms that try an option of a run, and how it is asked for: recommended where their difference over three seeds or
    more lies below zero by more than its 95% interval."""
    seeds: int | None = None
    """How many seeds the paper's numbers are of: the first ones of the scale are taken where none are named; None is
    all of them."""

    def __post_init__(self):
        """Raise InputError for two arms of one name, for an arm that names one that is not there, or such a column."""
        if unknown := [name for name in self.headline if name not in self.columns]:
            raise InputError(f"{self.title}: the headline has {unknown[0]!r}, which is no column of the table")
        before: set[str] = set()
        names = [arm.name for arm in self.arms]
        for arm in self.arms:
            if arm.name in before:
                raise InputError(f"{self.title}: two arms are called {arm.name!r}")
            for what, other in arm.needs.items():
                if other not in before:
                    raise InputError(f"{self.title}: arm {arm.name!r} {what} {other!r}, which is no arm before it")
            if problem := arm.obstacle():
                raise InputError(f"{self.title}: arm {arm.name!r} {problem}")
            for other in arm.others:
                if other not in names:
                    raise InputError(
                        f"{self.title}: arm {arm.name!r} is compared with {other!r}, which is no arm of it"
                    )
            before.add(arm.name)
        self._check_options(before)
        self._check_figures(before)
        self._check_measurements(before)

    def _check_options(self, arms: set[str]) -> None:
        """Raise InputError for an option that no arm tries, or that nothing judges."""
        if unknown := self.options.keys() - arms:
            raise InputError(f"{self.title}: the option of {min(unknown)!r} is that of no arm")
        if self.options and "difference" not in self.columns:
            raise InputError(f"{self.title}: options are judged by the difference, which is no column of the table")

    def _check_figures(self, arms: set[str]) -> None:
        """Raise InputError for a figure of a number that the table has not."""
        for figure in self.figures:
            for arm, column in figure.places:
                if arm not in arms or column not in self.columns:
                    raise InputError(
                        f"{self.title}: figure {figure.name!r} has {arm, column}, which is not in the table"
                    )

    def _check_measurements(self, arms: set[str]) -> None:
        """Raise InputError for a measurement of a name that is taken, or that reads what is not before it."""
        before: set[str] = set()
        for each in self.measurements:
            if each.name in arms | before:
                raise InputError(f"{self.title}: two arms or measurements are called {each.name!r}")
            read = {of.measurement for of in each.references("") if isinstance(of, RecordOf)}
            for name in (*(set(each.arms("")) - arms), *(read - before)):
                raise InputError(f"{self.title}: {each.name!r} reads {name!r}, which is nothing before it")
            before.add(each.name)

    def chosen(self, names: tuple[str, ...], *, smoke: bool) -> tuple[Arm, ...]:
        """Return the arms asked for with those that they go on from and are compared with; all of them without names.

        Raises:
            InputError: A name that no arm has, with the nearest ones.
        """
        by_name = {arm.name: arm for arm in self.arms}
        measured = {each.name for each in self.measurements}
        wanted = [name for name in names if name not in measured]
        wanted += [] if names else [arm.name for arm in self.arms if arm.smoke or not smoke]
        scale = "smoke" if smoke else ""
        wanted += [name for each in self.chosen_measurements(names, smoke=smoke) for name in each.arms(scale)]
        kept: set[str] = set()
        while wanted:
            name = wanted.pop()
            if name not in by_name:
                known = [*by_name, *sorted(measured)]
                listed = ", ".join(map(repr, known[:MOST_NAMES]))
                more = f" and {len(known) - MOST_NAMES} more, which --dry-run lists" if len(known) > MOST_NAMES else ""
                told = did_you_mean(name, known) or f"; there are {listed}{more}"
                raise InputError(f"there is no arm {name!r}{told}")
            if name not in kept:
                kept.add(name)
                arm = by_name[name]
                wanted += filter(None, (*arm.needs.values(), arm.reference, arm.against))
        return tuple(arm for arm in self.arms if arm.name in kept)

    def chosen_measurements(self, names: tuple[str, ...], *, smoke: bool) -> tuple[Measurement, ...]:
        """Return the measurements asked for with those that they read; all of them without names."""
        kept: set[str] = set()
        for each in reversed(self.measurements):
            if each.name in names or each.name in kept or (not names and (each.smoke or not smoke)):
                kept |= {each.name, *(of.measurement for of in each.references("") if isinstance(of, RecordOf))}
        return tuple(each for each in self.measurements if each.name in kept)


def recipes_folder() -> Path:
    """Return the folder of the recipes that come with the project: `recipes`, beside the package."""
    return Path(saf.__file__).resolve().parents[1] / "recipes"


def recipe_files(folder: Path | None = None) -> dict[str, Path]:
    """Return the files of all recipes of a folder, by their names; raise InputError where there are none."""
    folder = folder or recipes_folder()
    files = {path.stem: path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")}
    if not files:
        raise InputError(f"{folder} holds no recipes; they stand beside the package in a checkout, or name a folder")
    return files


def open_recipes(names: tuple[str, ...] = (), *, folder: Path | None = None) -> dict[str, Recipe]:
    """Return recipes by name, all of a folder's without `names`.

    Raises:
        InputError: There is no such folder or recipe (with the nearest names), or a file of it that is no recipe.
    """
    files = recipe_files(folder)
    for name in names:
        if name not in files:
            raise InputError(
                f"there is no recipe {name!r}{did_you_mean(name, files) or '; `saf run` lists those that there are'}"
            )
    return {name: _open(files[name]) for name in names or files}


def _open(path: Path) -> Recipe:
    """Run one module of recipes and return its RECIPE."""
    spec = importlib.util.spec_from_file_location(f"recipes.{path.stem}", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    recipe = getattr(module, "RECIPE", None)
    if not isinstance(recipe, Recipe):
        raise InputError(f"{path} is no recipe: it must set RECIPE to a saf.experiments.recipe.Recipe")
    return recipe
