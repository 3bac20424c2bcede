"""The tables of a recipe from records alone: each arm's and measurement's numbers over seeds, beside the paper's.

A ratio is taken in each seed first, then averaged: mean and standard error over seeds. With one seed alone the interval
of a change in perplexity is the paired bootstrap over held-out windows. What was not run says so.
"""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from saf.errors import CompareError
from saf.evaluate.paired import bootstrap_means, mean_and_standard_error
from saf.experiments.columns import COLUMNS, Column
from saf.experiments.measurement import Number, tables_of
from saf.experiments.measuring import Measurements
from saf.experiments.plan import Plan
from saf.experiments.recipe import Arm, Recipe
from saf.experiments.store import Store
from saf.records.files import write_atomically, write_json
from saf.records.table import Cell, Part, Table, html_of, markdown_of

NOT_RUN = "not run"
Records = Mapping[int, Mapping[str, Any]]
"""By seed, the record of one arm."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """Hold one number of one arm."""

    mean: float
    error: float | None
    """Standard error over seeds; None for one seed."""
    interval: tuple[float, float] | None
    """95% over held-out windows, where there is one seed."""
    seeds: int


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
    drafts: tuple[str, ...]
    """Why this is no final table: runs of a tree that no commit holds."""

    def parts(self) -> list[Part]:
        """Return the table of arms, that of measured numbers beside the paper's, and each measurement's own tables."""
        parts: list[Part] = [self.table()] if self.recipe.columns else []
        if any(each.numbers for each in self.recipe.measurements):
            parts.append(self.numbers())
        for each in self.recipe.measurements:
            records = self.measured.get(each.name)
            if not records:
                parts.append(f"{each.name}, `saf {each.does}`: {NOT_RUN}.")
            for seed, record in (records or {}).items():
                parts += [each.name + ("" if seed is None else f", seed {seed}"), *tables_of(record)]
        return parts

    def numbers(self) -> Table:
        """Return what measurements found beside the paper's numbers, a row each."""
        rows = []
        for each in self.recipe.measurements:
            for number in each.numbers:
                value = self._number(each.name, number)
                ours = _written(number, value) if each.name in self.measured else NOT_RUN
                rows.append([Cell(text=number.title), ours, number.paper])
        sources = dict.fromkeys(each.source or self.recipe.source for each in self.recipe.measurements if each.numbers)
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
        rows = [[Cell(text=arm.name), *self._cells(arm, quoted)] for arm in self.recipe.arms]
        notes = [*self.recipe.notes, f"Paper, `{self.recipe.source.label}`: {self.recipe.source.conditions}."]
        notes.append(
            "± is the standard error over seeds; an interval in brackets is 95% over held-out windows, one seed."
        )
        return Table.of(f"{self.recipe.title} ({self.scale})", ["arm", *heads], rows, [*self.drafts, *notes])

    def _cells(self, arm: Arm, quoted: list[bool]) -> list[str | None]:
        """Return the cells of one arm, the paper's value after ours in columns where it is quoted."""
        cells: list[str | None] = []
        for name, has in zip(self.recipe.columns, quoted, strict=True):
            found = self.values.get(arm.name)
            cells.append(NOT_RUN if found is None else shown(COLUMNS[name], found.get(name)))
            if has:
                cells.append(arm.paper.get(name))
        return cells

    def latex(self) -> str:
        """Return the tables of arms and of measured numbers as LaTeX, with booktabs."""
        tables = [self.table()] if self.recipe.columns else []
        tables += [self.numbers()] if any(each.numbers for each in self.recipe.measurements) else []
        return "\n".join(map(_latex_table, tables))

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
        head = {"recipe": self.name, "scale": self.scale, "drafts": list(self.drafts)}
        return {**head, "arms": arms, "measured": measured}

    def write(self, folder: Path) -> list[Path]:
        """Write Markdown, LaTeX, CSV, HTML and JSON into a folder and return the files."""
        parts = self.parts()
        body = "".join(map(html_of, parts))
        page = f'<!doctype html><meta charset="utf-8"><title>{_html(self.recipe.title)}</title>{body}'
        shown = "\n\n".join(map(markdown_of, parts))
        texts = {"md": shown + "\n", "tex": self.latex(), "csv": self.csv(), "html": page + "\n"}
        stem = f"{self.name}-{self.scale}"
        files = [write_atomically(folder / f"{stem}.{kind}", text.encode()) for kind, text in texts.items()]
        return [*files, write_json(folder / f"{stem}.json", self.to_dict())]


