"""What a kind of benchmark is: an object that names its settings, measures, and makes tables of its records."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from saf.bench.harness.arms import FLEX
from saf.bench.harness.baselines import free_backend
from saf.bench.harness.environment import clocks_recorded, environment
from saf.bench.harness.kernels import attention_table, kernel_words
from saf.bench.harness.measured import OTHER_DEVICE, Group, Record, by_point, groups_of, measures, model_of
from saf.bench.harness.recorder import Recorder, Say, say_on_stderr
from saf.bench.harness.runner import Context
from saf.bench.harness.settings import BenchSettings, Point, SpeedSettings, parse_shape
from saf.bench.harness.speed_tables import (
    DETAILS,
    WIDE,
    bound_notes,
    caveats,
    is_compiled,
    memory_table,
    memory_words,
    protocol,
    refusals,
    speed_table,
    ways,
    wrong_kernels,
)
from saf.bench.harness.timing import Budget
from saf.errors import InputError
from saf.machine.execution import Execution
from saf.machine.processes import agreed, group_place
from saf.ops import BACKENDS
from saf.ops.live import KERNELS
from saf.records.paper import Quoted, footnotes
from saf.records.table import Cell, Notes, Part, Table

Asked = TypeVar("Asked", bound=BenchSettings)
AskedSpeed = TypeVar("AskedSpeed", bound=SpeedSettings)
Shapes = Mapping[str, tuple[tuple[int, ...], ...]]
USUAL_RATES = (0.25, 0.5)
"""Shares of heads that the paper's main tables freeze."""
_PLACED = {"even": "as many heads in every layer frozen", "groups": "whole groups frozen"}
"""Placements of frozen heads that are not the usual one, in words."""


class Kind(ABC):
    """Describe the records of one kind of benchmark."""

    name: ClassVar[str]
    """As the command line and records have it."""
    title: ClassVar[str]
    """The heading of its records in documents."""

    @abstractmethod
    def tables(self, record: Record, *, brief: bool = False) -> list[Part]:
        """Return what a record says: paragraphs on how it was measured, tables, notes to read them by.

        `brief`, for a terminal, leaves out columns and tables that would break its lines.
        """

    @abstractmethod
    def conditions(self, record: Record) -> str:
        """Return in one paragraph how a record was measured, and against what."""

    @abstractmethod
    def measured(self, row: Record) -> Hashable | None:
        """Return what a row measures, its point and its arm: of two rows of the same the newer one stands.

        None for a row that only serves others, such as a control.
        """

    @abstractmethod
    def overview(self, records: Sequence[tuple[Cell, Record]]) -> list[Part]:
        """Return one table of several records, each with the cell that names its file, and what to know about it."""

    def title_of(self, record: Record) -> str:
        """Return the heading for one record."""
        return self.title

    def finding(self, record: Record) -> str:
        """Return what a record found in a few words, for a headline; its heading where it tells nothing so short."""
        return self.title_of(record)

    def unusual(self, record: Record) -> str:
        """Return in words which settings of a record make its rows measurements of their own; "" where none does.

        What it says is part of what the rows measure, beside `measured`: they take no place of rows without it.
        """
        return ""

    def failures(self, record: Record) -> list[str]:
        """Name the rows of a record that are not within their limits; none where rows have no limits."""
        return []


class Benchmark(Kind, Generic[Asked]):
    """Measure one kind of benchmark, from its settings to its record."""

    settings: type[Asked]
    shared: ClassVar[bool] = False
    """Whether several processes measure it together."""

    @abstractmethod
    def measure(self, settings: Asked, *, out: Path | None = None, say: Say = say_on_stderr) -> dict[str, Any]:
        """Run the benchmark and return its record, written to `out` after every point.

        Raises:
            InputError: Settings that name something unknown or have no effect here, or `out` exists.
            UnsupportedError: A device that is not there.
        """


