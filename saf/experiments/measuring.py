"""Planning and making the measurements of recipes: each once however many recipes name it, after the runs they read.

A measurement's key is the hash of its command, its settings, and the keys of what it reads. What was measured stays:
`STORE/measurements/KEY.json` is the record that its command wrote, and tables are made of it alone.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from saf.errors import InputError, SafError
from saf.experiments.analyses import ANALYSES
from saf.experiments.columns import change_of
from saf.experiments.execution import Outcome
from saf.experiments.launching import Launch, Stop, flag_words, last_line
from saf.experiments.measurement import (
    Checkpoint,
    DataFolder,
    FileOf,
    Measurement,
    QuestionFolder,
    RecordOf,
    Reference,
    RunOf,
)
from saf.experiments.plan import Plan, kept_moments
from saf.experiments.planned_run import SCHEMA, PlannedRun
from saf.experiments.recipe import Recipe
from saf.experiments.store import Store
from saf.records.files import write_json
from saf.records.result import read_result
from saf.schedules import OneTime
from saf.tasks.zero_shot import ZERO_SHOT, find_questions, questions_hash
from saf.train.checkpoint import step_name
from saf.train.loop import StopRequest
from saf.train.observer import duration

QUESTIONS = "zero-shot questions"
"""What the questions of a folder are called among the examples that a record names."""


@dataclass(frozen=True)
class Given:
    """Hold what a reference stands for in one plan, by the keys of the runs or measurements that it reads."""

    run: str | None = None
    """The run whose folder, or checkpoint after `step`, is meant."""
    step: int | None = None
    measurement: str | None = None
    changes: Mapping[str, Mapping[str, tuple[str, str]]] = field(default_factory=dict)
    """By group and name, a run and the one that it is compared with."""
    named: tuple[str, ...] = ()
    """Of what the command was given: the fingerprint of the text; or a task, which of its files, and their sum."""
    path: Path | None = field(default=None, compare=False)
    """Where that is, if it is known."""

    @property
    def task(self) -> str | None:
        """Return the task whose examples it is a file of; None for anything else."""
        return self.named[0] if len(self.named) > 1 else None

    def to_json(self) -> list[Any]:
        """Return what decides a measurement's outcome."""
        changes = {group: dict(arms) for group, arms in self.changes.items()}
        return [self.run, self.step, self.measurement, changes, *([self.named] if self.named else [])]


HUBS = Given()
"""The questions of the hub, which no setting names."""


@dataclass(frozen=True, kw_only=True)
class PlannedMeasurement:
    """Describe one measurement that a plan makes."""

    key: str
    does: str
    on: tuple[Given | str, ...]
    settings: Mapping[str, Any]
    """Flags; a `Given` stands for a path."""
    seed: int | None
    """Of the runs that it reads; None where it reads none."""
    processes: int = 1
    """How many make it together, a GPU each."""
    tables: tuple[tuple[str, str], ...]
    """The recipes that it stands in, each with its name there."""

    @property
    def title(self) -> str:
        """Return the measurement in words."""
        recipe, name = self.tables[0]
        more = f" and {len(self.tables) - 1} more" if len(self.tables) > 1 else ""
        return f"{recipe}/{name}{more}" + ("" if self.seed is None else f", seed {self.seed}")

    @property
    def reads(self) -> tuple[Given, ...]:
        """Return everything that it reads."""
        return tuple(value for value in (*self.on, *self.settings.values()) if isinstance(value, Given))

    def runs_read(self, plan: Plan) -> list[PlannedRun]:
        """Return the runs that it reads."""
        return [plan.runs[given.run] for given in self.reads if given.run in plan.runs]

    @property
    def needed(self) -> set[str]:
        """Return the keys of the runs and measurements that it reads."""
        return {key for given in self.reads for key in _keys(given)}


