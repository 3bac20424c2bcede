"""The tables of a recipe from records alone: each arm's and measurement's numbers over seeds, beside the paper's.

A ratio is taken in each seed first, then averaged: mean and standard error over seeds. With one seed alone the interval
of a change in perplexity is the paired bootstrap over held-out windows. Tables to be read have the rows that were run
and the columns that hold something, and name the rest; LaTeX, CSV and JSON have all.
"""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saf.evaluate.paired import mean_and_standard_error
from saf.experiments.analyses import ANALYSES, draw
from saf.experiments.columns import COLUMNS, Column
from saf.experiments.measurement import Measurement, Number, tables_of
from saf.experiments.measuring import Measurements
from saf.experiments.page import recipe_page
from saf.experiments.plan import Plan
from saf.experiments.reading import (
    Values,
    drafts,
    errors_and_intervals,
    fewer_seeds,
    incomplete,
    origin,
    overtrained_arms,
    recommended,
    worthless,
)
from saf.experiments.recipe import Arm, Recipe
from saf.experiments.rows import Records, Rows, Value
from saf.experiments.store import Store
from saf.records.files import write_atomically, write_json
from saf.records.paper import Source
from saf.records.table import Cell, Part, Table, markdown_of

NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Hold the table of one recipe at one scale."""

    name: str
    recipe: Recipe
    scale: str
    date: str
    """When the last of its runs ended, as its record has it; "" without runs."""
    values: Values
    """By arm and column; an arm without a record is absent."""
    measured: Mapping[str, Mapping[int | None, Mapping[str, Any]]]
    """Records by measurement and seed; one that was not made is absent."""
    lacking: frozenset[tuple[str, str]]
    """Arms and columns whose number needs another arm that was not run."""
    overtrained: frozenset[str]
    """Arms beside an ordinary one whose perplexity more tokens raised: time and tokens buy nothing there."""
    drafts: tuple[str, ...]
    """Why this is no final table: runs of a tree that no commit holds."""
    cautions: tuple[str, ...]
    """What is not to be read from it, said before all else."""
    reading: tuple[str, ...]
    """Sentences about what errors and intervals are of, and what they are not."""
    origin: tuple[str, ...]
    """Sentences about where the runs come from."""

    def parts(self) -> list[Part]:
        """Return the tables of arms, that of measured numbers beside the paper's, and each measurement's own tables."""
        left = [f"{each.name} (saf {each.does})" for each in self.recipe.measurements if each.name not in self.measured]
        told = [f"Measurements {NOT_RUN}: {', '.join(left)}."] if left else []
        arms = self.tables() or self._not_run() * bool(self.recipe.columns)
        return [*arms, *self.measurements(), *told]

    def measurements(self) -> list[Part]:
        """Return what was measured: numbers beside the paper's, and each measurement's own tables."""
        made = [each for each in self.recipe.measurements if each.name in self.measured]
        parts: list[Part] = [self._numbers(made)] if any(each.numbers for each in made) else []
        for each in made:
            for seed, record in self.measured[each.name].items():
                parts += [_told(each, seed), *tables_of(record)]
        return parts

    def drawings(self) -> dict[str, str]:
        """Return the SVG of each measurement whose command draws one, by the measurement's name and seed.

        Of several by one command on the same checkpoints the last stands for all: it asks for more of the same.
        """
        made = {f"{each.does} {each.on}": each for each in self.recipe.measurements if each.name in self.measured}
        return {
            _told(each, seed): draw(record)
            for each in made.values()
            for seed, record in self.measured[each.name].items()
            if record["kind"] in ANALYSES
        }

    def tables(self) -> list[Table]:
        """Return the headline of a recipe that has one, and every number of the arms that were run."""
        recipe = self.recipe
        if not recipe.columns or not self.ran:
            return []
        title = f"{'DRAFT: ' if self.drafts else ''}{recipe.title} ({self.scale})"
        reading = [*self.drafts, *self.cautions, *recipe.notes, *self._paper(recipe.source), *self.reading]
        every, last = self._shown(recipe.columns, self.ran), [*self.origin, *self._not_run()]
        if not recipe.headline:
            return [replace(every, title=title, notes=(*reading, *every.notes, *last))]
        first = self._shown(recipe.headline, self.headline())
        return [
            replace(first, title=title, notes=(*reading, *first.notes, *self._not_run())),
            replace(every, title=f"{title}, every number", notes=(*self.cautions, *every.notes, *self.origin)),
        ]

    @property
    def ran(self) -> list[Arm]:
        """Return the arms of rows that were run."""
        return [arm for arm in self.recipe.arms if arm.row and arm.name in self.values]

    def headline(self) -> list[Arm]:
        """Return the arms of the headline: those that have a number in it, and stand beside no row that was run."""
        named = self.recipe.headline or self.recipe.columns
        beside = {name for arm in self.ran for name in arm.beside.values()}
        return [arm for arm in self.ran if arm.name not in beside and any(map(self.values[arm.name].get, named))]

    def _shown(self, names: Sequence[str], arms: Sequence[Arm]) -> Table:
        """Return a table of some columns and arms that were run, without columns that hold nothing; a note names these.

        A column of the paper's numbers alone holds nothing.
        """
        cells = {name: [self._cell(arm, name) for arm in arms] for name in names}
        kept = [name for name in names if any(cell not in (None, NOT_RUN) for cell in cells[name])]
        lost = [COLUMNS[name].title for name in names if name not in kept and NOT_RUN in cells[name]]
        table = self._table(kept, arms)
        return replace(table, notes=(f"Columns whose arms were {NOT_RUN}: {'; '.join(lost)}.",)) if lost else table

    def _table(self, names: Sequence[str], arms: Sequence[Arm]) -> Table:
        """Return a table of columns, a row an arm, the paper's number behind each column that it has numbers for."""
        quoted = {name for name in names if any(name in arm.paper for arm in arms)}
        heads = [head for name in names for head in _heads(COLUMNS[name], quoted=name in quoted)]
        rows = []
        for arm in arms:
            row: list[Cell | str | None] = [Cell(text=arm.name)]
            for name in names:
                row += [self._cell(arm, name), arm.paper.get(name)] if name in quoted else [self._cell(arm, name)]
            rows.append(row)
        return Table.of("", ["arm", *heads], rows)

    def _cell(self, arm: Arm, name: str) -> str | Cell | None:
        """Return an arm's number in a column, or that it was not run; None where there is none."""
        found = self.values.get(arm.name)
        if found is None or (arm.name, name) in self.lacking:
            return NOT_RUN
        return shown(COLUMNS[name], found.get(name))

    def _not_run(self) -> list[str]:
        """Return a sentence about the arms that were not run: contexts that have none at once, and others by name.

        Arms that rows are made with, and their references, are counted alone: cells of these rows say what lacks.
        """
        arms = [arm for arm in self.recipe.arms if arm.row]
        missing = [arm for arm in arms if arm.name not in self.values]
        if not missing:
            return []
        lacking, contexts = Counter(arm.context for arm in missing), Counter(arm.context for arm in arms)
        empty = [of for of in contexts if lacking[of] == contexts[of]] if len(contexts) > 1 else []
        told = [f"all {contexts[of]} at the paper's {of:,} tokens of context" for of in empty]
        single = [arm.name for arm in missing if arm.context not in empty]
        beside = self._beside | {str(arm.reference) for arm in arms if arm.name in self._beside}
        told += [name for name in single if name not in beside]
        if count := len(beside.intersection(single)):
            told.append(f"{count} that numbers of others are made with")
        return [f"{NOT_RUN.capitalize()}, {len(missing)} of {len(arms)} arms: {'; '.join(told)}."]

    @property
    def _beside(self) -> set[str]:
        """Return the arms that stand beside others, and add to their numbers."""
        return {name for arm in self.recipe.arms for name in arm.beside.values()}

    def _numbers(self, measurements: Sequence[Measurement]) -> Table:
        """Return what measurements found beside the paper's numbers, a row each."""
        rows = []
        for each in measurements:
            for number in each.numbers:
                ours = _written(number, self._number(each.name, number)) or NOT_RUN
                rows.append([Cell(text=number.title), ours, number.paper])
        sources = dict.fromkeys(each.source or self.recipe.source for each in measurements if each.numbers)
        notes = [note for source in sources for note in self._paper(source)]
        notes = notes if self.recipe.columns else [*self.recipe.notes, *notes]
        title = f"{self.recipe.title}, measured ({self.scale})"
        return Table.of(title, ["", "ours", "paper"], rows, [*self.drafts, *notes])

    def _number(self, measurement: str, number: Number) -> Value | None:
        """Return one number of a measurement over the seeds that have it."""
        found = [number.find(record) for record in self.measured.get(measurement, {}).values()]
        known = [value for value in found if value is not None]
        if not known:
            return None
        summary = mean_and_standard_error(known)
        return Value(mean=summary["mean"], error=summary["standard_error"], interval=None, seeds=summary["seeds"])

    def _paper(self, source: Source) -> list[str]:
        """Return where the paper has its numbers, and under which conditions."""
        return [f"Paper, {source.label}: {source.conditions}."]

    def latex(self) -> str:
        """Return the tables of all arms and of all measured numbers as LaTeX, with booktabs."""
        arms = [arm for arm in self.recipe.arms if arm.row]
        tables = [self._table(self.recipe.columns, arms)] if self.recipe.columns else []
        notes = [*self.recipe.notes, *self._paper(self.recipe.source), *self.reading, *self.origin]
        tables = [replace(table, notes=(*self.drafts, *notes)) for table in tables]
        tables += (
            [self._numbers(self.recipe.measurements)] if any(each.numbers for each in self.recipe.measurements) else []
        )
        return "\n".join(_latex_table(table, self.drafts) for table in tables)

    def csv(self) -> str:
        """Return the numbers unrounded: a line for each arm and column, and for each number of a measurement."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["arm", "column", "mean", "standard_error", "low", "high", "seeds", "paper"])
        for arm in self.recipe.arms:
            for name in self.recipe.columns:
                value = self.values.get(arm.name, {}).get(name)
                low, high = (value.interval if value else None) or (None, None)
                numbers = [value.mean, value.error, low, high, value.seeds] if value else [None] * 4 + [0]
                writer.writerow([arm.name, name, *numbers, arm.paper.get(name)])
        for each in self.recipe.measurements:
            for number in each.numbers:
                value = self._number(each.name, number)
                numbers = [value.mean, value.error, None, None, value.seeds] if value else [None] * 4 + [0]
                writer.writerow([each.name, number.title, *numbers, number.paper])
        return text.getvalue()

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        arms = {
            arm: {name: value and vars(value) for name, value in columns.items()}
            for arm, columns in self.values.items()
        }
        measured = {
            each.name: {
                number.title: (value := self._number(each.name, number)) and vars(value) for number in each.numbers
            }
            for each in self.recipe.measurements
            if each.name in self.measured
        }
        not_run = [arm.name for arm in self.recipe.arms if arm.name not in self.values]
        not_run += [each.name for each in self.recipe.measurements if each.name not in self.measured]
        told = {
            "drafts": list(self.drafts),
            "cautions": list(self.cautions),
            "reading": list(self.reading),
            "origin": list(self.origin),
        }
        told |= {"not_run": not_run, "overtrained": sorted(self.overtrained)}
        return {"recipe": self.name, "scale": self.scale, **told, "arms": arms, "measured": measured}

    def write(self, folder: Path) -> list[Path]:
        """Write Markdown, LaTeX, CSV, HTML and JSON into a folder and return the files; those of a draft say so."""
        shown = "\n\n".join(map(markdown_of, self.parts()))
        texts = {"md": shown + "\n", "tex": self.latex(), "csv": self.csv(), "html": recipe_page(self)}
        stem = f"{self.name}-{self.scale}{'-draft' if self.drafts else ''}"
        files = [write_atomically(folder / f"{stem}.{kind}", text.encode()) for kind, text in texts.items()]
        return [*files, write_json(folder / f"{stem}.json", self.to_dict())]


def render(name: str, recipe: Recipe, plan: Plan, store: Store, measurements: Measurements | None = None) -> Rendered:
    """Return the tables of a recipe from the records that the store has of a plan's runs and measurements."""
    records: Records = {}
    for (of, arm, seed), key in plan.arms.items():
        if of == name and (found := store.records(key)):
            records.setdefault(arm, {})[seed] = found
    measured: dict[str, dict[int | None, Mapping[str, Any]]] = {}
    for (of, measurement, seed), key in (measurements or Measurements()).keys.items():
        if of == name and (record := store.measurement(key)) is not None:
            measured.setdefault(measurement, {})[seed] = record
    rows = Rows(recipe, records)
    values = {arm.name: rows.values(arm) for arm in recipe.arms if arm.name in records}
    runs = [record for arm in records.values() for found in arm.values() for record in found]
    overtrained = overtrained_arms(recipe, values)
    speeds = plan.scale.told_of_speeds if any(arm.match for arm in recipe.arms) else None
    return Rendered(
        name=name,
        recipe=recipe,
        scale=plan.scale.name,
        date=max((str(record["provenance"]["date"]) for record in runs), default=""),
        values=values,
        measured=measured,
        lacking=frozenset(rows.lacking),
        overtrained=frozenset(overtrained),
        drafts=drafts([*runs, *(record for each in measured.values() for record in each.values())]),
        cautions=tuple(worthless(overtrained, values)),
        reading=(
            *recommended(recipe, values),
            *errors_and_intervals(values, runs),
            *fewer_seeds(name, recipe, plan, values),
            *incomplete(records),
        ),
        origin=(*filter(None, [speeds]), *rows.notes(), *origin(runs)),
    )


