"""What a recipe is: the rows, metrics, measurements and figures of one of the paper's tables, as data.

Modules of `experiments.recipes` contain the recipes, by subject. A recipe names arms of `experiments.arms`, which say
what is trained.
"""

import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from experiments import recipes
from experiments.arms import arms
from experiments.measurements import Measurement
from experiments.paper import NUMBERED, Source, lines
from experiments.scales import scale_named
from saf.errors import InputError, did_you_mean
from saf.records.result import read_result


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a table: an arm, and the arms that its numbers are compared with, each in the same seed."""

    arm: str
    """NAME, or NAME@0 for the first report of its run before the end."""
    label: str
    reference: str | None = None
    """The arm that its change of perplexity is measured from, mostly the ordinary one."""
    against: str | None = None
    """The arm whose change is subtracted from its own: for a pruned arm, for example, the frozen one."""
    tokens: str | None = None
    """The same arm at matched tokens."""
    measured_time: str | None = None
    """The same arm at its own measured time."""
    more_tokens: str | None = None
    """An ordinary arm that had more tokens."""
    first_seed: bool | str = False
    """Whether it shows the first seed alone; in the text of `rows` any word in this column means yes."""
    retired: bool | str = False
    """Whether its arm is no longer trained: the row shows committed records."""
    paper: Mapping[str, str] = field(default_factory=dict)
    """The paper's numbers by metric."""

    @property
    def companions(self) -> list[str]:
        """Arms without a row of their own, which its metrics read."""
        return [arm for arm in (self.tokens, self.measured_time, self.more_tokens) if arm]


COLUMNS = tuple(each.name for each in fields(Row) if each.name != "paper")


def rows(text: str, *more: str, **shared: Any) -> tuple[Row, ...]:
    """Parse the rows of a table: a header, then a line a row; "|" separates cells, and empty cells are left out.

    Columns are fields of a `Row`, and metrics, whose cells are the paper's numbers. `more` are further columns of the
    same rows; `shared` are cells of every row.
    """
    table = []
    for line in lines(text, *more):
        cells: dict[str, Any] = {"label": "", **shared, **line}
        own = {name: cells.pop(name) for name in COLUMNS if name in cells}
        table.append(Row(**own, paper=cells))  # the cells that are left are of metrics
    return tuple(table)


Curves = Mapping[str, Mapping[str, tuple[str, str]]]
"""Lines of a panel by name: for each tick, the arm and the metric of its point."""


def curves(ticks: Mapping[str, str], lines: Mapping[str, tuple[str, str]]) -> Curves:
    """Return the lines of a panel; in their arms and metrics "*" stands for each tick, which `ticks` has by label."""
    return {
        line: {label: (arm.replace("*", tick), metric.replace("*", tick)) for label, tick in ticks.items()}
        for line, (arm, metric) in lines.items()
    }


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Numbers of a table as lines, in panels."""

    name: str
    title: str
    xlabel: str
    panels: Mapping[str, Curves]
    """By title."""
    share_y: bool = True
    """Whether all panels have one vertical axis."""
    continuous: bool = True
    """Whether ticks are steps of one quantity, so that a line connects the points."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One of the paper's tables or figures."""

    title: str
    name: str = ""
    """Its name in `RECIPES`, which `all_recipes` fills in."""
    source: Source | None = None
    """Where the paper has its numbers; None for a question of ours."""
    rows: tuple[Row, ...] = ()
    metrics: tuple[str, ...] = ()
    """Names in `experiments.tables.METRICS`."""
    headline: tuple[str, ...] = ()
    """The metrics that answer the question: pages and the terminal show these alone. Empty shows all."""
    measurements: tuple[Measurement, ...] = ()
    figures: tuple[Figure, ...] = ()
    also: tuple[str, ...] = ()
    """Labels of further tables, figures and sections of the paper that its numbers are from."""
    quoted: tuple[str, ...] = ()
    """Those of its labels that it only quotes: other recipes repeat their measurements."""
    notes: tuple[str, ...] = ()
    seeds: int | None = None
    """Number of seeds to run, from the first of the scale's on; None runs them all."""
    intervals: Literal["error", "t"] = "error"
    """The spread of a mean over seeds: its standard error, or its 95% interval by Student's t."""
    smoke: tuple[str, ...] | None = None
    """Arms of the smoke scale; None is all."""

    @property
    def labels(self) -> tuple[str, ...]:
        return (*((self.source.label,) if self.source else ()), *self.also)

    @property
    def repeats(self) -> tuple[str, ...]:
        """The labels that it repeats: a command that names one of them runs the recipe."""
        return tuple(label for label in self.labels if label not in self.quoted)

    @property
    def numbered_title(self) -> str:
        """The title with the number of the table or figure that it repeats."""
        number = NUMBERED.get(self.repeats[0]) if self.repeats else None
        return f"{self.title} ({number})" if number else self.title

    def arms(self, scale: str) -> tuple[str, ...]:
        """Return the arms that are run at a scale; the runner adds those that they need, such as parents."""
        if scale == "smoke" and self.smoke is not None:
            return self.smoke
        retired = {row.arm for row in self.rows if row.retired}
        rows = [row for row in self.rows if not row.retired]
        # NAME@0 is a report of the run NAME.
        named = [name.partition("@")[0] for row in rows for name in (row.arm, row.reference, row.against) if name]
        named += [name for row in rows for name in row.companions]
        named += [name for each in self.measurements for name in each.arms(scale)]
        return tuple(name for name in dict.fromkeys(named) if name not in retired)

    def measured(self, folder: Path, scale: str) -> dict[str, list[Any]]:
        """Return the records of its measurements below a scale's folder, by measurement."""
        records = {}
        for each in self.measurements:
            place = each.file(folder, self.name, scale_named(scale).base, 0).parent  # the same for any seed
            # Partial records lie beside the complete ones, as seed-1337.partial.json.
            if files := [path for path in sorted(place.glob("*.json")) if re.fullmatch(r"seed-\d+|once", path.stem)]:
                records[each.name] = [read_result(path) for path in files]
        return records


@cache
def all_recipes() -> dict[str, Recipe]:
    """Return all recipes by name; raise InputError for one that names an unknown arm."""
    by_name: dict[str, Recipe] = {}
    # Every module of the folder, so that a recipe of your own needs no entry elsewhere.
    for module in pkgutil.iter_modules(recipes.__path__):
        for name, each in import_module(f"experiments.recipes.{module.name}").RECIPES.items():
            by_name[name] = replace(each, name=name)
            if unknown := [arm for arm in each.arms("paper") if arm not in arms()]:
                raise InputError(f"recipe {name!r} names the arm {unknown[0]!r}, which is not in experiments/arms.py")
    return dict(sorted(by_name.items()))


def recipes_for(word: str) -> list[Recipe]:
    """Return the recipe of a name, or those that repeat a label of the paper or a number such as table-8.

    Those with a table of the paper as their `source` come before questions of ours. Raises InputError for none.
    """
    known, plain = all_recipes(), word.lower().replace(" ", "-")  # the paper's "Table 8" is table-8
    numbers = {label: number.lower().replace(" ", "-") for label, number in NUMBERED.items()}
    labels = {label for label, number in numbers.items() if plain in (label, number)}
    matches = [each for each in known.values() if each.name == word or labels & {*each.repeats}]
    if not matches:
        hint = "" if labels else did_you_mean(word, [*known, *numbers.values()])
        raise InputError(f"there is no recipe for {word!r}{hint or '; docs/recipes.md lists them'}")
    return sorted(matches, key=lambda each: each.source is None)
