"""What a recipe measures beside training: a benchmark, or an analysis of its arms' runs, as data.

Where a setting's value depends on what was trained or measured before, a recipe writes what it means instead:
`Checkpoint`, `RunOf`, `RecordOf`, `Changes`, `FileOf`, `DataFolder`,
`QuestionFolder`. `saf.experiments.measuring` turns them into paths.
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from saf.bench.kinds import BENCHMARKS
from saf.errors import InputError
from saf.experiments.analyses import ANALYSES, tables
from saf.records.paper import Source
from saf.records.table import Part

_NO_FLAGS = ("on", "processes")
"""What a scale changes beside flags."""
COMMANDS: dict[str, Mapping[str, Any]] = {"bench": BENCHMARKS, "analyze": ANALYSES}
"""The commands that measure, each with its kinds by name."""


@dataclass(frozen=True)
class Checkpoint:
    """Stand for a checkpoint of an arm's run."""

    arm: str
    at: float = 0.5
    """The share of the run's updates after which it was saved; 1 is its last."""


@dataclass(frozen=True)
class RunOf:
    """Stand for the folder of an arm's run, which holds its metrics and events."""

    arm: str


@dataclass(frozen=True)
class RecordOf:
    """Stand for the record of a measurement that comes before."""

    measurement: str


@dataclass(frozen=True)
class Changes:
    """Stand for a JSON file of arms' changes in perplexity, %, against their references: {group: {name: change}}."""

    arms: Mapping[str, Mapping[str, str]]
    """Arms by group and name."""


@dataclass(frozen=True)
class FileOf:
    """Stand for a file of the examples that a task is finetuned on."""

    task: str
    part: Literal["train", "test"]


@dataclass(frozen=True)
class DataFolder:
    """Stand for the folder of the prepared text, which has its tokenizer."""


@dataclass(frozen=True)
class QuestionFolder:
    """Stand for the folder of the zero-shot tasks' questions; the setting is left out, for the hub's, where none is."""


Reference = Checkpoint | RunOf | RecordOf | Changes | FileOf | DataFolder | QuestionFolder


