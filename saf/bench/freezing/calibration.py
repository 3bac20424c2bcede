"""`saf bench calibration`: interventions stage by stage, warm and at first use, beside a dense collection."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from saf.bench.freezing.dense import measure_dense
from saf.bench.freezing.fits import Goals, measure_fits, read_goals
from saf.bench.freezing.intervention import Event, Interventions, row_of
from saf.bench.freezing.model import build, describe, sequences
from saf.bench.freezing.settings import FEWEST, CalibrationSettings, points_of
from saf.bench.freezing.tables import WARM, intervention_tables, overview, row_line
from saf.bench.harness.environment import clean_process, clocks_recorded, empty_kernel_cache, environment
from saf.bench.harness.kind import Benchmark
from saf.bench.harness.measured import Record
from saf.bench.harness.recorder import Recorder, Say, say_on_stderr, unmeasured
from saf.bench.harness.settings import Point
from saf.bench.harness.timing import Budget
from saf.calibration import plan_calibration
from saf.data import TokenData
from saf.machine.execution import Execution
from saf.opening import find_model
from saf.records.quantities import percent, seconds
from saf.records.table import Cell, Part
from saf.statistics import AttentionStatistics

BARS = {("124m", 4096, 32): 2.0, ("1b", 8192, 16): 15.0}
"""Seconds that a warm intervention may take on a GPU, by model, context and sequences."""


class CalibrationKind(Benchmark[CalibrationSettings]):
    """Measure interventions."""

    name = "calibration"
    title = "Freezing: seconds"
    settings = CalibrationSettings

    def measure(
        self, settings: CalibrationSettings, *, out: Path | None = None, say: Say = say_on_stderr
    ) -> dict[str, Any]:
        """Run the benchmark and return its record, written to `out` after every row.

        Raises:
            InputError: Settings that name something unknown, a folder or file that cannot be used, or `out` exists.
            UnsupportedError: A device that is not there.
        """
        budget = Budget(settings.seconds)
        points = points_of(settings) if settings.rates else []
        execution = Execution.of(settings.device, precision=settings.precision, compile="off")
        goals = None if settings.statistics is None else read_goals(settings.statistics)
        inputs = inputs_of(settings)
        recorder = Recorder(out, kind=self.name, settings=settings.to_dict(), budget=budget, say=say)
        with recorder, empty_kernel_cache():
            recorder.trace(**environment(execution.device, execution.device_name), **inputs)
            with clocks_recorded(recorder, execution.device):
                if goals is not None:
                    fields = {"part": "fit", "of": str(settings.statistics)}
                    record_fits(recorder, goals, settings, execution, fields)
                for point in points:
                    with clean_process():
                        CalibrationPoint(recorder, settings, execution, point).measure()
        return recorder.record

    def conditions(self, record: Record) -> str:
        """Return what the times are."""
        return WARM

    def measured(self, row: Record) -> Hashable | None:
        """Return the part of a freezing, and the model, point and rate, or the statistics that were fitted."""
        point = tuple((row.get("point") or {"length": row.get("length")}).items())
        return row["part"], row.get("model", row.get("of")), point, row.get("rate")

    def overview(self, records: Sequence[tuple[Cell, Record]]) -> list[Part]:
        """Return one row an intervention, one a fit, one a dense collection."""
        return overview(records)

    def finding(self, record: Record) -> str:
        """Return what the first freezing took."""
        row = next((row for row in record["rows"] if row["part"] == "intervention"), None)
        if row is None:
            return self.title
        what = f"{percent(row['rate'])} of the heads of {Path(row['model']).name}"
        return f"Freezing {what} took {seconds(row['seconds'])}"

    def tables(self, record: Record, *, brief: bool = False) -> list[Part]:
        """Return a table of stages for each intervention, one of fits, one of dense collections."""
        return [*intervention_tables(record), *unmeasured(record)]


def inputs_of(settings: CalibrationSettings) -> dict[str, Any]:
    """Return the hashes of the checkpoint and the data that are measured, for the provenance of a record.

    Raises InputError for a folder without a model or data, CheckpointError for a damaged checkpoint.
    """
    checkpoint = None if settings.model_folder is None else find_model(settings.model_folder).checkpoint
    return {
        "checkpoints": {} if checkpoint is None else {"model": checkpoint.hash},
        "data": {} if settings.data is None else {"calibration": TokenData.open(settings.data).fingerprint},
    }


class CalibrationPoint:
    """Measure one model at one context and number of sequences."""

    def __init__(self, recorder: Recorder, settings: CalibrationSettings, execution: Execution, point: Point):
        self.recorder, self.settings, self.execution, self.point = recorder, settings, execution, point
        model, weights = build(settings, point, execution.device)
        ids, text = sequences(settings, point, model)
        self.model = model
        self.interventions = Interventions(model, ids, execution)
        self.fields = {
            "model": settings.model if settings.model_folder is None else str(settings.model_folder),
            "point": point.to_dict(),
            "precision": execution.precision,
            "weights": weights,
            "text": text,
            "shape": describe(model),
        }

    def measure(self) -> None:
        """Measure every part that there is time for; an error in one is recorded, and the others go on."""
        row, statistics = None, None
        for rate in self.settings.rates:
            with self._recorded(f"{self.point.name} {100 * rate:g}%"):
                found = self._intervention(rate)
                row, statistics = found or (row, statistics)
        if statistics is None or row is None:
            return
        if self.settings.fit_all:
            with self._recorded(f"{self.point.name} fit of all heads"):
                head = self.fields | {"part": "fit", "of": self.fields["model"]}
                record_fits(self.recorder, Goals.of(statistics), self.settings, self.execution, head)
        if self.settings.dense_layers:
            with self._recorded(f"{self.point.name} dense collection"):
                self._dense(row, statistics)

    @contextmanager
    def _recorded(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.recorder.leave_out(what, f"{type(error).__name__}: {error}")

    def _intervention(self, rate: float) -> tuple[dict[str, Any], AttentionStatistics] | None:
        """Freeze this share of heads as often as the settings ask; return the row and the statistics of the last time.

        Return None where time ran out before a median of warm interventions could be taken.
        """
        recorder, name = self.recorder, f"{self.point.name} {100 * rate:g}%"
        with self.execution.autocast():
            plan = plan_calibration(self.model, self.interventions.ids)
        recorder.say(f"{name}: {plan}")
        events: list[Event] = []
        while len(events) <= self.settings.repeats:
            if not recorder.budget.fits(events[-1].seconds if events else 0):
                recorder.leave_out(name, f"interventions {len(events) + 1} to {self.settings.repeats + 1}: out of time")
                break
            events.append(self.interventions.once(rate))
            recorder.say(f"{name}: {'first use' if len(events) == 1 else 'warm'} {events[-1].seconds:.3f} s")
        if len(events) <= FEWEST:
            recorder.leave_out(name, f"{max(0, len(events) - 1)} warm interventions; a median needs {FEWEST}")
            return None
        key = (self.settings.model, self.point.length, self.point.batch_size)
        on_gpu = self.execution.device.type == "cuda" and self.settings.model_folder is None
        row = {
            "part": "intervention",
            **self.fields,
            "rate": rate,
            **row_of(events[0], events[1:]),
            "peak_kind": "allocated" if self.execution.device.type == "cuda" else "resident",
            "planned_bytes": plan.device_bytes,
            "passes": len(plan.groups),
            "bar_seconds": BARS.get(key) if on_gpu else None,
        }
        _keep(self.recorder, row)
        return row, events[-1].report.statistics

    def _dense(self, row: dict[str, Any], statistics: AttentionStatistics) -> None:
        """Time the statistics as collected from whole matrices, and keep a row that compares both ways."""
        budget = self.recorder.budget
        found = measure_dense(self.interventions, statistics, layers=self.settings.dense_layers, budget=budget)
        if found is None:
            self.recorder.leave_out(f"{self.point.name} dense collection", "out of time")
            return
        ours = row["stages"]["statistics"]["median"]
        whole = row["seconds"] - ours + found["seconds"]
        dense = {
            "part": "dense",
            **self.fields,
            **found,
            "statistics_seconds": ours,
            "ratio": found["seconds"] / ours,
            "intervention_seconds": whole,
            "intervention_ratio": whole / row["seconds"],
            "refused": not found["agrees"],
        }
        _keep(self.recorder, dense)


def record_fits(
    recorder: Recorder, goals: Goals, settings: CalibrationSettings, execution: Execution, fields: dict[str, Any]
) -> None:
    """Fit all heads, and record and say the row."""
    found = measure_fits(goals, repeats=settings.repeats, device=execution.device, budget=recorder.budget)
    if found is None:
        recorder.leave_out(f"fit of {fields['of']}", "out of time")
        return
    _keep(recorder, {**fields, **found})


def _keep(recorder: Recorder, row: dict[str, Any]) -> None:
    recorder.show([row])
    recorder.keep()
    recorder.say(row_line(row))
