"""Carrying out a plan: what is missing is trained in processes of its own, what stopped is resumed, nothing twice."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saf.data.prepare import usable_cores
from saf.errors import SafError
from saf.experiments.launching import Launch, Stop, in_a_process, last_line, words
from saf.experiments.packing import RESERVE, required
from saf.experiments.plan import Plan
from saf.experiments.planned_run import PlannedRun
from saf.experiments.rates import Rates
from saf.experiments.room import Room
from saf.experiments.store import Store
from saf.machine.driver import smallest_memory_bytes
from saf.machine.execution import visible_devices
from saf.train.loop import EXIT_STOPPED, StopRequest
from saf.train.observer import duration

_STOPPED = "stopped"
"""What `_train` returns of a run that stopped after a checkpoint."""
PROCESS_BYTES = 1e9
"""Bytes of a device that a run takes beside its peak: its context, and what the allocator keeps; a round number."""


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """Say where runs are made: on which devices, how many at a time on one, and which never share it."""

    devices: tuple[str | None, ...] = (None,)
    """As CUDA_VISIBLE_DEVICES names them; None is whatever there is."""
    jobs: int = 1
    """Runs at a time on one device."""
    alone: frozenset[str] = frozenset()
    """Keys of runs whose time matters: such a run has its device for itself."""
    takes: Mapping[str, float] = field(default_factory=dict)
    """Bytes of a device that runs are expected to take at most, by key."""
    memory: float = math.inf
    """Bytes of a device."""

    @classmethod
    def of_this_machine(cls, jobs: int, alone: Iterable[str], runs: Iterable[PlannedRun]) -> "Lanes":
        """Return a lane for each CUDA device that this process may use, or one."""
        return cls(
            devices=visible_devices() or (None,),
            jobs=jobs,
            alone=frozenset(alone),
            takes={run.key: run.predicted_bytes + PROCESS_BYTES for run in runs},
            memory=smallest_memory_bytes() or math.inf,
        )

    @property
    def at_once(self) -> int:
        """Return how many of the largest runs a device holds, at most as many as there may be, and at least one."""
        largest = max(self.takes.values(), default=0.0)
        return max(1, int(min(self.jobs, self.memory / largest))) if largest else self.jobs

    @property
    def width(self) -> int:
        """Return how many runs there can be at a time."""
        return self.jobs * len(self.devices)

    @property
    def threads(self) -> int | None:
        """Return how many threads each of several runs at a time may use of the machine's cores; None for one run."""
        return max(1, usable_cores() // self.width) if self.width > 1 else None

    def shares(self, key: str) -> bool:
        """Return whether a run may share its device."""
        return self.jobs > 1 and key not in self.alone

    def free(self, key: str, active: Iterable[tuple[str, int]]) -> int | None:
        """Return the number of the device where a run can begin beside those `(key, device)`; None without one."""
        on: list[list[str]] = [[] for _ in self.devices]
        for other, number in active:
            on[number].append(other)
        room = 1 if key in self.alone else self.jobs
        free = [
            number
            for number, keys in enumerate(on)
            if len(keys) < room and not self.alone & set(keys) and self._fits(key, keys)
        ]
        return min(free, key=lambda number: len(on[number]), default=None)

    def _fits(self, key: str, beside: Sequence[str]) -> bool:
        """Return whether a device holds a run beside others; an empty one holds any."""
        return not beside or sum(self.takes.get(each, 0.0) for each in (key, *beside)) <= self.memory


@dataclass(kw_only=True)
class Progress:
    """Count what is done of a plan and foretell the time left, from rates and from the runs of this plan that ended."""

    total: int
    say: Callable[[str], None]
    rates: Rates
    width: int = 1
    left: float = 0.0
    """Seconds that the rates foretell of what is not done."""
    done: int = 0
    _foretold: float = 0.0
    _took: float = 0.0

    @property
    def correction(self) -> float:
        """Return what foretold seconds are multiplied by: 1 before any run ended."""
        return self._took / self._foretold if self._foretold else 1.0

    def begin(self, run: PlannedRun, *, resumed: bool) -> None:
        """Tell that a run begins."""
        self.say(f"{'resuming' if resumed else 'training'} {run.title} ({run.updates_to_do:,} updates) in {run.key}")

    def end(self, run: PlannedRun, *, foretold: float, seconds: float, problem: str | None) -> None:
        """Tell that a run ended, and how long the others will take."""
        self.done += 1
        self.left = max(0.0, self.left - foretold)
        if problem is None:
            self._foretold += foretold
            self._took += seconds
        state = f"{self.done} of {self.total} runs"
        if self._took and self.left > 0:
            state += f", about {duration(self.left * self.correction / self.width)} left"
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
    left: list[str] = field(default_factory=list)
    """Those that the limit of the command, or the disk, left for the next one, with a checkpoint or not begun."""
    advanced: bool = True
    """Whether anything ended or got further; if not, the same command will not either."""


def execute(
    plan: Plan,
    store: Store,
    data: Path,
    *,
    say: Callable[[str], None],
    lanes: Lanes | None = None,
    rates: Rates | None = None,
    only: Iterable[str] | None = None,
    seconds: float | None = None,
    launch: Launch | None = None,
    lost: Mapping[str, str] | None = None,
) -> Outcome:
    """Train what the store lacks of a plan, parents first, and return what came of it.

    A run whose parent lost the checkpoint that it needs makes the parent train again. A run that fails keeps those
    that go on from it from beginning; the others go on. Each run's output is a file in the store's `logs`. A run that
    went on from another one keeps its last checkpoint alone once it has a record, and none begins without room for its
    checkpoints on the disk.

    Args:
        plan: The runs.
        store: Where they are.
        data: The prepared data.
        say: Shows a line of progress.
        lanes: Where runs are made; one at a time by default.
        rates: What their time is foretold from; the scale's by default.
        only: Keys of the runs to train, with what they need; all by default.
        seconds: The limit of this command: no run begins that is foretold to end after it, unless it is longer than
            the limit by itself and the first on its device; what goes on at the limit stops after a checkpoint.
        launch: How one is run; a process of its own by default.
        lost: Runs to train again though they have a record, by key, each with what needs their folder.
    """
    began, lanes, rates = time.monotonic(), lanes or Lanes(), rates or plan.scale.rates
    outcome = Outcome(found=[key for key in plan.runs if store.record(key) is not None])
    found = set(outcome.found)
    asked = (set(plan.runs) if only is None else set(only) & set(plan.runs)) - found
    waiting = _to_train(plan, store, asked, found=found, lost=lost or {}, say=say)
    foretold = {run.key: run.seconds(rates, done=store.done(run.key)) for run in waiting}
    before = {run.key: store.done(run.key) for run in waiting}
    left = sum(foretold.values())
    progress = Progress(total=len(waiting), say=say, rates=rates, width=lanes.width, left=left)
    active: dict[Future[str | None], _Active] = {}
    used: set[int] = set()
    room = Room(store, say)
    with StopRequest() as signalled, _Here() if lanes.width == 1 else ThreadPoolExecutor(lanes.width) as pool:
        limit = _Limit(signalled, ends=None if seconds is None else began + seconds - RESERVE)
        while active or waiting:
            for run in _lost(waiting, outcome):
                waiting.remove(run)
                one = _Active(run, 0, None, time.monotonic(), foretold[run.key])
                _end(one, f"{run.title} was not begun: a run that it needs did not end", outcome, progress)
            for run in [] if limit.requested or outcome.stopped else _ready(waiting, active.values()):
                lane = lanes.free(run.key, [(one.run.key, one.lane) for one in active.values()])
                if lane is None:
                    continue
                first = lane not in used and all(one.lane != lane for one in active.values())
                in_time = limit.allows(foretold[run.key] * progress.correction, first=first)
                if not (in_time and room.allows(run, [one.run for one in active.values()])):
                    continue
                waiting.remove(run)
                one = _Active(run, lane, lanes.devices[lane], time.monotonic(), foretold[run.key])
                progress.begin(run, resumed=store.begun(run.key))
                if lanes.shares(run.key):
                    store.mark_shared_(run.key)
                active[pool.submit(_train, one, store, data, launch or in_a_process, limit)] = one
                if lanes.width == 1:
                    break
            if not active:
                break
            for future in wait(active, return_when=FIRST_COMPLETED).done:
                one, problem = active.pop(future), future.result()
                used |= {one.lane} if problem is None else set()
                _end(one, problem, outcome, progress)
    outcome.left += [run.key for run in waiting]
    outcome.advanced = bool(outcome.ended) or any(store.done(key) != update for key, update in before.items())
    outcome.stopped = (outcome.stopped and not limit.over) or (signalled.requested and bool(outcome.left))
    return outcome


@dataclass(frozen=True)
class _Active:
    """Hold a run under way."""

    run: PlannedRun
    lane: int
    device: str | None
    began: float
    foretold: float
    """Seconds, by the rates alone."""


class _Limit:
    """Ask runs to stop at a signal, or when the command's time is over."""

    def __init__(self, signalled: StopRequest, *, ends: float | None):
        """Take when the command's time is over, on the monotonic clock; None for never."""
        self.signalled, self.ends = signalled, ends
        self.whole = None if ends is None else ends - time.monotonic()

    @property
    def over(self) -> bool:
        """Return whether the time is over."""
        return self.ends is not None and time.monotonic() >= self.ends

    @property
    def requested(self) -> bool:
        """Return whether there was a signal, or the time is over."""
        return self.signalled.requested or self.over

    def allows(self, seconds: float, *, first: bool) -> bool:
        """Return whether a run of so many seconds may begin: it ends in time, or is the first there and never would."""
        if self.ends is None or self.whole is None:
            return True
        return time.monotonic() + seconds <= self.ends or (first and seconds > self.whole)


def _lost(waiting: Iterable[PlannedRun], outcome: Outcome) -> list[PlannedRun]:
    """Return the waiting runs that need one that failed, also by way of others, in their order."""
    failed, lost = set(outcome.failed), []
    for run in waiting:  # what a run needs stands before it
        if run.needs & failed:
            failed.add(run.key)
            lost.append(run)
    return lost


def _end(one: _Active, problem: str | None, outcome: Outcome, progress: Progress) -> None:
    """Take note of how a run ended: None, why it failed, or `_STOPPED`."""
    if problem == _STOPPED:
        outcome.left.append(one.run.key)
        outcome.stopped = True
        return
    if problem is None:
        outcome.ended.append(one.run.key)
    else:
        outcome.failed[one.run.key] = problem
    progress.end(one.run, foretold=one.foretold, seconds=time.monotonic() - one.began, problem=problem)


class _Here(Executor):
    """Do each piece of work at once, in the main thread, where a run can hear signals."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """Return a future that is done."""
        future: Future[Any] = Future()
        future.set_result(work(*arguments, **named))
        return future


def _ready(waiting: Sequence[PlannedRun], active: Iterable[_Active]) -> list[PlannedRun]:
    """Return the waiting runs that need nothing of one that is waiting or under way."""
    ahead = {run.key for run in (*waiting, *(one.run for one in active))}
    return [run for run in waiting if not run.needs & ahead]


def _to_train(
    plan: Plan,
    store: Store,
    asked: set[str],
    *,
    found: set[str],
    lost: Mapping[str, str],
    say: Callable[[str], None],
) -> list[PlannedRun]:
    """Return the runs to train, parents first: those asked for, and those whose checkpoint they need and is lost."""
    reasons = {key: f"{plan.runs[key].title} is trained again for {why}" for key, why in lost.items() if key in found}

    def lacks(run: PlannedRun) -> dict[str, str]:
        """Return what a run needs and cannot use, and take note of what is trained again for it."""
        why = store.lacks(run)
        for key in why.keys() & found - reasons.keys():
            reasons[key] = f"{plan.runs[key].title} is trained again for {run.title}: {why[key]}"
        return why

    forgotten: set[str] = set()
    # What is trained again will be another training, so that of others that go on from it more may be lost.
    while True:
        for key in reasons.keys() - forgotten:
            store.forget_(key)
        forgotten = {*reasons}
        runs = required([plan.runs[key] for key in asked | forgotten], plan, lacks)
        if reasons.keys() == forgotten:
            break
    for reason in reasons.values():
        say(reason)
    return runs


def _train(one: _Active, store: Store, data: Path, launch: Launch, stop: Stop) -> str | None:
    """Train one run to its end and collect its record; return None, why it failed, or `_STOPPED`.

    What cannot be read or written of one run, on a full disk too, is its own failure: others go on.
    """
    try:
        return _trained(one, store, data, launch, stop)
    except (SafError, OSError) as error:
        return f"{one.run.title} has no record: {error}; what it left is in {store.run_folder(one.run.key)}"


def _trained(one: _Active, store: Store, data: Path, launch: Launch, stop: Stop) -> str | None:
    """Do what `_train` does, with the errors of files."""
    run = one.run
    folder = store.run_folder(run.key)
    if not (folder / "result.json").is_file():
        if why := store.lacks(run):
            return f"{run.title} cannot begin: {'; '.join(why.values())}"
        log = store.folder / "logs" / f"{run.key}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        # By its own clock every arm pays for compiling, whatever arms before it left in the compiler's cache.
        cold = {"compiles_anew": True} if run.own_clock else {}
        code = launch(words(run, store, data), log, one.device, stop, **cold)
        if code == EXIT_STOPPED:
            return _STOPPED
        if code != 0:
            # A run at matched time whose clock ran over would end the same way, however often it is resumed.
            anew = f"; the same command resumes it: to train it anew, remove {folder}" if folder.is_dir() else ""
            return f"{run.title} ended with exit code {code}: {last_line(log)} (all of it: {log}){anew}"
    store.collect(run)
    store.trim_(run)
    return None
