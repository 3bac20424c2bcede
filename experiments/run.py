"""The runner: `plan` returns the runs that arms need, and `execute` trains those that are missing, parents first.

A run's folder is `OUT/SCALE/ARM/seed-SEED`. Its `result.json` contains scale, arm, seed and what tables read; a run
that has one is not trained again. A run that stopped or was killed is resumed.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from experiments.arms import PAPER_SECONDS, Arm, arm_at, merge
from experiments.inputs import Inputs
from experiments.records import complete_record
from experiments.scales import BRANCHES, Scale
from saf.checkpoint import Checkpoint, latest, step_name
from saf.cli.output import print_progress
from saf.errors import InputError, SafError, did_you_mean
from saf.freeze_config import FreezeConfig, unfitted_reason
from saf.machine import visible_devices
from saf.models import preset
from saf.records.files import read_json, to_json
from saf.records.run import heads_edited_by, read_events
from saf.records.table import seconds
from saf.schedules import OneTime, schedule_from_dict
from saf.tasks import FinetuneSettings
from saf.train import TrainConfig, open_checkpoint, pretrain
from saf.train.config import continue_from, recorded_config
from saf.train.finetune import CHOICE, finetune, finetune_defaults, settings_like
from saf.train.loop import EXIT_STOPPED, StopRequest
from saf.train.step import update_memory

Key = tuple[str, int]
"""Arm and seed of a run at one scale."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training of an arm at a scale: its folder, its settings, and the runs that it needs."""

    arm: Arm
    scale: Scale
    seed: int
    root: Path
    needs: Mapping[str, "Run"]
    """The runs that must end before it begins, by role: parent, match, heads, like (fields of `Arm`)."""

    @property
    def key(self) -> Key:
        return self.arm.name, self.seed

    @property
    def title(self) -> str:
        return f"{self.arm.name} (seed {self.seed})"

    @property
    def folder(self) -> Path:
        return self.root / self.scale.name / self.arm.name / f"seed-{self.seed}"

    @cached_property
    def changes(self) -> dict[str, Any]:
        """The settings that differ from its parent's; without a parent, the scale's settings with the arm's."""
        own = merge(self.arm.settings, self.arm.scaled.get(self.scale.base, {}))
        if self.arm.parent is None:
            own = merge(self.scale.settings_at(self.arm.context or 4_096), own)
            own["updates"] += round(self.arm.extra_updates * own["updates"])
        elif self.arm.context is not None:
            # Another length, with as many tokens an update; the number of updates stays the parent's.
            batches = self.scale.batches(self.arm.context)
            own = merge({name: value for name, value in batches.items() if name != "updates"}, own)
        elif self.arm.extra_updates:
            # Updates beyond the parent's have rates of their own: the schedule begins at the branch.
            before = self.needs["parent"].updates
            own = {"updates": before + round(self.arm.extra_updates * before), "lr_start": self.step, **own}
        # An event that fits patterns takes the scale's fitter, unless the arm sets options of one. No event fits none.
        event = own.get("freeze", {"operation": "prune"})
        takes_scale = event.get("operation") != "prune" and "fitter_options" not in event
        if takes_scale and unfitted_reason(event.get("storage", "compact"), event.get("pattern", "mean")) is None:
            own["freeze"] = {**self.scale.freeze, **event}
        return to_json(own)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings of a pretraining, its parents' included."""
        if self.arm.parent is None:
            return self.changes
        # The event belongs to its own arm: what branches off a frozen model does not freeze again.
        inherited = {name: value for name, value in self.needs["parent"].settings.items() if name != "freeze"}
        return merge(inherited, self.changes)

    @property
    def updates(self) -> int:
        return int(self.settings["updates"])

    @property
    def step(self) -> int | None:
        """The parent's update that it branches off from; None at its end."""
        if self.arm.parent is None or self.arm.task is not None:
            return None
        return OneTime(at=float(self.arm.at)).first_update(self.needs["parent"].updates)

    @property
    def own_updates(self) -> int | None:
        """Updates that it does itself; None for finetuning, whose examples and epochs are not known beforehand."""
        if self.arm.task is not None:
            return None
        left = self.updates - (self.step or 0)
        return int(left * (self.changes.get("match_speed") or 1.0)) if self.arm.match else left

    @property
    def cost(self) -> tuple[int, float]:
        """Tokens that a pretraining trains on itself, and bytes of peak memory, as if all heads were live."""
        settings = self.settings
        micro_batch = int(settings.get("batch_size", TrainConfig.batch_size)) * int(settings["length"])
        size = {"vocab_size": self.scale.vocabulary, "max_length": settings["length"]}
        shape = preset(settings["model"], **{**size, **settings.get("model_overrides", {})})
        tokens = (self.own_updates or 0) * micro_batch * int(settings.get("accumulation", 1))
        return tokens, update_memory(shape, micro_batch).total

    def record(self) -> dict[str, Any] | None:
        """Return its result, None before it has ended; raise InputError if it was trained with other settings."""
        path = self.folder / "result.json"
        # The runner adds "experiment" last: without it the record is not complete.
        if not path.is_file() or "experiment" not in (record := read_json(path)):
            return None
        before = record["experiment"]["settings"]
        changed = sorted(n for n in before.keys() | self.changes.keys() if before.get(n) != self.changes.get(n))
        if changed:
            raise InputError(
                f"{self.folder} has other settings ({', '.join(changed)}); remove it, or choose another --out"
            )
        return record

    def can_begin(self, missing: Collection[Key]) -> bool:
        """Return whether it need not wait for any of the missing runs. A parent need only have the checkpoint."""
        # Of other roles the whole run is needed: its time, its events, its choice of epochs.
        waited = {role: need.key for role, need in self.needs.items() if need.key in missing}
        if self.step is not None and (self.needs["parent"].folder / "checkpoints" / step_name(self.step)).is_dir():
            waited.pop("parent", None)
        return not waited


