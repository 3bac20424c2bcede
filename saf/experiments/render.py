"""The table of a recipe from records alone: each arm's numbers over its seeds, beside the paper's.

A ratio is taken in each seed first, then averaged: mean and standard error over seeds. With one seed alone the interval
of a change in perplexity is the paired bootstrap over held-out windows. What was not run says so.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saf.errors import CompareError
from saf.evaluate.paired import bootstrap_means, mean_and_standard_error
from saf.experiments.columns import AGAINST, COLUMNS, OWN, REFERENCE, Column, Record, Row
from saf.experiments.plan import Plan
from saf.experiments.recipe import Arm, Recipe
from saf.experiments.store import Store
from saf.records.files import write_atomically, write_json
from saf.records.table import Cell, Table

NOT_RUN = "not run"
Records = dict[str, dict[int, list[dict[str, Any]]]]
"""By arm and seed, the records of a run: one, or one for each training of it."""


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
    lacking: frozenset[tuple[str, str]]
    """Arms and columns whose number needs another arm that was not run."""
    drafts: tuple[str, ...]
    """Why this is no final table: runs of a tree that no commit holds."""
    origin: tuple[str, ...]
    """Sentences about where the runs come from."""

    def table(self) -> Table:
        """Return the table, a row an arm, with the paper's number beside each column that it has numbers for."""
        columns = [COLUMNS[name] for name in self.recipe.columns]
        quoted = [any(name in arm.paper for arm in self.recipe.arms) for name in self.recipe.columns]
        heads = [head for column, has in zip(columns, quoted, strict=True) for head in _heads(column, quoted=has)]
        rows = [[Cell(text=arm.name), *self._cells(arm, quoted)] for arm in self.recipe.arms]
        notes = [*self.recipe.notes, f"Paper, `{self.recipe.source.label}`: {self.recipe.source.conditions}."]
        notes.append(
            "± is the standard error over seeds; an interval in brackets is 95% over held-out windows, one seed."
        )
        notes += self.origin
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
        """Return the table as LaTeX, with booktabs."""
        table = self.table()
        lines = [r"\begin{tabular}{@{}l" + "r" * (len(table.columns) - 1) + r"@{}}", r"\toprule"]
        lines.append(" & ".join(map(_latex, table.columns)) + r" \\ \midrule")
        # A comment would not be seen in print.
        wide = len(table.columns)
        lines += [rf"\multicolumn{{{wide}}}{{@{{}}l}}{{\textbf{{{_latex(draft)}}}}} \\" for draft in self.drafts]
        lines += [" & ".join(_latex(str(cell)) for cell in row) + r" \\" for row in table.rows]
        return "\n".join([f"% {note}" for note in table.notes] + [*lines, r"\bottomrule", r"\end{tabular}", ""])

    def csv(self) -> str:
        """Return the numbers unrounded: a line for each arm and column."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["arm", "column", "mean", "standard_error", "low", "high", "seeds", "paper"])
        for arm in self.recipe.arms:
            for name in self.recipe.columns:
                value = self.values.get(arm.name, {}).get(name)
                low, high = (value.interval if value else None) or (None, None)
                numbers = [value.mean, value.error, low, high, value.seeds] if value else [None] * 4 + [0]
                writer.writerow([arm.name, name, *numbers, arm.paper.get(name)])
        return text.getvalue()

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        arms = {
            arm: {name: value and vars(value) for name, value in columns.items()}
            for arm, columns in self.values.items()
        }
        not_run = [arm.name for arm in self.recipe.arms if arm.name not in self.values]
        told = {"drafts": list(self.drafts), "origin": list(self.origin), "not_run": not_run}
        return {"recipe": self.name, "scale": self.scale, **told, "arms": arms}

    def write(self, folder: Path) -> list[Path]:
        """Write Markdown, LaTeX, CSV, HTML and JSON into a folder and return the files; those of a draft say so."""
        table = self.table()
        page = f'<!doctype html><meta charset="utf-8"><title>{_html(table.title)}</title>{table.html()}'
        texts = {"md": table.markdown() + "\n", "tex": self.latex(), "csv": self.csv(), "html": page + "\n"}
        stem = f"{self.name}-{self.scale}{'-draft' if self.drafts else ''}"
        files = [write_atomically(folder / f"{stem}.{kind}", text.encode()) for kind, text in texts.items()]
        return [*files, write_json(folder / f"{stem}.json", self.to_dict())]


def render(name: str, recipe: Recipe, plan: Plan, store: Store) -> Rendered:
    """Return the table of a recipe from the records that the store has of a plan's runs."""
    records: Records = {}
    for (of, arm, seed), key in plan.arms.items():
        if of == name and (found := store.records(key)):
            records.setdefault(arm, {})[seed] = found
    rows = _Rows(recipe, records)
    values = {arm.name: rows.values(arm) for arm in recipe.arms if arm.name in records}
    used = [record for arm in records.values() for found in arm.values() for record in found]
    return Rendered(
        name=name,
        recipe=recipe,
        scale=plan.scale.name,
        values=values,
        lacking=frozenset(rows.lacking),
        drafts=_drafts(used),
        origin=(*rows.apart(), *_origin(used)),
    )


