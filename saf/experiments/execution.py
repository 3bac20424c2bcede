"""Carrying out a plan: what is missing is trained in processes of its own, what stopped is resumed, nothing twice."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saf.experiments.plan import Plan, PlannedRun
from saf.experiments.store import Store
from saf.machine.execution import visible_devices
from saf.train.loop import EXIT_STOPPED, StopRequest
from saf.train.observer import duration

Launch = Callable[[Sequence[str], Path, str | None, StopRequest], int]
"""Runs `saf` with the words given, its output in a file, on one device, until it ends or a stop is requested; returns
its exit code."""

_STOPPED = "stopped"
"""What `_train` returns of a run that a signal stopped after a checkpoint."""
_LOOK_EVERY = 0.2
"""Seconds between looks at a process: far below the seconds that the smallest run takes to start."""


@dataclass(kw_only=True)
class Progress:
    """Count what is done of a plan and foretell the time left from the runs of this plan that ended."""

    total: int
    say: Callable[[str], None]
    done: int = 0
    updates_left: int = 0
    jobs: int = 1
    _updates: int = 0
    _seconds: float = 0.0

    def begin(self, run: PlannedRun, *, resumed: bool) -> None:
        """Tell that a run begins."""
        self.say(f"{'resuming' if resumed else 'training'} {run.title} ({run.updates_to_do:,} updates) in {run.key}")

    def end(self, run: PlannedRun, *, seconds: float, problem: str | None) -> None:
        """Tell that a run ended, and how long the others will take."""
        self.done += 1
        self.updates_left -= run.updates_to_do
        if problem is None:
            self._updates += run.updates_to_do
            self._seconds += seconds
        state = f"{self.done} of {self.total} runs"
        if self._updates and self.updates_left > 0:
            each = self._seconds / self._updates / self.jobs
            state += f", about {duration(each * self.updates_left)} left"
        self.say(f"{problem or f'{run.title} ended after {duration(seconds)}'}; {state}")


@dataclass(kw_only=True)
class Outcome:
    """Hold what came of a plan: keys of runs, and what kept some from ending."""

    ended: list[str] = field(default_factory=list)
    """Those that ended now."""
    found: list[str] = field(default_factory=list)
    """Those that the store had."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why others did not end."""
    stopped: bool = False
    """Whether a signal stopped the plan; the same command goes on with it."""


def execute(
    plan: Plan,
    store: Store,
    data: Path,
    *,
    say: Callable[[str], None],
    jobs: int = 1,
    launch: Launch | None = None,
    lost: Mapping[str, str] | None = None,
) -> Outcome:
    """Train what the store lacks of a plan, parents first, and return what came of it.

    A run whose parent lost the checkpoint that it needs makes the parent train again. A run that fails keeps those
    that go on from it from beginning; the others go on. Each run's output is `output.log` in its folder.

    Args:
        plan: The runs.
        store: Where they are.
        data: The prepared data.
        say: Shows a line of progress.
        jobs: Runs at a time. They share the devices, so their times mean nothing unless each has one of its own.
        launch: How one is run; a process of its own by default.
        lost: Runs to train again though they have a record, by key, each with what needs their folder.
    """
    outcome = Outcome(found=[key for key in plan.runs if store.record(key) is not None])
    waiting = _missing(plan, store, found=set(outcome.found), lost=lost or {}, say=say)
    progress = Progress(total=len(waiting), say=say, jobs=jobs, updates_left=sum(run.updates_to_do for run in waiting))
    active: dict[Future[str | None], _Active] = {}
    devices: list[str | None] = list(visible_devices()) or [None]
    with StopRequest() as stop, _Here() if jobs == 1 else ThreadPoolExecutor(jobs) as pool:
        while active or (waiting and not (stop.requested or outcome.stopped)):
            ready = [] if stop.requested or outcome.stopped else _ready(waiting, [one.run for one in active.values()])
            for run in ready[: jobs - len(active)]:
                waiting.remove(run)
                used = [one.device for one in active.values()]
                one = _Active(run, min(devices, key=used.count), time.monotonic())
                if _needs(run) & set(outcome.failed):
                    _end(one, f"{run.title} was not begun: a run that it needs did not end", outcome, progress)
                    continue
                progress.begin(run, resumed=store.begun(run.key))
                active[pool.submit(_train, one, store, data, launch or in_a_process, stop)] = one
            for future in wait(active, return_when=FIRST_COMPLETED).done if active else ():
                _end(active.pop(future), future.result(), outcome, progress)
    outcome.stopped |= bool(waiting)
    return outcome


@dataclass(frozen=True)
class _Active:
    """Hold a run under way."""

    run: PlannedRun
    device: str | None
    began: float