_OWN_SETTINGS = ("epochs", "match_speed", "match_speed_source", "match_charge_seconds")
"""Settings of arms that the runner reads itself; they are no fields of a TrainConfig."""


def _check_settings(run: Run) -> None:
    """Raise InputError for unknown settings of an arm, before its parent is trained."""
    event = run.changes.get("freeze", {})
    known = {*_OWN_SETTINGS, *(each.name for kind in (TrainConfig, FinetuneSettings) for each in fields(kind))}
    for prefix, settings, names in (
        ("", run.changes, known),
        ("freeze.", event, {each.name for each in fields(FreezeConfig)}),
    ):
        if unknown := [name for name in settings if name not in names]:
            near = did_you_mean(unknown[0], names)
            raise InputError(f"arm {run.arm.name!r} has no setting {prefix}{unknown[0]}{near}")
    # Stands for heads that are not known yet: FreezeConfig refuses settings that have no effect on named heads.
    heads: dict[str, Any] = {"heads": ((0, 0),)} if "heads" in run.needs else {}
    FreezeConfig(**event, **heads)
    if "schedule" in run.changes:
        schedule_from_dict(run.changes["schedule"])


def plan(keys: Iterable[Key], scale: Scale, root: Path) -> dict[Key, Run]:
    """Return the runs of arms and seeds, and those that they need, each after its own needs.

    Raises InputError for an unknown arm, or an arm with unknown settings.
    """
    runs: dict[Key, Run] = {}

    def add(name: str, seed: int) -> Run:
        arm = arm_at(name, scale.base)
        if (arm.name, seed) not in runs:
            needs = {}
            for role, other in arm.needs.items():
                # Where the task's seed varies, the pretrained parent is that of the first seed.
                fixed = role == "parent" and arm.varies == "task" and arm_at(other, scale.base).task is None
                needs[role] = add(other, scale.seeds[0] if fixed else seed)
            runs[arm.name, seed] = run = Run(arm=arm, scale=scale, seed=seed, root=root, needs=needs)
            _check_settings(run)
        return runs[arm.name, seed]

    for name, seed in keys:
        add(name, seed)
    return runs


# --- one run