class _Rows:
    """Make the numbers of arms, in each seed from the records of one training of their parent."""

    def __init__(self, recipe: Recipe, records: Records):
        """Take every record of every arm and seed."""
        self.recipe, self.records = recipe, records
        self.arms = {arm.name: arm for arm in recipe.arms}
        self.lacking: set[tuple[str, str]] = set()
        self._apart: set[str] = set()
        self._draws: dict[int, Tensor] = {}

    def values(self, arm: Arm) -> dict[str, Value | None]:
        """Return the numbers of one arm by column, and take note of those for which another arm was not run."""
        found = {}
        for name in self.recipe.columns:
            column, seeds = COLUMNS[name], self.records[arm.name]
            runs = {seed: self._runs(arm, own[0], seed, column) for seed, own in seeds.items()}
            found[name] = self._value(column, {seed: row for seed, row in runs.items() if row is not None})
            named = bool(column.needs) and all(self._names(arm, role) for role in column.needs)
            if found[name] is None and named and None in runs.values():
                self.lacking.add((arm.name, name))
        return found

    def apart(self) -> list[str]:
        """Return a note about arms that are compared across two trainings of their parent; none where there is none."""
        listed = ", ".join(sorted(self._apart))
        told = (
            f"Compared with a run of another training of the same parent, whose noise stands in the change: {listed}."
        )
        return [told] if listed else []

    def _names(self, arm: Arm, role: str) -> str | None:
        """Return the arm that is something to another one; None when it names none."""
        first, _, reference = role.partition(" ")
        if first == OWN:
            return arm.name
        named = {REFERENCE: arm.reference, AGAINST: arm.against, **arm.beside}.get(first)
        return self.arms[named].reference if reference and named else named

    def _runs(self, arm: Arm, own: Record, seed: int, column: Column) -> dict[str, Record] | None:
        """Return the records that a column needs of one seed by what they are; None when one is missing."""
        if column.timed and own.get("shared"):
            return None
        runs = {OWN: own}
        for role in column.needs:
            name = self._names(arm, role)
            candidates = self.records.get(name or "", {}).get(seed)
            if not candidates:
                return None
            runs[role] = _of_one_training(own, candidates)
            if _apart(own, runs[role]):
                self._apart.add(arm.name)
            _check_windows(own, runs[role])
        return runs

    def _value(self, column: Column, seeds: Mapping[int, Mapping[str, Record]]) -> Value | None:
        """Return a column's number over the seeds that have it; ratios are taken in each seed first."""
        numbers = {}
        for seed, runs in seeds.items():
            number = column.value(Row(runs, {role: _loss(record) for role, record in runs.items()}))
            if number is not None:
                numbers[seed] = float(number)
        if not numbers:
            return None
        summary = mean_and_standard_error(list(numbers.values()))
        interval = self._interval(column, seeds[next(iter(numbers))]) if len(numbers) == 1 else None
        return Value(mean=summary["mean"], error=summary["standard_error"], interval=interval, seeds=summary["seeds"])

    def _interval(self, column: Column, runs: Mapping[str, Record]) -> tuple[float, float] | None:
        """Return the 95% interval over the same resampled windows of all runs; None for what windows do not decide."""
        draws = column.value(Row(runs, {role: self._resampled(record) for role, record in runs.items()}))
        if not isinstance(draws, Tensor) or not column.needs:
            return None
        low, high = torch.quantile(draws, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return low, high

    def _resampled(self, record: Record) -> Tensor:
        """Return mean losses of resampled windows, the same draws for every run of as many windows."""
        if id(record) not in self._draws:
            losses = torch.tensor(record["window_losses"], dtype=torch.float64)
            self._draws[id(record)] = bootstrap_means(losses)
        return self._draws[id(record)]


def _loss(record: Record) -> Tensor:
    return torch.tensor(record["report_loss"], dtype=torch.float64)


def _of_one_training(own: Record, candidates: Sequence[Record]) -> Record:
    """Return the record, of several of one run, that shares a checkpoint with another run; else the first."""
    return next((one for one in candidates if {*own["went_through"]} & {*one["went_through"]}), candidates[0])


def _apart(own: Record, other: Record) -> bool:
    """Return whether two runs go on from one parent, by their keys, but from two trainings of it."""
    related = own["parent"] is not None and own["parent"] in (other["parent"], other["key"])
    return related and not {*own["went_through"]} & {*other["went_through"]}


def _check_windows(own: Record, other: Record) -> None:
    """Raise CompareError unless two runs were evaluated on the same text."""
    if own["windows_hash"] != other["windows_hash"]:
        raise CompareError(
            f"{own['key']} and {other['key']} were evaluated on different held-out windows: they are runs of different "
            "data, and cannot stand in one table"
        )


def _drafts(records: Sequence[Record]) -> tuple[str, ...]:
    """Return why a table of these is none to quote; nothing when every run is of a commit."""
    found = [record["provenance"].get("commit") for record in records]
    unclean = sum(commit is None or commit.endswith("+") for commit in found)
    return (f"DRAFT: {unclean} of {len(found)} runs are of a tree that no commit holds.",) if unclean else ()


def _origin(records: Sequence[Record]) -> list[str]:
    """Return a note about where runs were made: commits and devices."""
    commits = sorted({(record["provenance"].get("commit") or "unknown")[:12] for record in records})
    devices = sorted({record["provenance"].get("device") or "an unknown device" for record in records})
    shared = sum(bool(record.get("shared")) for record in records)
    told = [f"Runs of commit {', '.join(commits)} on {', '.join(devices)}."] if records else []
    return [*told, f"Times of {shared} runs that shared a device are left out."] if shared else told


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


def _heads(column: Column, *, quoted: bool) -> list[str]:
    return [column.title, f"paper's {column.title}"] if quoted else [column.title]


def _latex(text: str) -> str:
    for sign, written in (("\\", r"\textbackslash "), ("%", r"\%"), ("&", r"\&"), ("_", r"\_"), ("#", r"\#")):
        text = text.replace(sign, written)
    return text.replace("\u2212", "$-$").replace("±", r"$\pm$").replace("×", r"$\times$")


def _html(text: str) -> str:
    from html import escape

    return escape(text)