@dataclass(kw_only=True)
class Measurements:
    """Hold the measurements of a plan's recipes, in an order that they can be made in."""

    planned: dict[str, PlannedMeasurement] = field(default_factory=dict)
    """By key."""
    keys: dict[tuple[str, str, int | None], str] = field(default_factory=dict)
    """Keys by recipe, measurement, and seed."""

    def add(self, name: str, recipe: Recipe, measurement: Measurement, plan: Plan, seed: int) -> None:
        """Add one measurement for a seed, or for all seeds when it reads no run."""

        def given(value: Any) -> Any:
            return self._given(name, recipe, value, plan, seed) if isinstance(value, Reference) else value

        told = {flag: given(value) for flag, value in measurement.flags(plan.scale.base).items()}
        settings = {flag: value for flag, value in told.items() if value is not HUBS}
        on = tuple(map(given, measurement.taken(plan.scale.base)))
        read = (each for each in (*on, *settings.values()) if isinstance(each, Given))
        mine = seed if any(not each.named for each in read) else None
        processes = measurement.group(plan.scale.base)
        deciding = [SCHEMA, measurement.does, on, settings, *([processes] if processes > 1 else [])]
        text = json.dumps(deciding, sort_keys=True, default=lambda value: value.to_json())
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        before = self.planned.get(key)
        tables = before.tables if before else ()
        here = (name, measurement.name)
        self.keys[*here, mine] = key
        self.planned[key] = PlannedMeasurement(
            key=key,
            does=measurement.does,
            on=on,
            settings=settings,
            seed=mine,
            processes=processes,
            tables=tables if here in tables else (*tables, here),
        )

    def _given(self, name: str, recipe: Recipe, reference: Reference, plan: Plan, seed: int) -> Given:
        """Return what a reference stands for; InputError when its run keeps no such checkpoint."""
        if isinstance(reference, RecordOf):
            return Given(measurement=self.keys[name, reference.measurement, seed])
        if isinstance(reference, RunOf):
            return Given(run=plan.arms[name, reference.arm, seed])
        if isinstance(reference, DataFolder):
            return Given(named=(plan.data,), path=plan.folder)
        if isinstance(reference, QuestionFolder):
            return _questions(name, plan)
        if isinstance(reference, FileOf):
            files = plan.files.get(reference.task)
            named = (reference.task, reference.part, plan.examples.get(reference.task, ""))
            return Given(named=named, path=files and (files.train if reference.part == "train" else files.test))
        if isinstance(reference, Checkpoint):
            key = plan.arms[name, reference.arm, seed]
            return Given(run=key, step=_step(name, reference, plan, key))
        references = {arm.name: arm.reference for arm in recipe.arms}
        return Given(
            changes={
                group: {
                    title: (plan.arms[name, arm, seed], plan.arms[name, references[arm] or arm, seed])
                    for title, arm in arms.items()
                    if (name, arm, seed) in plan.arms
                }
                for group, arms in reference.arms.items()
            }
        )


def plan_measurements(recipes: Mapping[str, Recipe], made: Plan, *, only: tuple[str, ...] = ()) -> Measurements:
    """Return the measurements of recipes whose runs are planned; `only` some of them, by name, where any are named.

    Raises:
        InputError: A checkpoint at a moment at which the scale keeps none.
    """
    found = Measurements()
    for seed in made.seeds:
        for name, recipe in recipes.items():
            chosen = recipe.chosen_measurements(only, smoke=made.scale.base == "smoke")
            for measurement in chosen if seed in made.seeds_of(name) else ():
                if _readable(name, measurement, made, found, seed):
                    found.add(name, recipe, measurement, made, seed)
    return found


def _readable(name: str, measurement: Measurement, made: Plan, found: Measurements, seed: int) -> bool:
    """Return whether what a measurement reads is planned, and say in the plan's notes where it was left out."""
    for of in measurement.references(made.scale.base):
        if isinstance(of, RecordOf):
            if any(key[:2] == (name, of.measurement) for key in found.keys):
                continue
            what = of.measurement
        elif isinstance(of, Checkpoint | RunOf) and (name, of.arm) in made.left:
            what = of.arm
        else:
            continue
        note = f"{name}, not measured because it reads {what}, which is left out: {measurement.name}."
        made.notes += [] if note in made.notes else [note]
        return False
    return True


def _questions(name: str, plan: Plan) -> Given:
    """Return the folder of questions that a plan has; the hub's where it has none, or not those of every task."""
    if plan.questions is None:
        found = plan.examples.get(QUESTIONS)
        return HUBS if found is None else Given(named=(QUESTIONS, "test", found))
    if lacking := [task for task in ZERO_SHOT if find_questions(task, plan.questions) is None]:
        note = f"{name} asks the hub's questions: {plan.questions} has none of {', '.join(lacking)}."
        plan.notes += [] if note in plan.notes else [note]
        return HUBS
    return Given(named=(QUESTIONS, "test", questions_hash(plan.questions)), path=plan.questions)


def lost_inputs(found: Measurements, store: Store) -> dict[str, str]:
    """Return the runs whose folders are needed and gone, by key, each with the measurement that needs it."""
    lost = {}
    for each in found.planned.values():
        if store.measurement(each.key) is not None:
            continue
        for given in each.reads:
            if given.run is not None and not _path(given, each, store).is_dir():
                lost[given.run] = each.title
    return lost


def ready(found: Measurements, store: Store) -> Measurements:
    """Return the measurements that lack a record and read runs, all of which have ended and are still there."""
    lost = lost_inputs(found, store)
    planned = {}
    for each in found.planned.values():
        done = all(store.record(key) is not None or store.measurement(key) is not None for key in each.needed)
        if each.needed and done and not lost.keys() & each.needed and store.measurement(each.key) is None:
            planned[each.key] = each
    return Measurements(planned=planned)