@dataclass(frozen=True, kw_only=True)
class Number:
    """Describe one number of a measurement that stands beside the paper's."""

    title: str
    path: tuple[str | int | Mapping[str, Any], ...]
    """How to find it in the record: names, places in a list, or conditions on the entries of one, of which a
    frozenset lists several values that will do; empty for a number that the paper alone has."""
    paper: str | None = None
    """What the paper has for it, as its text has it."""
    places: int = 3
    """Digits behind the point."""
    signed: bool = False
    scale: float = 1.0
    """What the record's number is multiplied by."""
    mean: bool = False
    """Whether it is the mean over all entries that meet the conditions; otherwise one alone may."""
    largest: bool = False
    """Whether it is the largest of them."""
    scientific: bool = False
    """Whether it is written as 1.19e-7, with three digits, whatever `places` says."""

    def find(self, record: Mapping[str, Any]) -> float | None:
        """Return the number that a record has; None where it has none.

        Raises:
            InputError: Several entries of a list meet the conditions, and neither mean nor largest is asked for.
        """
        values: list[Any] = [record] if self.path else []
        for step in self.path:
            values = [found for value in values for found in self._step(value, step) if found is not None]
        if not values:
            return None
        return self.scale * (max if self.largest else statistics.fmean)(map(float, values))

    def _step(self, value: Any, step: str | int | Mapping[str, Any]) -> list[Any]:
        """Return what one step of the path leads to."""
        if isinstance(step, Mapping):
            met = [entry for entry in value if _meets(entry, step)]
            if len(met) > 1 and not (self.mean or self.largest):
                raise InputError(f"{self.title}: {len(met)} entries meet {dict(step)}; add a condition")
            return met
        if isinstance(step, int):
            return [value[step]] if step < len(value) else []
        return [value.get(step)]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Describe one measurement of a recipe: a run of `saf bench KIND` or `saf analyze NAME`."""

    name: str
    """By which later measurements and `--arms` name it."""
    does: str
    """The words of the command: "bench update", "analyze one-head"."""
    on: tuple[Reference | str, ...] = ()
    """What the command takes before its flags: a checkpoint, or the name of a model that nobody trains here."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Its flags at the paper's scale, by their names without dashes."""
    processes: int = 1
    """Processes that measure together at the paper's scale, a GPU each: `torchrun` starts several."""
    scaled: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What other scales change of its flags, as "on" of what comes before them, and as "processes" of how many measure,
    by the scale's name."""
    numbers: tuple[Number, ...] = ()
    """What stands beside the paper's numbers; the tables of its own kind follow."""
    source: Source | None = None
    """Where the paper has these numbers, if not where the recipe's others are."""
    smoke: bool = True
    """Whether it is made at the smoke scale."""

    def __post_init__(self):
        """Raise InputError for a command that there is not."""
        command, _, kind = self.does.partition(" ")
        if kind not in COMMANDS.get(command, {}):
            known = [f"{command} {kind}" for command, kinds in COMMANDS.items() for kind in kinds]
            raise InputError(f"{self.name!r} does {self.does!r}; expected one of {', '.join(known)}")

    @property
    def kind(self) -> str:
        """Return the kind of its record."""
        return self.does.partition(" ")[2]

    def flags(self, scale: str) -> dict[str, Any]:
        """Return its settings at a scale."""
        changed = self.scaled.get(scale, {})
        return {**self.settings, **{name: value for name, value in changed.items() if name not in _NO_FLAGS}}

    def group(self, scale: str) -> int:
        """Return how many processes measure at a scale."""
        return self.scaled.get(scale, {}).get("processes", self.processes)

    def taken(self, scale: str) -> tuple[Reference | str, ...]:
        """Return what stands before its flags at a scale."""
        return self.scaled.get(scale, {}).get("on", self.on)

    def references(self, scale: str) -> tuple[Reference, ...]:
        """Return everything that its settings at a scale refer to."""
        values = (*self.taken(scale), *self.flags(scale).values())
        return tuple(value for value in values if isinstance(value, Reference))

    def asks(self, scale: str) -> bool:
        """Return whether it asks zero-shot questions of a folder, where one is named."""
        return any(isinstance(reference, QuestionFolder) for reference in self.references(scale))

    def arms(self, scale: str) -> tuple[str, ...]:
        """Return the arms that it reads at a scale."""
        return tuple(name for reference in self.references(scale) for name in _arms_of(reference))


def speedup(
    title: str,
    rate: float,
    point: tuple[int, int],
    paper: str | None,
    *,
    backend: str = "toeplitz",
    way: str = "update",
) -> Number:
    """Return the accepted ratio, baseline's time over an arm's, at a point: tokens of context, sequences."""
    length, sequences = point
    conditions = {"backend": backend, "rate": rate, "variant": way, "refused": False}
    shape = {"length": length, "batch_size": sequences}
    return Number(title=title, path=("rows", {**conditions, "point": shape}, "ratio"), paper=paper)


def peak_change(
    title: str, rate: float, point: tuple[int, int], paper: str | None, *, backend: str = "toeplitz"
) -> Number:
    """Return the change of an arm's peak memory against the ordinary one, %, at a point."""
    shape = {"length": point[0], "batch_size": point[1]}
    path = ("memory", {"backend": backend, "rate": rate, "point": shape}, "change_percent")
    return Number(title=title, path=path, paper=paper, places=2, signed=True)


def tables_of(record: Mapping[str, Any]) -> list[Part]:
    """Return the paragraphs, tables and notes that a measurement's record has in its own command."""
    return tables(record) if record["kind"] in ANALYSES else BENCHMARKS[record["kind"]].tables(record)


def _arms_of(reference: Reference) -> Iterator[str]:
    """Yield the names of the arms that a reference reads."""
    if isinstance(reference, Changes):
        for group in reference.arms.values():
            yield from group.values()
    elif isinstance(reference, Checkpoint | RunOf):
        yield reference.arm


def _meets(entry: Any, conditions: Mapping[str, Any]) -> bool:
    """Return whether an entry has what is asked for; conditions on an entry's own dictionary may leave names out."""
    return isinstance(entry, Mapping) and all(_has(entry.get(name), value) for name, value in conditions.items())


def _has(found: Any, value: Any) -> bool:
    """Return whether a value is what a condition asks for."""
    if isinstance(value, Mapping):
        return _meets(found, value)
    return found in value if isinstance(value, frozenset) else found == value