def shown(column: Column, value: Value | None) -> str | Cell | None:
    """Return a number as a table has it: with its standard error, or its interval behind it where there is one seed."""
    if value is None:
        return None
    written = column.written
    if column.by_seed:
        return ", ".join(map(written, value.each))
    if value.error is not None:
        return f"{written(value.mean)} ± {value.error:.{column.places}f}"
    if value.interval is not None:
        low, high = map(written, value.interval)
        return Cell(text=written(value.mean), aside=f"({low} to {high})")
    return written(value.mean)


def _told(measurement: Measurement, seed: int | None) -> str:
    """Return a measurement's name, with the seed of the runs that it reads where it reads any."""
    return measurement.name + ("" if seed is None else f", seed {seed}")


def _written(number: Number, value: Value | None) -> str | Cell | None:
    """Return a measured number as a table has it."""
    if number.scientific and value is not None:
        return f"{value.mean:.2e}".replace("e-0", "e-")
    column = Column(title=number.title, value=lambda _: None, places=number.places, signed=number.signed)
    return shown(column, value)


def _heads(column: Column, *, quoted: bool) -> list[str]:
    return [column.title, f"paper's {column.title}"] if quoted else [column.title]


def _latex_table(table: Table, drafts: Sequence[str]) -> str:
    """Return one table as LaTeX, its drafts as rows: a comment would not be seen in print."""
    wide = len(table.columns)
    lines = [r"\begin{tabular}{@{}l" + "r" * (wide - 1) + r"@{}}", r"\toprule"]
    lines.append(" & ".join(map(_latex, table.columns)) + r" \\ \midrule")
    lines += [rf"\multicolumn{{{wide}}}{{@{{}}l}}{{\textbf{{{_latex(draft)}}}}} \\" for draft in drafts]
    lines += [" & ".join(_latex(str(cell)) for cell in row) + r" \\" for row in table.rows]
    return "\n".join([f"% {note}" for note in table.notes] + [*lines, r"\bottomrule", r"\end{tabular}", ""])


def _latex(text: str) -> str:
    for sign, written in (("\\", r"\textbackslash "), ("%", r"\%"), ("&", r"\&"), ("_", r"\_"), ("#", r"\#")):
        text = text.replace(sign, written)
    return text.replace("\u2212", "$-$").replace("±", r"$\pm$").replace("×", r"$\times$")
