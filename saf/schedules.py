"""Schedules decide when heads are frozen: `OneTime`, `Gradual`, `ValidationBudget` and `TrainLoss`.

A schedule is a frozen dataclass of settings. Its `start` returns the `Proposer` of one run, a state machine that
observes losses, proposes events and takes their outcomes. To add a schedule, write such a pair of classes and list the
first in `SCHEDULES`; the command line takes `schedule:NAME` and the flags of its fields from there.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import pairwise
from numbers import Integral, Real
from statistics import fmean, linear_regression
from typing import Any, ClassVar

from saf.errors import CheckpointError, InputError, check_name
from saf.heads import Head, HeadSet

# --- events


@dataclass(frozen=True, kw_only=True)
class Freeze:
    """Freeze the lowest-scoring live heads. Fields that are None leave the choice to the run's FreezeConfig."""

    kind: ClassVar[str] = "freeze"
    count: int | None = None  # heads to choose
    first: int | None = None  # of these, heads to freeze, the lowest first; the outcome has the others as `deferred`
    among: tuple[Head, ...] | None = None  # heads deferred earlier, to which the settings' conditions no longer apply
    below: float | None = None  # choose only heads that score less
    batches: int | None = None  # controller batches that measure the event; None takes the run's usual windows
    reason: str = ""  # for the record of the event


@dataclass(frozen=True, kw_only=True)
class Undo:
    """Make the heads of an earlier event live again, with their rows as they were then."""

    kind: ClassVar[str] = "undo"
    event: int  # its number in the run, from 1
    batches: int | None = None
    reason: str = ""