def render(name: str, recipe: Recipe, plan: Plan, store: Store, measurements: Measurements | None = None) -> Rendered:
    """Return the tables of a recipe from the records that the store has of a plan's runs and measurements."""
    records: dict[str, dict[int, Mapping[str, Any]]] = {}
    for (of, arm, seed), key in plan.arms.items():
        if of == name and (record := store.record(key)) is not None:
            records.setdefault(arm, {})[seed] = record
    values = {arm.name: _values(arm, recipe, records) for arm in recipe.arms if arm.name in records}
    measured: dict[str, dict[int | None, Mapping[str, Any]]] = {}
    for (of, measurement, seed), key in (measurements or Measurements()).keys.items():
        if of == name and (record := store.measurement(key)) is not None:
            measured.setdefault(measurement, {})[seed] = record
    every = (*records.values(), *measured.values())
    found = [record["provenance"].get("commit") for of_one in every for record in of_one.values()]
    unclean = sum(commit is None or commit.endswith("+") for commit in found)
    drafts = (f"DRAFT: {unclean} of {len(found)} records are of a tree that no commit holds.",) if unclean else ()
    return Rendered(name=name, recipe=recipe, scale=plan.scale.name, values=values, measured=measured, drafts=drafts)


def shown(column: Column, value: Value | None) -> str | None:
    """Return a number as a table has it: with its standard error, or its interval where there is one seed."""
    if value is None:
        return None
    sign = "+" if column.signed else ""

    def written(number: float) -> str:
        return f"{number:{sign},.{column.places}f}".replace("-", "\u2212")

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
    column = Column(title=number.title, value=lambda *_: None, places=number.places, signed=number.signed)
    return shown(column, value)


def _values(arm: Arm, recipe: Recipe, records: Mapping[str, Records]) -> dict[str, Value | None]:
    """Return the value of every column of one arm, from its own record and those it is paired with."""
    others = {"reference": arm.reference, "against": arm.against}
    found = {}
    for name in recipe.columns:
        column = COLUMNS[name]
        other = records.get(others[column.paired] or "", {}) if column.paired else {}
        found[name] = _value(column, records[arm.name], other)
    return found


def _value(column: Column, own: Records, other: Records) -> Value | None:
    """Return a column's number over the seeds that have it; ratios are taken in each seed first."""
    if column.paired:
        own = {seed: record for seed, record in own.items() if seed in other}
        for seed, record in own.items():
            if record["windows_hash"] != other[seed]["windows_hash"]:
                raise CompareError(
                    f"{record['key']} and {other[seed]['key']} were evaluated on different held-out windows: they are "
                    "runs of different data, and cannot stand in one table"
                )
    numbers = [number for seed, run in own.items() if (number := column.value(run, other.get(seed))) is not None]
    if not numbers:
        return None
    summary = mean_and_standard_error(numbers)
    interval = None
    if column.paired and len(numbers) == 1:
        ((seed, record),) = own.items()
        interval = _interval(record["window_losses"], other[seed]["window_losses"])
    return Value(mean=summary["mean"], error=summary["standard_error"], interval=interval, seeds=summary["seeds"])


def _interval(own: list[float], other: list[float]) -> tuple[float, float]:
    """Return the 95% interval of a change in perplexity, %, over the same resampled windows of both."""
    differences = torch.tensor(own, dtype=torch.float64) - torch.tensor(other, dtype=torch.float64)
    draws = 100.0 * torch.expm1(bootstrap_means(differences))
    low, high = torch.quantile(draws, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _heads(column: Column, *, quoted: bool) -> list[str]:
    return [column.title, f"paper's {column.title}"] if quoted else [column.title]


def _latex_table(table: Table) -> str:
    lines = [r"\begin{tabular}{@{}l" + "r" * (len(table.columns) - 1) + r"@{}}", r"\toprule"]
    lines.append(" & ".join(map(_latex, table.columns)) + r" \\ \midrule")
    lines += [" & ".join(_latex(str(cell)) for cell in row) + r" \\" for row in table.rows]
    return "\n".join([f"% {note}" for note in table.notes] + [*lines, r"\bottomrule", r"\end{tabular}", ""])


def _latex(text: str) -> str:
    for sign, written in (("\\", r"\textbackslash "), ("%", r"\%"), ("&", r"\&"), ("_", r"\_"), ("#", r"\#")):
        text = text.replace(sign, written)
    return text.replace("\u2212", "$-$").replace("±", r"$\pm$").replace("×", r"$\times$")


def _html(text: str) -> str:
    from html import escape

    return escape(text)
