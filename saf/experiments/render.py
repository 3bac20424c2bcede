"""The tables of a recipe from records alone: each arm's and measurement's numbers over seeds, beside the paper's.

A ratio is taken in each seed first, then averaged: mean and standard error over seeds. With one seed alone the interval
of a change in perplexity is the paired bootstrap over held-out windows. What was not run says so.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saf.evaluate.paired import mean_and_standard_error
from saf.experiments.columns import COLUMNS, Column, Record
from saf.experiments.measurement import Measurement, Number, tables_of
from saf.experiments.measuring import Measurements
from saf.experiments.page import recipe_page
from saf.experiments.plan import Plan
from saf.experiments.recipe import Arm, Recipe
from saf.experiments.rows import Records, Rows, Value
from saf.experiments.store import Store
from saf.records.files import write_atomically, write_json
from saf.records.table import Cell, Part, Table, markdown_of

NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Hold the table of one recipe at one scale."""

    name: str
    recipe: Recipe
    scale: str
    values: Mapping[str, Mapping[str, Value | None]]
    """By arm and column; an arm without a record is absent."""
    measured: Mapping[str, Mapping[int | None, Mapping[str, Any]]]
    """Records by measurement and seed; one that was not made is absent."""
    lacking: frozenset[tuple[str, str]]
    """Arms and columns whose number needs another arm that was not run."""
    drafts: tuple[str, ...]
    """Why this is no final table: runs of a tree that no commit holds."""
    origin: tuple[str, ...]
    """Sentences about where the runs come from."""
    whole: bool = True
    """Whether arms and measurements that were not run have rows, which say so."""

    def parts(self) -> list[Part]:
        """Return the table of arms, that of measured numbers beside the paper's, and each measurement's own tables."""
        parts: list[Part] = [self.table()] if self.recipe.columns and (self.whole or self._arms) else []
        if any(each.numbers for each in self._measurements):
            parts.append(self.numbers())
        for each in self._measurements:
            records = self.measured.get(each.name)
            if not records:
                parts.append(f"{each.name}, `saf {each.does}`: {NOT_RUN}.")
            for seed, record in (records or {}).items():
                parts += [each.name + ("" if seed is None else f", seed {seed}"), *tables_of(record)]
        return parts

    def done(self) -> "Rendered":
        """Return the same with the arms and measurements that were run alone; a sentence says how many were not."""
        return replace(self, whole=False)

    @property
    def _arms(self) -> list[Arm]:
        return [arm for arm in self.recipe.arms if arm.row and (self.whole or arm.name in self.values)]

    @property
    def _measurements(self) -> list[Measurement]:
        return [each for each in self.recipe.measurements if self.whole or each.name in self.measured]

    @property
    def _left_out(self) -> list[str]:
        """Return what is said of arms and measurements that have no rows."""
        arms, measurements = [arm for arm in self.recipe.arms if arm.row], self.recipe.measurements
        left = len(arms) + len(measurements) - len(self._arms) - len(self._measurements)
        return [f"Not run: {left} other arms and measurements of the recipe."] if left else []

    def numbers(self) -> Table:
        """Return what measurements found beside the paper's numbers, a row each."""
        rows = []
        for each in self._measurements:
            for number in each.numbers:
                value = self._number(each.name, number)
                ours = _written(number, value) if each.name in self.measured else NOT_RUN
                rows.append([Cell(text=number.title), ours, number.paper])
        sources = dict.fromkeys(each.source or self.recipe.source for each in self._measurements if each.numbers)
        notes = [f"Paper, `{source.label}`: {source.conditions}." for source in sources]
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

    def table(self) -> Table:
        """Return the table of arms, a row an arm, the paper's number beside each column that it has numbers for."""
        columns = [COLUMNS[name] for name in self.recipe.columns]
        quoted = [any(name in arm.paper for arm in self.recipe.arms) for name in self.recipe.columns]
        heads = [head for column, has in zip(columns, quoted, strict=True) for head in _heads(column, quoted=has)]
        rows = [[Cell(text=arm.name), *self._cells(arm, quoted)] for arm in self._arms]
        notes = [*self.recipe.notes, f"Paper, `{self.recipe.source.label}`: {self.recipe.source.conditions}."]
        notes.append(
            "± is the standard error over seeds; an interval in brackets is 95% over held-out windows or questions, "
            "one seed."
        )
        notes += [*self.origin, *self._left_out]
        title = f"{'DRAFT: ' if self.drafts else ''}{self.recipe.title} ({self.scale})"
        return Table.of(title, ["arm", *heads], rows, [*self.drafts, *notes])

    def _cells(self, arm: Arm, quoted: list[bool]) -> list[str | None]:
        """Return the cells of one arm, the paper's value after ours in columns where it is quoted."""
        cells: list[str | None] = []
        for name, has in zip(self.recipe.columns, quoted, strict=True):
            found = self.values.get(arm.name)
            missing = found is None or (arm.name, name) in self.lacking
            cells.append(NOT_RUN if missing else shown(COLUMNS[name], (found or {}).get(name)))
            if has:
                cells.append(arm.paper.get(name))
        return cells

    def latex(self) -> str:
        """Return the tables of arms and of measured numbers as LaTeX, with booktabs."""
        tables = [self.table()] if self.recipe.columns else []
        tables += [self.numbers()] if any(each.numbers for each in self.recipe.measurements) else []
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
        told = {"drafts": list(self.drafts), "origin": list(self.origin), "not_run": not_run}
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
    told = [plan.scale.speeds.described()] if plan.scale.speeds and any(arm.match for arm in recipe.arms) else []
    return Rendered(
        name=name,
        recipe=recipe,
        scale=plan.scale.name,
        values=values,
        measured=measured,
        lacking=frozenset(rows.lacking),
        drafts=_drafts([*runs, *(record for each in measured.values() for record in each.values())]),
        origin=(*told, *rows.apart(), *_origin(runs)),
    )