def _end(one: _Active, problem: str | None, outcome: Outcome, progress: Progress) -> None:
    """Take note of how a run ended: None, why it failed, or `_STOPPED`."""
    if problem == _STOPPED:
        outcome.stopped = True
        return
    if problem is None:
        outcome.ended.append(one.run.key)
    else:
        outcome.failed[one.run.key] = problem
    progress.end(one.run, seconds=time.monotonic() - one.began, problem=problem)


class _Here(Executor):
    """Do each piece of work at once, in the main thread, where a run can hear signals."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """Return a future that is done."""
        future: Future[Any] = Future()
        future.set_result(work(*arguments, **named))
        return future


def _ready(waiting: Sequence[PlannedRun], active: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the waiting runs that need nothing of one that is waiting or under way."""
    ahead = {run.key for run in (*waiting, *active)}
    return [run for run in waiting if not _needs(run) & ahead]


def _needs(run: PlannedRun) -> set[str | None]:
    """Return the keys of the runs that one begins from: its parent, and those whose time or heads it gets."""
    return {run.parent, run.match, run.heads} - {None}


def _missing(
    plan: Plan, store: Store, *, found: set[str], lost: Mapping[str, str], say: Callable[[str], None]
) -> list[PlannedRun]:
    """Return the runs to train, parents first: those without a record, and parents whose checkpoint is needed."""
    needed = {key for key in plan.runs if key not in found}
    for key, why in lost.items():
        if key in found:
            say(f"{plan.runs[key].title} is trained again for {why}")
            store.forget_(key)
            needed.add(key)
    # Children stand after their parents, so that a lost grandparent is found through a lost parent.
    for run in reversed(plan.runs.values()):
        if run.key not in needed or store.begun(run.key):
            continue
        others = (run.parent, store.lacks_parent(run)), (run.match, store.lacks_match(run))
        for key, why in (*others, (run.heads, store.lacks_heads(run))):
            if why and key in found and key not in needed:
                say(f"{plan.runs[key].title} is trained again for {run.title}: {why}")
                store.forget_(key)
                needed.add(key)
    return [run for key, run in plan.runs.items() if key in needed]


def _train(one: _Active, store: Store, data: Path, launch: Launch, stop: StopRequest) -> str | None:
    """Train one run to its end and collect its record; return None, why it failed, or `_STOPPED`."""
    run = one.run
    folder = store.run_folder(run.key)
    if not (folder / "result.json").is_file():
        if why := store.lacks_parent(run) or store.lacks_match(run) or store.lacks_heads(run):
            return f"{run.title} cannot begin: {why}"
        log = store.folder / "logs" / f"{run.key}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        code = launch(words(run, store, data), log, one.device, stop)
        if code == EXIT_STOPPED:
            return _STOPPED
        if code != 0:
            return f"{run.title} ended with exit code {code}: {last_line(log)} (all of it: {log})"
    store.collect(run)
    return None


def words(run: PlannedRun, store: Store, data: Path) -> list[str]:
    """Return the words after `saf` that train a run, or resume it."""
    folder = store.run_folder(run.key)
    if store.begun(run.key):
        return ["pretrain", "--out", str(folder), "--resume"]
    parent = store.checkpoint(run)
    start = ["--parent", str(parent)] if parent else ["--data", str(data)]
    if run.match:
        start += ["--match-time", str(store.run_folder(run.match))]
    if run.heads:
        start += ["--freeze.heads", *(f"{layer}:{head}" for layer, head in store.heads(run.heads) or ())]
    return [
        "pretrain",
        *start,
        "--out",
        str(folder),
        *(word for item in run.flags.items() for word in flag_words(*item)),
    ]


def in_a_process(arguments: Sequence[str], log: Path, device: str | None, stop: StopRequest) -> int:
    """Run `saf` in a process of its own, on one CUDA device where one is named, and return its exit code.

    It has a session of its own, so that a terminal's Ctrl-C comes to it once, from here: it then saves and stops.
    """
    chosen = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
    command = [sys.executable, "-m", "saf", *arguments]
    with (
        open(log, "ab") as file,
        subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, **chosen}, start_new_session=True
        ) as process,
    ):
        asked = False
        while process.poll() is None:
            if stop.requested and not asked:
                process.send_signal(signal.SIGTERM)
                asked = True
            time.sleep(_LOOK_EVERY)
        return process.returncode


def flag_words(name: str, value: Any) -> list[str]:
    """Return one setting as words of the command line."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else f"--no-{name.replace('_', '-')}"]
    if isinstance(value, dict):
        return [flag, *(str(part) for item in value.items() for part in item)]
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)]
    return [flag, str(value)]


def last_line(log: Path) -> str:
    """Return the last line that a process wrote, which says why it failed."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it wrote nothing"