class SpeedKind(Benchmark[AskedSpeed]):
    """Measure arms beside baselines, in pairs: what updates, prefill and operators have in common."""

    panel: ClassVar[str]
    """The heading of its bars."""
    gains: ClassVar[str]
    """What its speedups are of, in a few words: "update"."""
    subject: ClassVar[str]
    """What became faster, in a sentence: "updates"."""
    more_kernels: ClassVar[tuple[str, ...]] = ()
    """Attention kernels of its own, beside those of whole sequences."""
    same: ClassVar[str] = "the same model"
    """What the baseline is, but for its heads."""
    up_to_repeats: ClassVar[bool] = True
    """Whether a timed block may have fewer calls than `repeats`."""
    micro_batches: ClassVar[bool] = False
    """Whether a point has micro-batches."""
    by_layer: ClassVar[bool] = False
    """Whether models may be compiled by their layers."""
    grids: ClassVar[Shapes]
    """Points by the name of their grid."""
    grid_rates: ClassVar[Mapping[str, tuple[float, ...]]] = {}
    """Rates of the grids that have more than the usual ones."""

    def measure(self, settings: AskedSpeed, *, out: Path | None = None, say: Say = say_on_stderr) -> dict[str, Any]:
        """Run the benchmark and return its record, written to `out` after every point.

        Raises:
            InputError: Settings that name something unknown or have no effect here, or `out` exists.
            UnsupportedError: A device that is not there.
        """
        budget = Budget(settings.seconds)
        with agreed():
            _check_names(settings, self.more_kernels)
            self.check_shape(settings)
            points = self.points(settings)
            execution = Execution.of(settings.device, compile=settings.compile)
            recorder = Recorder(out, kind=self.name, settings=settings.to_dict(), budget=budget, say=say)
            if execution.by_layer and not self.by_layer:
                raise InputError(f"compile='layers' is for updates, {self.name} has none; use 'auto', 'on' or 'off'")
            _check_flex(settings, execution)
            self.check_compile(settings, execution)
        with recorder, free_backend():
            recorder.trace(**environment(execution.device, execution.device_name), processes=group_place()[1])
            with clocks_recorded(recorder, execution.device):
                self.measure_points(Context(settings, execution, recorder), settings, points)
        return recorder.record

    @abstractmethod
    def measure_points(self, context: Context, settings: AskedSpeed, points: Sequence[Point]) -> None:
        """Measure every point that there is time for."""

    @abstractmethod
    def check_shape(self, settings: AskedSpeed) -> None:
        """Raise InputError for the name of a model or shape that there is none of."""

    @abstractmethod
    def check_compile(self, settings: AskedSpeed, execution: Execution) -> None:
        """Raise InputError for settings that need something compiled where nothing is, or that compile nothing."""

    @abstractmethod
    def quoted(self, row: Record) -> Quoted | None:
        """Return the paper's speedup of frozen heads at the shape of a row; None where it has none."""

    def quoted_memory(self, record: Record, entry: Record) -> Quoted | None:
        """Return the paper's peak memory at the shape of an entry; None where it has none."""
        return None

    def apart(self, row: Record) -> str:
        """Return what tells an arm's frozen heads from those beside another kernel, in words; "" where none does."""
        return ""

    def points(self, settings: AskedSpeed) -> list[Point]:
        """Return the points asked for, or the grid's; raise InputError for one that is not numbers joined by x."""
        asked = [parse_shape(text, self.name, micro_batches=self.micro_batches) for text in settings.points]
        shapes = asked or self.grids[settings.grid]  # type: ignore[attr-defined]
        return [Point(shape[0], shape[1], shape[2] if self.micro_batches else None) for shape in shapes]

    def rates(self, settings: AskedSpeed) -> tuple[float, ...]:
        """Return the rates asked for, or the grid's; without 0, which is the control."""
        usual = USUAL_RATES
        if not settings.points:
            usual = self.grid_rates.get(settings.grid, USUAL_RATES)  # type: ignore[attr-defined]
        return tuple(rate for rate in dict.fromkeys(settings.rates or usual) if rate > 0)

    def groups(self, record: Record, *, file: str = "") -> list[Group]:
        """Return a record's rows in groups of what one baseline is compared with; `file` names theirs among several."""
        return groups_of(record, quoted=self.quoted, apart=self.apart, unusual=self.unusual(record), file=file)

    def main_groups(self, record: Record) -> list[Group]:
        """Return the groups that a summary of all records shows: those of its rows, or of their means."""
        return self.groups(record)

    def unusual(self, record: Record) -> str:
        """Return in words which settings make other measurements of a record's rows than the usual ones would."""
        settings, driver = record["settings"], record["provenance"].get("driver")
        usual = {field.name: field.default for field in fields(self.settings)}
        words = [_PLACED.get(settings.get("placement", ""), "")]
        if settings.get("per_layer"):
            words.append(f"{' '.join(map(str, settings['per_layer']))} heads of the layers frozen")
        asked = settings.get("compile", usual["compile"])
        if asked == "layers":
            words.append("compiled by layers")
        elif is_compiled(asked, driver) != is_compiled(str(usual["compile"]), driver):
            words.append("compiled" if is_compiled(asked, driver) else "not compiled")
        if settings.get("activation_checkpointing"):
            words.append("layers computed again")
        if settings.get("parallel", "none") != "none":
            count = record["provenance"].get("processes", 1)
            words.append(f"{settings['parallel']}, {count} process{'es' * (count > 1)}")
        if settings.get("fresh"):
            words.append("processes of their own")
        if settings.get("dtype", "auto") not in ("auto", "bf16" if driver else "fp32"):
            words.append(settings["dtype"])
        if OTHER_DEVICE in record["provenance"]:
            words.append(f"on {record['provenance'][OTHER_DEVICE]}")
        return ", ".join(filter(None, words))

    def memory_of(self, record: Record) -> str:
        """Return in words whose peak memory a record has: its model, and what is unusual."""
        return ", ".join(filter(None, [model_of(record), self.unusual(record)]))

    def tables(self, record: Record, *, brief: bool = False) -> list[Part]:
        """Return how speeds were measured, a table for each way of running, peak memory, kernels, and notes."""
        groups = self.groups(record)
        parts: list[Part] = []
        if groups:
            parts.append(f"{self.conditions(record)} {kernel_words(record)}".strip())
        for way, chosen in ways(groups).items():
            table = speed_table(chosen).titled(way)
            parts.append(table.without(WIDE) if brief else table)
        if record["memory"]:
            parts += [memory_words(record), memory_table(record, self.memory_of(record), self.quoted_memory)]
        if record["kernels"] and not brief:
            parts.append(attention_table(record).titled("Attention kernels in one pass"))
        notes = [*caveats(record, groups), *self.read_by(groups), *bound_notes(groups), *self.paper_notes([record])]
        return [*parts, Notes(notes)]

    def conditions(self, record: Record) -> str:
        """Return how a record's speeds were measured, and against what; of one that timed nothing, its memory."""
        groups = self.groups(record)
        if not groups:
            return memory_words(record) if record["memory"] else ""
        return protocol(record, groups, same=self.same, up_to_repeats=self.up_to_repeats)

    def measured(self, row: Record) -> Hashable | None:
        """Return what an arm's row measures: model or part, point, way of running, baseline, arm."""
        return None if row["role"] in ("control", "free") else (measures(row), self.apart(row))

    def overview(self, records: Sequence[tuple[Cell, Record]]) -> list[Part]:
        """Return a table for each way of running, one of peak memory, and notes to read them by."""
        found = [group for cell, record in records for group in self.groups(record, file=cell.text) if group.arms]
        groups = by_point(found)
        parts = self.speeds(records, groups)
        memory = [
            (cell, memory_table(record, self.memory_of(record), self.quoted_memory))
            for cell, record in records
            if record["memory"]
        ]
        parts += [Table.stacked("", memory).used()] * bool(memory)
        notes = [*refusals(groups), *(note for _, record in records for note in wrong_kernels(record))]
        notes += [*self.read_by(groups), *bound_notes(groups), *self.paper_notes([record for _, record in records])]
        return [*parts, Notes(notes)]

    def speeds(self, records: Sequence[tuple[Cell, Record]], groups: Sequence[Group]) -> list[Part]:
        """Return the tables of speedups in an overview of several records, whose `groups` these are: one a way."""
        sources = {cell.text: cell for cell, _ in records}
        return [speed_table(chosen, sources).without(DETAILS).titled(way) for way, chosen in ways(groups).items()]

    def read_by(self, groups: Sequence[Group]) -> list[str]:
        """Return lines on how to read rows of a kind, beside those of every kind."""
        return []

    def paper_notes(self, records: Sequence[Record]) -> list[str]:
        """Return a line for each of the paper's tables that is quoted, with the conditions of its numbers."""
        speeds = [arm.paper for record in records for group in self.groups(record) for arm in group.arms]
        memory = [self.quoted_memory(record, entry) for record in records for entry in record["memory"]]
        notes = [f"Paper, {note}" for note in footnotes([*speeds, *memory])]
        return notes or ["The paper has no number at these shapes."]


def _check_names(settings: SpeedSettings, more_kernels: tuple[str, ...]) -> None:
    """Raise InputError for names nothing answers to."""
    known = ("auto", FLEX, *KERNELS, *more_kernels)
    for name in (*settings.kernels, *(settings.others or ())):
        if name not in known:
            raise InputError(f"unknown attention kernel {name!r}; expected one of {', '.join(known)}")
    for name in settings.backends:
        if name not in BACKENDS:
            raise InputError(f"unknown backend {name!r}; expected one of {', '.join(BACKENDS)}")


def names_flex(settings: SpeedSettings) -> bool:
    """Return whether flex attention is among the kernels asked for."""
    return FLEX in (*settings.kernels, *(settings.others or ()))


def _check_flex(settings: SpeedSettings, execution: Execution) -> None:
    if names_flex(settings) and execution.device.type == "cuda" and not execution.compile:
        raise InputError("flex attention is a kernel only where it is compiled; use --compile on, or leave flex out")