def _drafts(records: Sequence[Record]) -> tuple[str, ...]:
    """Return why a table of these is none to quote; nothing when every run is of a commit."""
    found = [record["provenance"].get("commit") for record in records]
    unclean = sum(commit is None or commit.endswith("+") for commit in found)
    return (f"DRAFT: {unclean} of {len(found)} records are of a tree that no commit holds.",) if unclean else ()


def _origin(records: Sequence[Record]) -> list[str]:
    """Return a note about where runs were made: commits and devices."""
    commits = sorted({(record["provenance"].get("commit") or "unknown")[:12] for record in records})
    devices = sorted({record["provenance"].get("device") or "an unknown device" for record in records})
    shared = sum(bool(record.get("shared")) for record in records)
    told = [f"Runs of commit {', '.join(commits)} on {', '.join(devices)}."] if records else []
    trained_on = max((record.get("trained_on", 0) for record in records), default=0)
    if trained_on:
        told.append(f"Test examples that are trained on too, whose accuracy tells nothing: {trained_on}.")
    return [*told, f"Runs that shared a device, whose times are left out: {shared}."] if shared else told


def shown(column: Column, value: Value | None) -> str | None:
    """Return a number as a table has it: with its standard error, or its interval where there is one seed."""
    if value is None:
        return None
    sign = "+" if column.signed else ""

    def written(number: float) -> str:
        return f"{number:{sign},.{column.places}f}".replace("-", "\u2212")

    if column.by_seed:
        return ", ".join(map(written, value.each))
    if value.error is not None:
        return f"{written(value.mean)} ± {value.error:.{column.places}f}"
    if value.interval is not None:
        low, high = map(written, value.interval)
        return f"{written(value.mean)} ({low} to {high})"
    return written(value.mean)


def _written(number: Number, value: Value | None) -> str | None:
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