def config_of(run: Run, inputs: Inputs) -> TrainConfig:
    """Return the configuration of a run whose needs have ended."""
    special = ("freeze", "schedule", "mqar", *_OWN_SETTINGS)  # read below, each by its own rule
    own = _with_tuples({name: value for name, value in run.changes.items() if name not in special})
    if "freeze" in run.changes or "heads" in run.needs:
        heads: dict[str, Any] = {"heads": _heads(run.needs["heads"])} if "heads" in run.needs else {}
        own["freeze"] = FreezeConfig(**run.changes.get("freeze", {}), **heads)
    if "schedule" in run.changes:
        own["schedule"] = schedule_from_dict(run.changes["schedule"])
    if run.arm.parent is None:
        # Checkpoints at the branches let other arms begin while this run goes on.
        return TrainConfig(data=str(inputs.text()), out=str(run.folder), seed=run.seed, save_at=BRANCHES, **own)
    parent = open_checkpoint(_checkpoint(run))
    if run.arm.task is not None:
        return _finetuned(run, parent, own, inputs)
    if run.arm.match:
        own |= _matched_budget(run, parent)
    if run.arm.reseed:
        own["seed"] = run.seed + run.arm.reseed
    # Runs that continue this one begin at its end, so its last checkpoint is enough.
    return continue_from(parent, out=str(run.folder), keep=1, **own)


def _with_tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def _matched_budget(run: Run, parent: Checkpoint) -> dict[str, Any]:
    """Return the budget of a run at matched time: what its reference had left from the parent's checkpoint on.

    That is as many updates as its measured speed buys, less what an event is charged with, or the seconds themselves.
    """
    reference = run.needs["match"]
    speed, charge = run.changes.get("match_speed"), run.changes.get("match_charge_seconds", 0.0)
    if speed is not None:
        # The charge is in seconds of the paper's whole run, so it becomes a share of all updates, not of those left.
        left, charged = reference.updates - parent.update, reference.updates * charge / PAPER_SECONDS
        return {"update_budget": int(speed * (left - charged))}
    before = parent.state["elapsed"]
    # What the parent, and its own parents, had taken up to this checkpoint.
    spent = sum(before["parts"].values()) + sum((before["parent"] or {}).values())
    return {"time_budget_seconds": (reference.record() or {})["time"]["everything"]["seconds"] - spent}


def _finetuned(run: Run, parent: Any, own: dict[str, Any], inputs: Inputs) -> TrainConfig:
    task = str(run.arm.task)
    if "like" in run.needs:
        base = settings_like(run.needs["like"].folder, parent=parent, out=run.folder)
    else:
        base = finetune_defaults(parent, task=task, out=run.folder)
    # Where pretraining seeds vary, all of them are finetuned on the same examples in the same order.
    first = run.scale.seeds[0] if run.arm.varies == "pretraining" else run.seed
    base |= {"parent": str(parent.path), "seed": first + run.arm.reseed}
    if task == "mqar":
        base["mqar"] = replace(base["mqar"], **_with_tuples(run.changes.get("mqar", {})))
        base["report_at"] = tuple(each for each in base["report_at"] if each <= own.get("updates", base["updates"]))
        return TrainConfig(**{**base, **own})
    # An arm like another one has the files of that one already.
    if "like" not in run.needs:
        base["data"], base["test"] = map(str, inputs.examples(task))
    values: dict[str, Any] = {**base, **own}
    finetuning = {each.name: values.pop(each.name) for each in fields(FinetuneSettings) if each.name in values}
    return TrainConfig(**{**values, "finetuning": FinetuneSettings(**finetuning)})


def _heads(run: Run) -> tuple[tuple[int, int], ...]:
    if not (heads := heads_edited_by(read_events(run.folder))):
        raise InputError(f"{run.title} froze or pruned no heads, and another run is to have them")
    return tuple((layer, head) for layer, head in heads)


def _checkpoint(run: Run) -> Path:
    parent = run.needs["parent"]
    folder = parent.folder / "checkpoints"
    path = latest(folder) if run.step is None else folder / step_name(run.step)
    if path is None or not path.is_dir():
        raise InputError(
            f"{parent.title} has lost the checkpoint {path or folder}; remove {parent.folder} to train again"
        )
    return path


def train(run: Run, inputs: Inputs) -> bool:
    """Make or resume one run and complete its record; return False where a signal stopped it after a checkpoint."""
    if not (run.folder / "result.json").is_file():
        if (run.folder / "config.json").is_file():
            result = pretrain(recorded_config(run.folder), resume=True)
        elif run.arm.task is None or "like" in run.needs:
            result = pretrain(config_of(run, inputs))
        else:
            choosing = (run.folder / CHOICE).is_dir()
            result = finetune(config_of(run, inputs), epochs=run.changes.get("epochs"), resume=choosing)
        if "stopped_at" in result:
            return False
    # A run that was killed between its end and this line has a result.json without "experiment".
    experiment = {"scale": run.scale.name, "arm": run.arm.name, "seed": run.seed, "settings": run.changes}
    complete_record(run.folder, experiment)
    return True