def carry_out(
    found: Measurements,
    store: Store,
    outcome: Outcome,
    *,
    say: Callable[[str], None],
    launch: Launch,
    ends: float | None = None,
) -> bool:
    """Make what the store lacks, one at a time so that timings are of an idle machine, and add to `outcome`.

    Returns whether a stop was requested, be it after the last one was made.

    A measurement whose runs or measurements failed is not begun; the others go on. What reads a run that was left for
    the next command is left for it too, and after `ends`, on the monotonic clock, none begins.
    """
    missing = _to_measure(found, store, outcome)
    with StopRequest() as stop:
        for number, each in enumerate(missing, 1):
            if stop.requested or outcome.stopped:
                outcome.stopped = True
                return True
            if ends is not None and time.monotonic() >= ends:
                outcome.left += [one.key for one in missing[number - 1 :]]
                return False
            say(f"measuring {each.title} (`saf {each.does}`) in {each.key}")
            began = time.monotonic()
            try:
                problem = _measure(each, store, outcome, launch, stop)
            except (SafError, OSError) as error:
                problem = f"{each.title} has no record: {error}"
            if problem is None:
                outcome.ended.append(each.key)
            elif stop.requested:
                outcome.stopped = True
                return True
            else:
                outcome.failed[each.key] = problem
            words = problem or f"{each.title} measured after {duration(time.monotonic() - began)}"
            say(f"{words}; {number} of {len(missing)} measurements")
        return stop.requested


def _to_measure(found: Measurements, store: Store, outcome: Outcome) -> list[PlannedMeasurement]:
    """Return the measurements to make; add those that there are, and those that are left, to `outcome`."""
    missing = []
    for each in found.planned.values():
        if store.measurement(each.key) is not None:
            outcome.found.append(each.key)
        elif each.needed & set(outcome.left):
            outcome.left.append(each.key)
        elif each.key not in outcome.failed:
            missing.append(each)
    return missing


def words(each: PlannedMeasurement, store: Store, out: Path) -> list[str]:
    """Return the words after `saf` that make a measurement."""

    def told(value: Any) -> Any:
        """Return what the command is told for a value."""
        return str(_path(value, each, store)) if isinstance(value, Given) else value

    on = [told(value) for value in each.on]
    flags = {name: told(value) for name, value in each.settings.items()}
    return [*each.does.split(), *on, "--out", str(out), *(word for item in flags.items() for word in flag_words(*item))]


def _measure(each: PlannedMeasurement, store: Store, outcome: Outcome, launch: Launch, stop: Stop) -> str | None:
    """Make one measurement and keep its record; return None, or why there is none."""
    if each.needed & set(outcome.failed):
        return f"{each.title} was not begun: what it reads did not end"
    for given in each.reads:
        if given.changes:
            write_json(_path(given, each, store), _changes(given, store))
        elif not (path := _path(given, each, store)).exists():
            return f"{each.title} cannot begin: {path} is missing"
    out = store.run_folder(each.key) / "measured.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = getattr(ANALYSES.get(each.does.partition(" ")[2]), "unfinished", lambda _: None)
    if out.exists() and unfinished(out) is None:
        out.unlink()
    log = store.folder / "logs" / f"{each.key}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    together = launch if each.processes == 1 else partial(launch, processes=each.processes)
    code = together(words(each, store, out), log, None, stop)
    if code != 0:
        return f"{each.title} ended with exit code {code}: {last_line(log)} (all of it: {log})"
    record = {**read_result(out), "key": each.key, "seed": each.seed}
    if examples := {given.task: given.named[-1] for given in each.reads if given.task}:
        record["examples"] = examples
    write_json(store.measurement_file(each.key), record)
    return None


def _path(given: Given, each: PlannedMeasurement, store: Store) -> Path:
    """Return the path that a measurement is told for what it reads."""
    if given.named:
        if given.path is None:
            what = f"examples of {given.task} (--tasks)" if given.task else "a tokenizer, of the prepared text (--data)"
            raise InputError(f"it needs {what}; name the folder")
        return given.path
    if given.measurement is not None:
        return store.measurement_file(given.measurement)
    if given.run is None:
        return store.run_folder(each.key) / "changes.json"
    folder = store.run_folder(given.run)
    return folder if given.step is None else folder / "checkpoints" / step_name(given.step)


def _keys(given: Given) -> Iterable[str]:
    yield from filter(None, (given.run, given.measurement))
    for arms in given.changes.values():
        for pair in arms.values():
            yield from pair


def _changes(given: Given, store: Store) -> dict[str, dict[str, float]]:
    """Return changes in perplexity, %, by group and name."""
    found: dict[str, dict[str, float]] = {}
    for group, arms in given.changes.items():
        for name, pair in arms.items():
            run, other = map(store.record, pair)
            assert run is not None, pair
            assert other is not None, pair
            found.setdefault(group, {})[name] = change_of(run, other)
    return found


def _step(name: str, reference: Checkpoint, plan: Plan, key: str) -> int:
    """Return the update that a checkpoint was saved after; InputError when its run keeps none there."""
    run = plan.runs[key]
    if reference.at not in (kept := kept_moments(run, plan.scale)):
        raise InputError(f"{name} reads {reference.arm!r} after {reference.at:g} of its updates; it keeps {kept}")
    return OneTime(at=float(reference.at)).first_update(run.updates)
