"""The numbers of a table's rows from records: ratios in each seed first, then their mean, or an interval."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saf.errors import CompareError
from saf.evaluate.paired import bootstrap_means, mean_and_standard_error
from saf.experiments.columns import AGAINST, COLUMNS, OWN, REFERENCE, Column, Record, Row
from saf.experiments.recipe import Arm, Recipe

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


class Rows:
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