# --- all runs

STOPPED = "stopped after a checkpoint"


@dataclass(kw_only=True)
class Outcome:
    """The runs of a plan that failed, and whether a signal stopped it."""

    failed: dict[str, str] = field(default_factory=dict)
    """Reasons by the titles of runs and measurements."""
    stopped: bool = False
    """Whether a signal stopped it; the same command continues."""


def execute(runs: Mapping[Key, Run], inputs: Inputs, *, jobs: int = 1) -> Outcome:
    """Train the missing runs, parents first. A run that fails is named, those that need it are left out, others go on.

    With one job runs train in this process. With several each has a process of its own, on the next GPU.
    """
    pending = {key: run for key, run in runs.items() if run.record() is None}
    outcome, total = Outcome(), len(pending)
    devices, lanes = visible_devices(), list(range(jobs))  # free lanes; each trains one run at a time
    active: dict[Future[str | None], tuple[Run, int, float]] = {}
    with StopRequest() as stop, ThreadPoolExecutor(jobs) as pool:
        while pending or active:
            for key, run in list(pending.items()):
                if any(need.title in outcome.failed for need in run.needs.values()):
                    outcome.failed[pending.pop(key).title] = "not begun: a run that it needs failed"
            missing = pending.keys() | {run.key for run, _, _ in active.values()}
            ready = [run for run in pending.values() if run.can_begin(missing)]
            for run in [] if outcome.stopped or stop.requested else ready[: len(lanes)]:
                lane, began = lanes.pop(0), time.monotonic()
                size = "" if run.own_updates is None else f" {run.own_updates:,} updates"
                print_progress(f"{run.title}:{size} in {run.folder}")
                if jobs == 1:
                    future: Future[str | None] = Future()
                    future.set_result(_make(run, inputs))
                else:
                    device = devices[lane % len(devices)] if devices else None
                    future = pool.submit(_make_in_process, run, inputs, device, stop)
                active[future] = pending.pop(run.key), lane, began
            if not active:
                break
            # A branch is ready once its parent, which goes on, has the checkpoint: with a free lane, look every 10 s.
            for future in wait(active, timeout=10 if lanes else None, return_when=FIRST_COMPLETED).done:
                run, lane, began = active.pop(future)
                lanes.append(lane)
                problem = future.result()
                if problem == STOPPED:
                    outcome.stopped = True
                elif problem is not None:
                    outcome.failed[run.title] = problem
                ended = problem or f"ended after {seconds(time.monotonic() - began)}"
                print_progress(f"{run.title} {ended}; {total - len(pending) - len(active)} of {total}")
        outcome.stopped |= stop.requested and bool(pending)
    return outcome


def _make(run: Run, inputs: Inputs) -> str | None:
    """Make a run in this process; return None, why it failed, or STOPPED."""
    try:
        return None if train(run, inputs) else STOPPED
    except (SafError, OSError) as error:
        return f"failed: {error}"
    except Exception as error:  # other runs go on
        log = run.folder.with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(traceback.format_exc())
        return f"failed: {type(error).__name__}: {error} (see {log})"


def _make_in_process(run: Run, inputs: Inputs, device: str | None, stop: StopRequest) -> str | None:
    """Make a run in a process of its own, its output in a log next to its folder."""
    log = run.folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    # A fork would share CUDA's context, which two processes cannot.
    process = get_context("spawn").Process(target=_main_of_process, args=(run, inputs, device, log))
    process.start()
    terminated = False
    while process.is_alive():
        process.join(0.2)
        if stop.requested and not terminated:
            process.terminate()
            terminated = True
    # Before the run handles signals, SIGTERM merely ends the process.
    if process.exitcode == EXIT_STOPPED or (terminated and process.exitcode == -signal.SIGTERM):
        return STOPPED
    lines = log.read_text(errors="replace").strip().splitlines() or ["it wrote nothing"]
    return None if process.exitcode == 0 else f"failed: {lines[-1]} (see {log})"


def _main_of_process(run: Run, inputs: Inputs, device: str | None, log: Path) -> None:
    os.setsid()  # a terminal's Ctrl-C reaches it once, from the process that started it
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device  # CUDA is not initialised yet
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    problem = _make(run, inputs)
    print(problem or "ended", flush=True)
    sys.exit(EXIT_STOPPED if problem == STOPPED else int(problem is not None))
