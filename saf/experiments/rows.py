"""The numbers of a table's rows from records: ratios in each seed first, then their mean, or an interval."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saf.errors import CompareError
from saf.evaluate.paired import block_length, bootstrap_means, mean_and_standard_error
from saf.experiments.columns import AGAINST, COLUMNS, OWN, REFERENCE, Column, Record, Row
from saf.experiments.recipe import Arm, Recipe
from saf.selection import budget

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
    each: tuple[float, ...] = ()
    """The number of every seed, in their order."""

    @property
    def reach(self) -> tuple[float, float] | None:
        """Return what it may be off by: a standard error either way, or the interval of one seed; None without both."""
        return self.interval if self.error is None else (self.mean - self.error, self.mean + self.error)


class Rows:
    """Make the numbers of arms, in each seed from the records of one training of their parent."""

    def __init__(self, recipe: Recipe, records: Records):
        """Take every record of every arm and seed."""
        self.recipe, self.records = recipe, records
        self.arms = {arm.name: arm for arm in recipe.arms}
        self.lacking: set[tuple[str, str]] = set()
        self._apart: set[str] = set()
        self._busy: set[str] = set()
        self._other_heads: set[str] = set()
        self._fewer_heads: dict[str, str] = {}
        self._draws: dict[tuple[str, int], Tensor] = {}

    def values(self, arm: Arm) -> dict[str, Value | None]:
        """Return the numbers of one arm by column, and take note of those for which another arm was not run."""
        found = {}
        if any(self._has_other_heads(arm, own[0], seed) for seed, own in self.records[arm.name].items()):
            self._other_heads.add(arm.name)
        if fewer := list(
            filter(None, (self._fewer(arm, own[0], seed) for seed, own in self.records[arm.name].items()))
        ):
            self._fewer_heads[arm.name] = "{} of {}".format(*min(fewer))
        for name in self.recipe.columns:
            column, seeds = COLUMNS[name], self.records[arm.name]
            runs = {seed: self._runs(arm, own[0], seed, column) for seed, own in seeds.items()}
            known = {seed: row for seed, row in runs.items() if row is not None}
            if column.timed:
                known = {seed: row for seed, row in known.items() if not any(run.get("shared") for run in row.values())}
            busy = {seed for seed, row in known.items() if column.impossible(Row(row, {}))}
            self._busy |= {arm.name} if busy else set()
            known = {seed: row for seed, row in known.items() if seed not in busy}
            found[name] = self._value(column, known)
            named = bool(column.needs) and all(self._names(arm, role) for role in column.needs)
            if found[name] is None and named and None in runs.values():
                self.lacking.add((arm.name, name))
        return found

    def notes(self) -> list[str]:
        """Return what is to be known of rows made so far, a note a kind, with the arms that it is about."""
        told = {
            "Compared with a run of another training of the same parent, whose noise stands in the change": self._apart,
            "Heads are those of another training than the one they are compared with, so that they differ": (
                self._other_heads
            ),
            "Left out, since heads that cost nothing would not save so much, so that the machine was busy": self._busy,
            "Given what the speed of a rate buys, with fewer heads than it asks for, so that tokens are too many": {
                f"{name} (as few as {count})" for name, count in self._fewer_heads.items()
            },
        }
        return [f"{words}: {', '.join(sorted(arms))}." for words, arms in told.items() if arms]

    def _names(self, arm: Arm, role: str) -> str | None:
        """Return the arm that is something to another one; None when it names none."""
        first, _, reference = role.partition(" ")
        if first == OWN:
            return arm.name
        named = {REFERENCE: arm.reference, AGAINST: arm.against, **arm.beside}.get(first)
        return self.arms[named].reference if reference and named else named

    def _has_other_heads(self, arm: Arm, own: Record, seed: int) -> bool:
        """Return whether a run that should have another one's heads has others than those of the one beside it."""
        candidates = self.records.get(arm.heads or "", {}).get(seed)
        if not candidates:
            return False
        mine, theirs = (
            (one.get("intervention") or {}).get("heads") for one in (own, _of_one_training(own, candidates))
        )
        return sorted(mine or []) != sorted(theirs or [])

    def _fewer(self, arm: Arm, own: Record, seed: int) -> tuple[int, int] | None:
        """Return how many heads a run that was given a speed has frozen or pruned, and how many the speed is of.

        None where they are as many, or no speed of a rate was given.
        """
        chosen = self.records.get(arm.heads or "", {}).get(seed) or [own]
        told, given = ((one.get("settings") or {}) for one in (_of_one_training(own, chosen), own))
        if (rate := told.get("freeze.rate")) is None or "match_speed" not in given or "num_heads" not in own:
            return None
        changed, asked = len((own.get("intervention") or {}).get("heads") or ()), budget(rate, own["num_heads"])
        return (changed, asked) if changed < asked else None

    def _runs(self, arm: Arm, own: Record, seed: int, column: Column) -> dict[str, Record] | None:
        """Return the records that a column needs of one seed by what they are; None when one is missing."""
        runs = {OWN: _reported(own, arm)}
        for role in column.needs:
            name = self._names(arm, role)
            candidates = self.records.get(name or "", {}).get(seed)
            if not candidates:
                return None
            assert name is not None, role
            # The reference of an arm beside the row is that arm's own pair.
            beside = runs.get(role.partition(" ")[0], own)
            runs[role] = _reported(_of_one_training(beside, candidates), self.arms[name])
            if _apart(beside, runs[role], self.records.get(arm.parent or "", {}).get(seed, ())):
                self._apart.add(arm.name)
            _check_windows(own, runs[role])
        return runs

    def _value(self, column: Column, seeds: Mapping[int, Mapping[str, Record]]) -> Value | None:
        """Return a column's number over the seeds that have it; ratios are taken in each seed first."""
        numbers = {}
        for seed, runs in seeds.items():
            number = column.value(Row(runs, {role: _mean(record) for role, record in runs.items()}))
            if number is not None:
                numbers[seed] = float(number)
        if not numbers:
            return None
        summary = mean_and_standard_error(list(numbers.values()))
        interval = self._interval(column, seeds[next(iter(numbers))]) if len(numbers) == 1 else None
        each = tuple(numbers[seed] for seed in sorted(numbers))
        return Value(
            mean=summary["mean"],
            error=summary["standard_error"],
            interval=interval,
            seeds=summary["seeds"],
            each=each,
        )

    def _interval(self, column: Column, runs: Mapping[str, Record]) -> tuple[float, float] | None:
        """Return the 95% interval over the same resampled windows of all runs; None for what windows do not decide."""
        if not column.needs or not all(map(sample_of, runs.values())):
            return None
        samples = {role: _sample(record) for role, record in runs.items()}
        means = {role: sample.mean().requires_grad_() for role, sample in samples.items()}
        number = column.value(Row(runs, means))
        if not isinstance(number, Tensor):
            return None
        # What each window does to the number, to first order, tells which of them go together.
        weights = torch.autograd.grad(number, list(means.values()), allow_unused=True, materialize_grads=True)
        effects = torch.stack([weight * samples[role] for role, weight in zip(means, weights, strict=True)]).sum(0)
        block = block_length(effects)
        draws = column.value(Row(runs, {role: self._resampled(record, block) for role, record in runs.items()}))
        assert isinstance(draws, Tensor)
        low, high = torch.quantile(draws, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return low, high

    def _resampled(self, record: Record, block: int) -> Tensor:
        """Return means over resampled blocks of windows or questions, the same draws for every run of as many."""
        key = record["provenance"]["checkpoints"]["final"], block
        if key not in self._draws:
            self._draws[key] = bootstrap_means(_sample(record), block=block)
        return self._draws[key]


def _mean(record: Record) -> Tensor:
    """Return the loss on held-out text, or the share of questions answered rightly."""
    return torch.tensor(record.get("accuracy", record["report_loss"]), dtype=torch.float64)


def sample_of(record: Record) -> Sequence[float] | None:
    """Return what a record was judged by, by window or question; None of associative recall."""
    return record.get("window_losses") or record.get("right")


def _sample(record: Record) -> Tensor:
    """Return what a record was judged by as float64."""
    return torch.tensor(sample_of(record), dtype=torch.float64)


def _reported(record: Record, arm: Arm) -> Record:
    """Return a record with the numbers of the report that a row is of; its own, of the end, where it names none."""
    if arm.report is None:
        return record
    reports = [record["reports"][update] for update in sorted(record.get("reports") or {}, key=int)]
    return {**record, **reports[arm.report]} if arm.report < len(reports) else {**record, "recall": None}


def _of_one_training(own: Record, candidates: Sequence[Record]) -> Record:
    """Return the record, of several of one run, that shares a checkpoint with another run; else the first."""
    return next((one for one in candidates if {*own["went_through"]} & {*one["went_through"]}), candidates[0])


def _apart(own: Record, other: Record, parents: Sequence[Record]) -> bool:
    """Return whether two runs go on from one parent, by their keys, but not from one of its trainings `parents`.

    Runs that branched off at different moments share no checkpoint; that training shares one with each of them.
    """
    related = own["parent"] is not None and own["parent"] in (other["parent"], other["key"])
    mine, theirs = {*own["went_through"]}, {*other["went_through"]}
    same = any(mine & {*one["went_through"]} and theirs & {*one["went_through"]} for one in parents)
    return related and not mine & theirs and not same


def _check_windows(own: Record, other: Record) -> None:
    """Raise CompareError unless two runs were judged by the same text, or the same questions."""
    for what, of in (("windows_hash", "held-out windows"), ("questions_hash", "questions")):
        if own.get(what) != other.get(what):
            raise CompareError(
                f"{own['key']} and {other['key']} were evaluated on different {of}: they are runs of different data, "
                "and cannot stand in one table"
            )