Event = Freeze | Undo


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of an event."""

    number: int  # of the event in the run, from 1
    heads: HeadSet  # frozen, or live again; empty where no live head could be frozen
    loss_before: float  # on the controller's windows just before the event, nats per target
    loss_after: float
    lowest_score: float | None = None  # of the frozen heads; None without any
    deferred: tuple[Head, ...] = ()  # chosen by a freeze with `first` and left live, by ascending score


@dataclass(kw_only=True)
class Proposer(ABC):
    """The state machine of one run. Fields without a default are its settings, the others its state.

    A run calls `observe` once an update, saves a checkpoint, then calls `propose` until it returns None. It applies
    each event and reports the outcome to `done`. The checkpoint holds `state_dict()` from before the events, so that a
    run killed during an event proposes it again.
    """

    name: str  # of its schedule
    limit: int  # heads to freeze in all

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether no further event will come."""

    def observe(self, update: int, loss: float) -> None:  # noqa: B027
        """Take the training loss of an update, nats per target; schedules with fixed moments ignore it."""

    @abstractmethod
    def propose(self, update: int) -> Event | None:
        """Return the event that is due after `update` updates; calling it changes nothing."""

    @abstractmethod
    def done(self, event: Event, outcome: Outcome) -> None:
        """Take the outcome of an event."""

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict()`; raise CheckpointError unless its settings are the same."""
        for each in fields(self):
            value = _tuples(state.get(each.name))
            # Not the limit: a resumed run computes it from the live heads, of which its own events have taken some.
            is_setting = each.default is MISSING and each.name != "limit"
            if is_setting and value != getattr(self, each.name):
                raise CheckpointError(f"the state must be of {self}, got {state}; resume with its settings")
            setattr(self, each.name, value)


def _tuples(value: Any) -> Any:
    """Return a JSON value with its lists, also those within lists, as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


# --- settings: moments are a number of updates, or a share of all updates of the schedule


def _moment(value: float, updates: int) -> float:
    """Return a moment in updates, not rounded yet."""
    # By type, not by size: at=1 is the first update, at=1.0 the last one.
    return float(value) if isinstance(value, Integral) else value * updates


def _update_of(name: str, value: float, updates: int) -> int:
    """Return the update of a moment; raise InputError for one past the last."""
    if (update := round(_moment(value, updates))) > updates:
        raise InputError(f"schedule.{name} must be a share in [0, 1] or an update in [0, {updates}], got {value}")
    return update


def _check(schedule: "Schedule", expected: str, usable: Callable[[Any], bool], *names: str) -> None:
    """Raise InputError unless these settings are finite numbers that `usable` accepts."""
    for name in names:
        value = getattr(schedule, name)
        # A NaN that passed would be no error later, only an event that never comes.
        if not (isinstance(value, Real) and math.isfinite(value) and usable(value)):
            raise InputError(f"schedule.{name} must be {expected}, got {value!r}")


def _check_moments(schedule: "Schedule", *names: str) -> None:
    expected = "a whole number of updates from 0, or a share in [0, 1]"
    _check(schedule, expected, lambda value: value >= 0 and (isinstance(value, Integral) or value <= 1), *names)


# --- fixed moments: one, or those of Eq. (S.20) of docs/method.md


@dataclass(kw_only=True)
class TimedProposer(Proposer):
    """Propose to choose all heads at the first of fixed moments, then to freeze group after group of those deferred."""

    moments: tuple[int, ...]  # updates after which groups freeze
    groups_done: int = 0
    waiting: tuple[Head, ...] = ()  # heads of the groups to come, by ascending score

    @property
    def finished(self) -> bool:
        return self.groups_done == len(self.moments) or (self.groups_done > 0 and not self.waiting)

    def propose(self, update: int) -> Event | None:
        if self.finished or update < (moment := self.moments[self.groups_done]):
            return None
        groups = len(self.moments)
        if groups == 1:
            return Freeze(reason=f"{self.name}: update {moment} is done")
        reason = f"{self.name}: group {self.groups_done + 1} of {groups}, update {moment} is done"
        if not self.groups_done:
            return Freeze(first=math.ceil(self.limit / groups), reason=reason)
        # Shares of the heads that are left keep groups nearly equal where fewer fitted than were asked for.
        size = math.ceil(len(self.waiting) / (groups - self.groups_done))
        return Freeze(among=self.waiting[:size], reason=reason)

    def done(self, event: Event, outcome: Outcome) -> None:
        assert isinstance(event, Freeze)
        # By what was proposed, not by what froze: a head whose fit failed now stays live, and none takes its place.
        self.waiting = outcome.deferred if event.among is None else self.waiting[len(event.among) :]
        self.groups_done += 1


@dataclass(frozen=True)
class OneTime:
    """Freeze once, at a fixed moment: the paper's default."""

    name: ClassVar[str] = "one_time"
    at: int | float = 0.5
    """Freeze after this number of updates, or this share of all updates of the schedule."""

    def __post_init__(self):
        _check_moments(self, "at")

    def first_update(self, updates: int) -> int:
        return _update_of("at", self.at, updates)

    def start(self, *, updates: int, heads: int, limit: int) -> TimedProposer:
        return TimedProposer(name=self.name, moments=(self.first_update(updates),), limit=limit)


@dataclass(frozen=True)
class Gradual:
    """Choose all heads at the first of several events, and freeze them in near-equal groups by ascending score.

    Each group's patterns are measured and fitted at its own event; a head whose fit is rejected there stays live.
    """

    name: ClassVar[str] = "gradual"
    begin: int | float = 0.5
    """Freeze the first group after this number of updates, or this share of all."""
    end: int | float = 0.6
    """Freeze the last group after this number of updates, or this share of all."""
    groups: int = 5
    """Number of groups."""

    def __post_init__(self):
        _check_moments(self, "begin", "end")
        _check(self, "a whole number from 1", lambda value: isinstance(value, int) and value >= 1, "groups")

    def first_update(self, updates: int) -> int:
        return _update_of("begin", self.begin, updates)

    def start(self, *, updates: int, heads: int, limit: int) -> TimedProposer:
        """Return the proposer of a run.

        >>> Gradual(begin=0.5, end=0.6, groups=5).start(updates=5_000, heads=144, limit=36).moments
        (2500, 2625, 2750, 2875, 3000)
        """
        begin, end = self.first_update(updates), _update_of("end", self.end, updates)
        if begin > end:
            raise InputError(f"schedule.end must be at least begin, update {begin}, got update {end}")
        if self.groups > limit:
            raise InputError(f"schedule.groups must be at most the {limit} heads to freeze, got {self.groups}")
        # Shares are rounded once, at each event: rounded ends would move the groups between them.
        first, last = _moment(self.begin, updates), _moment(self.end, updates)
        steps = max(self.groups - 1, 1)
        moments = tuple(round(first + (last - first) * group / steps) for group in range(self.groups))  # Eq. (S.20)
        return TimedProposer(name=self.name, moments=moments, limit=limit)


# --- small groups, frozen at several events and undone where they cost too much


def _group_size(share: float, heads: int, limit: int) -> int:
    """Return the number of heads in a group; raise InputError where more than half of all are to be frozen."""
    # The paper names no cap of its adaptive schedules; the largest share that one of them froze is half.
    if limit > heads / 2:
        raise InputError(f"this schedule freezes at most half of {heads} heads, got {limit} to freeze: lower the rate")
    return max(1, round(share * heads))


# --- validation budget: Eq. (S.21)

BATCHES = 8
"""Controller batches around each event: always the same ones, so that the difference of two losses is paired."""


@dataclass(frozen=True)
class ValidationBudget:
    """Freeze a small group at each of several checks, and undo it where it costs more than the budget has left.

    A group is the live heads of lowest score. Its cost is the increase of the loss on fixed controller batches,
    measured right before and after. The settings of freezing limit the number of heads in all.
    """

    name: ClassVar[str] = "validation_budget"
    budget: float = 0.01
    """Largest increase of perplexity that all groups together may cost, as a share: 0.01 is one percent."""
    begin: int | float = 0.5
    """Check first after this number of updates, or this share of all."""
    every: int | float = 0.05
    """Distance of two checks, as a number of updates or a share of all; no check follows the last update."""
    group: float = 0.02
    """Heads proposed at a check, as a share of all, at least one."""

    def __post_init__(self):
        _check(self, "at least 0", lambda value: value >= 0, "budget")
        _check_moments(self, "begin", "every")
        _check(self, "above 0", lambda value: value > 0, "every")
        _check(self, "above 0 and at most 1", lambda value: 0 < value <= 1, "group")

    def first_update(self, updates: int) -> int:
        return _update_of("begin", self.begin, updates)

    def start(self, *, updates: int, heads: int, limit: int) -> "ValidationBudgetProposer":
        """Return the proposer of a run; no check follows the last update, as nothing would train with its heads.

        >>> ValidationBudget(budget=0.01).start(updates=5_000, heads=144, limit=36).checks[:3]
        (2500, 2750, 3000)
        """
        if (first := self.first_update(updates)) >= updates:
            raise InputError(f"schedule.begin must be before the last of {updates} updates, got update {first}")
        # At most one check an update: two at the same one would measure the same heads twice.
        begin, every = _moment(self.begin, updates), max(_moment(self.every, updates), 1.0)
        moments = {round(begin + number * every) for number in range(math.ceil((updates - begin) / every))}
        return ValidationBudgetProposer(
            name=self.name,
            limit=limit,
            checks=tuple(sorted(moment for moment in moments if moment < updates)),
            allowed_nats=math.log1p(self.budget),  # perplexity rises by the budget where the loss rises by this
            group=_group_size(self.group, heads, limit),
        )


@dataclass(kw_only=True)
class ValidationBudgetProposer(Proposer):
    """Propose a group at each check, and its undoing where the losses around it exceed the budget."""

    checks: tuple[int, ...]  # updates after which groups are proposed
    allowed_nats: float
    group: int  # heads
    checks_done: int = 0
    spent_nats: float = 0.0
    frozen: int = 0  # heads
    undo: dict[str, Any] | None = None  # number and reason of the event to undo

    @property
    def finished(self) -> bool:
        return self.undo is None and (self.checks_done == len(self.checks) or self.frozen >= self.limit)

    def propose(self, update: int) -> Event | None:
        if self.undo is not None:
            return Undo(**self.undo, batches=BATCHES)
        if self.finished or update < self.checks[self.checks_done]:
            return None
        spent = f"{self.spent_nats:.3g} of {self.allowed_nats:.3g} nats are spent"
        reason = f"{self.name}: check {self.checks_done + 1} of {len(self.checks)}, {spent}"
        return Freeze(count=min(self.group, self.limit - self.frozen), batches=BATCHES, reason=reason)

    def done(self, event: Event, outcome: Outcome) -> None:
        cost = outcome.loss_after - outcome.loss_before
        if isinstance(event, Undo):
            self.undo = None
        # A group that lowers the loss gives its nats back to the budget: costs are summed with their signs.
        elif self.spent_nats + cost <= self.allowed_nats:  # Eq. (S.21); false for a cost that is NaN
            self.spent_nats += cost
            self.frozen += len(outcome.heads)
        else:
            reason = f"{self.name}: {cost:.3g} nats after {self.spent_nats:.3g} exceed {self.allowed_nats:.3g}"
            self.undo = {"event": outcome.number, "reason": reason}
            return  # the check is done after its undo
        self.checks_done += 1


# --- train loss: Eqs. (S.22) to (S.24)

# Every constant is a share of training or a ratio to the noise of the loss, so that decisions do not depend on the
# length of the run or the task. Below 32 losses the first variance is off by more than a quarter; 1% of a long run is
# past the steepest fall.
_BURN_IN = (32, 0.01)
# A half-life of 0.5% of the updates is short compared with the 5% to 20% in which a loss levels off; below 8 updates
# the average is hardly quieter than the losses.
_HALF_LIFE = (8, 0.005)
# Half-lives of the fast average in one of the slow one, and in the time within which a step must be absorbed.
_SLOW = 4
# The schedule ends after so many steps that were not absorbed: no further one would be.
_MAX_UNDONE = 2


@dataclass(frozen=True)
class TrainLoss:
    """Freeze a small group whenever the training loss has levelled off, and undo it unless the loss recovers.

    Averages of the loss run from the first update on, or from where a run continues from its parent. The settings of
    freezing limit the number of heads in all.
    """

    name: ClassVar[str] = "train_loss"
    multiplier: float = 3.0
    """Number of standard deviations of the averaged loss that a change must exceed to count. A larger one detects a
    plateau earlier and lets a step pass as absorbed more easily."""
    group: float = 0.02
    """Heads proposed at a time, as a share of all, at least one."""

    def __post_init__(self):
        _check(self, "above 0", lambda value: value > 0, "multiplier")
        _check(self, "above 0 and at most 1", lambda value: 0 < value <= 1, "group")

    def first_update(self, updates: int) -> None:
        """Return None: the loss decides."""

    def start(self, *, updates: int, heads: int, limit: int) -> "TrainLossProposer":
        group = _group_size(self.group, heads, limit)
        return TrainLossProposer(name=self.name, limit=limit, multiplier=self.multiplier, updates=updates, group=group)


@dataclass(kw_only=True)
class TrainLossProposer(Proposer):
    """Propose a group at a plateau of the training loss, and its undoing where the loss does not recover in time."""

    multiplier: float  # z of Eq. (S.23)
    updates: int
    group: int  # heads
    # Running averages of the loss, nats.
    count: int = 0  # losses observed
    last: float = 0.0
    fast: float = 0.0
    slow: float = 0.0
    descent: float = 0.0  # slow average of the decrease of the fast one per update
    variance: float = 0.0  # v of Eq. (S.22), of the noise of one update's loss
    largest_gap: float = 0.0
    since_largest: int = 0  # losses since then
    burn_in_losses: tuple[float, ...] = ()
    # The events.
    update: int = 0
    armed: bool = True  # whether a plateau may be answered: at first, and once the loss fell again after an event
    frozen: int = 0  # heads
    groups_frozen: int = 0
    groups_undone: int = 0
    # Count, fast average and descent when the last group was frozen; None once it is absorbed or undone.
    step: tuple[int, float, float] | None = None
    step_event: int = 0
    step_lowest_score: float | None = None
    undo_reason: str | None = None
    below: float | None = None  # propose only heads that score less, since a group was undone
    recoveries: tuple[int, ...] = ()  # updates until each absorbed step was absorbed
    no_head_left: bool = False

    def __post_init__(self):
        self.half_life = max(_HALF_LIFE[0], _HALF_LIFE[1] * self.updates)
        self.burn_in = max(_BURN_IN[0], math.ceil(_BURN_IN[1] * self.updates))
        self.patience = _SLOW * self.half_life  # updates within which a step must be absorbed
        # Weights of a new loss in the averages: after a half-life a loss has half of the weight it came with.
        self._fast = 1 - 2 ** (-1 / self.half_life)
        self._slow = 1 - 2 ** (-1 / self.patience)

    @property
    def gap(self) -> float:
        """The gap g of Eq. (S.22), nats, positive while the loss falls."""
        return self.slow - self.fast

    @property
    def tolerance(self) -> float:
        """The threshold z n of Eq. (S.23), nats: smaller differences of the averaged loss are noise."""
        # An exponential average of weight a leaves a / (2 - a) of the variance of independent noise.
        return self.multiplier * math.sqrt(self.variance * self._fast / (2 - self._fast))

    @property
    def finished(self) -> bool:
        """Whether all is frozen or no further group will be, or fewer updates remain than the mean recovery takes."""
        ended = self.no_head_left or self.groups_undone >= _MAX_UNDONE or self.frozen >= self.limit
        recovery = fmean(self.recoveries) if self.recoveries else self.patience
        return self.step is None and (ended or self.updates - self.update < recovery)

    def observe(self, update: int, loss: float) -> None:
        if not math.isfinite(loss):
            raise InputError(f"a training loss must be finite, got {loss} at update {update}")
        self.update = update
        self._add(loss)
        if self.count >= self.burn_in:
            self.armed = self.armed or self.gap > self.tolerance
            if self.step is not None:
                self._follow(*self.step)

    def _add(self, loss: float) -> None:
        if not self.count:
            self.last = self.fast = self.slow = loss
        change = loss - self.last + self.descent
        before, self.last = self.fast, loss
        self.fast += self._fast * (loss - self.fast)
        self.slow += self._slow * (loss - self.slow)
        self.descent += self._slow * (before - self.fast - self.descent)
        self.count += 1
        self.since_largest += 1
        if self.gap > self.largest_gap:
            self.largest_gap, self.since_largest = self.gap, 0
        if self.count > self.burn_in:
            # From changes of the loss, as in the burn-in: a fall or a rise has next to no influence on them. Half of
            # their square, as the noise of two losses adds up in each.
            self.variance += self._fast * (change**2 / 2 - self.variance)
            return
        self.burn_in_losses = (*self.burn_in_losses, loss)
        if self.count == self.burn_in:
            self.variance, self.burn_in_losses = _noise(self.burn_in_losses), ()

    def _follow(self, count: int, fast: float, descent: float) -> None:
        """Decide whether the step of that moment is absorbed or must be undone, Eq. (S.24)."""
        elapsed = self.count - count
        # Before one half-life most of the average is of losses before the event: nearly any step would pass. Asked at
        # once, simulated runs accepted groups that raise the loss by 0.1 nats for good (docs/log.md).
        if elapsed < self.half_life:
            return
        excess = self.fast - (fast - descent * elapsed)
        if excess <= self.tolerance:
            self.recoveries = (*self.recoveries, elapsed)
            self.step, self.undo_reason = None, None
        elif elapsed > self.patience:
            self.undo_reason = (
                f"{self.name}: after {elapsed} updates the loss is {excess:.5f} nats above its path before "
                f"event {self.step_event}, more than {self.tolerance:.5f}"
            )

    def propose(self, update: int) -> Event | None:
        if self.step is not None:
            return None if self.undo_reason is None else Undo(event=self.step_event, reason=self.undo_reason)
        # Eq. (S.23): a plateau, and before the first event power and a peak that is past. Without these two a loss
        # that barely moves in its noise, or has not begun to fall, would count as levelled off.
        plateau, powerful = self.gap < self.tolerance, self.largest_gap >= self.tolerance
        ready = self.armed if self.groups_frozen else powerful and self.since_largest >= self.half_life
        if self.finished or self.count < self.burn_in or not (plateau and ready):
            return None
        fall = f"the averaged loss fell by {self.gap:.5f} nats, less than {self.tolerance:.5f}"
        count = min(self.group, self.limit - self.frozen)
        return Freeze(count=count, below=self.below, reason=f"{self.name}: {fall}")

    def done(self, event: Event, outcome: Outcome) -> None:
        self.armed = False
        if isinstance(event, Undo):
            self.frozen -= len(outcome.heads)
            self.groups_undone += 1
            # Heads of these scores cost too much: only lower ones are worth another attempt.
            self.below, self.step, self.undo_reason = self.step_lowest_score, None, None
            return
        self.groups_frozen += 1
        self.frozen += len(outcome.heads)
        self.no_head_left = not len(outcome.heads)
        self.step = None if self.no_head_left else (self.count, self.fast, self.descent)
        self.step_event, self.step_lowest_score = outcome.number, outcome.lowest_score


def _noise(losses: Sequence[float]) -> float:
    """Return half the variance of the changes from loss to loss about their straight line."""
    changes = [later - earlier for earlier, later in pairwise(losses)]
    slope, start = linear_regression(range(len(changes)), changes)
    residuals = [change - start - slope * number for number, change in enumerate(changes)]
    # The line takes two degrees of freedom; a change has the noise of two losses.
    return fmean(one**2 for one in residuals) * len(residuals) / (len(residuals) - 2) / 2


# --- the registry

Schedule = OneTime | Gradual | ValidationBudget | TrainLoss
"""A schedule is a frozen dataclass of JSON values with a `name` and two methods:

`first_update(updates)`: the update of the first event, where an ordinary arm saves a checkpoint; None if losses decide;
`start(updates=, heads=, limit=)`: the proposer of a run that freezes at most `limit` of the model's `heads`.
Both raise InputError for settings that do not fit the run.
"""
SCHEDULES: dict[str, type[Schedule]] = {each.name: each for each in (OneTime, Gradual, ValidationBudget, TrainLoss)}


def setting_of_moment(schedule: Schedule) -> str:
    """Return the name of the setting that fixes a schedule's first event, as its flag is called."""
    return next((f"schedule.{name}" for name in ("at", "begin") if hasattr(schedule, name)), "schedule")


def schedule_to_dict(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule's name and settings as JSON values."""
    return {"name": schedule.name, **asdict(schedule)}


def schedule_from_dict(values: dict[str, Any]) -> Schedule:
    """Build a schedule from `schedule_to_dict`'s form; raise InputError for an unknown one, TypeError for a setting.

    >>> schedule_from_dict({"name": "one_time", "at": 100})
    OneTime(at=100)
    """
    settings = dict(values)
    check_name("schedule", name := settings.pop("name", None), SCHEDULES)
    return SCHEDULES[name](**settings)
