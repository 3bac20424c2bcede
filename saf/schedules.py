"""When heads are frozen: schedules, the events that they propose, and what they hear of the outcome.

A schedule is a setting, a frozen dataclass such as `OneTime(at=0.5)`. Its `start` makes the small state machine that a
run keeps: it observes losses, proposes events, and hears what came of each. A new schedule is such a pair of classes
and a name in `SCHEDULES`; the command line makes `schedule:NAME` and the flags of its fields from there.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from numbers import Integral, Real
from statistics import fmean, linear_regression
from typing import Any, ClassVar, Protocol

from saf.errors import CheckpointError, InputError, did_you_mean
from saf.heads import Head, HeadSet

# --- events


@dataclass(frozen=True, kw_only=True)
class Freeze:
    """Freeze the lowest-scoring heads of those still live, by the run's FreezeConfig where a field leaves it open."""

    kind: ClassVar[str] = "freeze"
    count: int | None = None
    """How many heads to choose; as many as the settings ask for when None."""
    first: int | None = None
    """Freeze only so many of the chosen heads, those of lowest score; the outcome names the others as `deferred`."""
    among: tuple[Head, ...] | None = None
    """Choose these heads, deferred by an earlier event; conditions of the settings no longer count."""
    below: float | None = None
    """Choose only heads that score less."""
    batches: int | None = None
    """Controller batches of the losses around the event; the run's usual windows when None."""
    reason: str = ""
    """Why now, in words for the record."""


@dataclass(frozen=True, kw_only=True)
class Prune(Freeze):
    """Remove heads altogether, chosen the same way; where the settings say to prune, a run does so for every Freeze."""

    kind: ClassVar[str] = "prune"


@dataclass(frozen=True, kw_only=True)
class Undo:
    """Take an earlier event back: its heads are live again, with the rows they had when it happened."""

    kind: ClassVar[str] = "undo"
    event: int
    """Number of the event in the run, from 1."""
    batches: int | None = None
    reason: str = ""


Event = Freeze | Prune | Undo


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of an event."""

    number: int
    """The event's number in the run, from 1."""
    heads: HeadSet
    """The heads that were frozen, or live again; none where no live head could be frozen."""
    loss_before: float
    """Loss on the controller's windows just before, nats per target."""
    loss_after: float
    seconds: float
    """What the event cost, evaluations left out."""
    lowest_score: float | None = None
    """Lowest score among the heads frozen; None where none was."""
    deferred: tuple[Head, ...] = ()
    """Heads that a freeze with `first` chose and left live, by ascending score."""


# --- what every schedule is


class Proposer(ABC):
    """The state machine of one run; a schedule's `start` makes it.

    A run calls `observe` once an update, saves a checkpoint, calls `propose` until it returns nothing, applies each
    event and reports it with `done`. A checkpoint holds `state_dict()` from before the events, so that a run killed
    during one meets it again when resumed.
    """

    name: ClassVar[str]
    """Its schedule's."""
    state: ClassVar[tuple[str, ...]]
    """The attributes that a checkpoint holds, JSON values."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether no event comes any more, so that nothing need be measured for one."""

    def observe(self, update: int, loss: float) -> None:  # noqa: B027
        """Take the training loss (nats per target) of an update."""

    @abstractmethod
    def propose(self, update: int) -> list[Event]:
        """Return the events that are due after `update` updates; calling it changes nothing."""

    @abstractmethod
    def done(self, event: Event, outcome: Outcome) -> None:
        """Take note of an event that took place, and of what came of it."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to go on after a restart."""
        return {"name": self.name, **{each: getattr(self, each) for each in self.state}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`; raise CheckpointError when it is of another schedule."""
        if state.get("name") != self.name:
            raise CheckpointError(f"the state must be of a {self.name} schedule, got {state}; resume with its settings")
        for each in self.state:
            setattr(self, each, _tuples(state[each]))


def _tuples(value: Any) -> Any:
    """Return a JSON value with tuples in place of lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


class Timetable(Protocol):
    """A schedule: a frozen dataclass of JSON values with these members."""

    name: ClassVar[str]
    """Its name in the registry, in settings and in checkpoints."""
    chooses_once: ClassVar[bool]
    """Whether the first event chooses all heads; conditions on all of them, such as most per layer, hold only then."""
    several_events: ClassVar[bool]
    """Whether heads may change more than once; a run of "auto" is then compiled by layers on a GPU."""

    def first_update(self, updates: int) -> int | None:
        """Return the update after which the first event may come, in a run of `updates`; None when nothing fixes it.

        An ordinary arm saves a checkpoint there. Raises InputError for settings that do not fit into so many updates.
        """
        ...

    def start(self, *, updates: int, heads: int, limit: int) -> Proposer:
        """Return the state machine for a run of `updates` updates of a model of so many `heads`, frozen ones included.

        `limit` is how many of its live heads are to be frozen. Raises InputError for settings that do not fit these.
        """
        ...


# --- one time


@dataclass(frozen=True)
class OneTime:
    """Freeze once, at a fixed moment, as the paper does by default; an ordinary arm saves a checkpoint there."""

    name: ClassVar[str] = "one_time"
    chooses_once: ClassVar[bool] = True
    several_events: ClassVar[bool] = False
    at: int | float = 0.5
    """Freeze after this number of updates, or this share of all updates of the schedule."""

    def __post_init__(self):
        _check_moments(self, "at")

    def first_update(self, updates: int) -> int:
        """Return after how many of `updates` updates the event comes; raise InputError when there are fewer.

        >>> OneTime(at=0.5).first_update(5_000)
        2500
        """
        return _update_at("at", self.at, updates)

    def start(self, *, updates: int, heads: int, limit: int) -> "OneTimeProposer":
        """Return the state machine of a run of `updates` updates."""
        return OneTimeProposer(self.first_update(updates))


class OneTimeProposer(Proposer):
    """Propose one freeze from update `at` on, until it took place.

    >>> proposer = OneTime(at=50).start(updates=100, heads=144, limit=36)
    >>> proposer.propose(49), [event.kind for event in proposer.propose(50)]
    ([], ['freeze'])
    """

    name, state = OneTime.name, ("at", "fired")

    def __init__(self, at: int):
        self.at, self.fired = at, False

    @property
    def finished(self) -> bool:
        """Whether the event is over."""
        return self.fired

    def propose(self, update: int) -> list[Event]:
        """Return the event from update `at` on."""
        due = not self.fired and update >= self.at
        return [Freeze(reason=f"{self.name}: update {self.at} is done")] if due else []

    def done(self, event: Event, outcome: Outcome) -> None:
        """Never propose the event again."""
        self.fired = True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`; raise CheckpointError if it is of another moment."""
        if state.get("at", self.at) != self.at:
            raise CheckpointError(f"the state must be of at={self.at}, got {state}; resume with its settings")
        super().load_state_dict(state)


# --- gradual: Eq. S.20 of docs/method.md


@dataclass(frozen=True)
class Gradual:
    """Choose all heads at the first of several events, and freeze them by ascending score, a nearly equal part at each.

    Each group's patterns are measured and fitted at its own event; a head whose fit is not accepted there stays live.
    """

    name: ClassVar[str] = "gradual"
    chooses_once: ClassVar[bool] = True
    several_events: ClassVar[bool] = True
    begin: int | float = 0.5
    """When the first group is frozen: a whole number of updates, or a share of all of them."""
    end: int | float = 0.6
    """When the last one is frozen, in the same form."""
    groups: int = 5
    """Number of groups."""

    def __post_init__(self):
        _check_moments(self, "begin", "end")
        if isinstance(self.groups, bool) or not isinstance(self.groups, int) or self.groups < 1:
            raise InputError(f"schedule.groups must be a whole number from 1, got {self.groups!r}")
        if type(self.begin) is type(self.end) and self.begin > self.end:
            raise InputError(f"schedule.end must be at least begin, got {self}")

    def events(self, updates: int) -> tuple[int, ...]:
        """Return after how many of `updates` updates each group comes; raise InputError when there are fewer.

        >>> Gradual(begin=0.5, end=0.6, groups=5).events(5_000)
        (2500, 2625, 2750, 2875, 3000)
        """
        begin, end = self.first_update(updates), _update_at("end", self.end, updates)
        if begin > end:
            raise InputError(f"schedule.end must be at least begin, update {begin}, got update {end}")
        # Shares are rounded once, at each event: rounded ends would move the groups between them.
        exact = [value * updates if isinstance(value, float) else float(value) for value in (self.begin, self.end)]
        steps = max(self.groups - 1, 1)
        return tuple(round(exact[0] + (exact[1] - exact[0]) * group / steps) for group in range(self.groups))

    def first_update(self, updates: int) -> int:
        """Return after how many of `updates` updates the first group comes; raise InputError when there are fewer."""
        return _update_at("begin", self.begin, updates)

    def start(self, *, updates: int, heads: int, limit: int) -> "GradualProposer":
        """Return the state machine of a run of `updates` updates; raise InputError for more groups than heads."""
        if self.groups > limit:
            raise InputError(f"schedule.groups must be at most the {limit} heads to freeze, got {self.groups}")
        return GradualProposer(self.events(updates), limit)


class GradualProposer(Proposer):
    """Propose to choose all heads and freeze the first group, then group after group of those deferred."""

    name, state = Gradual.name, ("moments", "limit", "groups", "waiting")

    def __init__(self, moments: tuple[int, ...], limit: int):
        self.moments, self.limit = moments, limit
        self.groups = 0
        """Groups that are over."""
        self.waiting: tuple[Head, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether all groups are over, or no head is left for those to come."""
        return self.groups == len(self.moments) or (self.groups > 0 and not self.waiting)

    def propose(self, update: int) -> list[Event]:
        """Return the event of the next group from its update on."""
        if self.finished or update < self.moments[self.groups]:
            return []
        left = len(self.moments) - self.groups
        size = -(-(len(self.waiting) if self.groups else self.limit) // left)
        moment = f"group {self.groups + 1} of {len(self.moments)}, update {self.moments[self.groups]} is done"
        among = self.waiting[:size] if self.groups else None
        return [Freeze(among=among, first=None if self.groups else size, reason=f"{self.name}: {moment}")]

    def done(self, event: Event, outcome: Outcome) -> None:
        """Go on to the next group."""
        assert isinstance(event, Freeze)
        self.waiting = outcome.deferred if event.among is None else self.waiting[len(event.among) :]
        self.groups += 1


# --- validation budget: Eq. S.21

BATCHES = 8
"""Controller batches around each event: fixed ones, so that a difference of two losses is paired."""


@dataclass(frozen=True)
class ValidationBudget:
    """Freeze a small group at each of several checks, and undo it where that costs more than the budget has left.

    A group is the live heads of lowest score. Its cost is the increase of the loss on fixed controller batches,
    measured right before and after. The settings of freezing say how many heads may be frozen in all.
    """

    name: ClassVar[str] = "validation_budget"
    chooses_once: ClassVar[bool] = False
    several_events: ClassVar[bool] = True
    budget: float = 0.01
    """Largest increase of perplexity that all groups together may cost, as a share: 0.01 is one percent."""
    begin: int | float = 0.5
    """When the first check comes: a whole number of updates, or a share of all of them."""
    every: int | float = 0.05
    """From one check to the next, in the same form; the last one comes before the last update."""
    group: float = 0.02
    """Heads proposed at a check, as a share of all, at least one."""
    cap: float = 0.5
    """Largest share of all heads that the settings of freezing may ask for."""

    def __post_init__(self):
        _check_numbers(self, lambda value: value >= 0, "at least 0", "budget")
        _check_moments(self, "begin", "every")
        _check_numbers(self, lambda value: value > 0, "above 0", "every")
        _check_numbers(self, lambda value: 0 < value <= 1, "above 0 and at most 1", "group", "cap")

    def checks(self, updates: int) -> tuple[int, ...]:
        """Return after how many of `updates` updates each check comes; raise InputError when there are fewer.

        >>> ValidationBudget(budget=0.01).checks(5_000)[:3]
        (2500, 2750, 3000)
        """
        first = self.first_update(updates)
        if first >= updates:
            raise InputError(f"schedule.begin must be before the last of {updates} updates, got update {first}")
        exact = [value * updates if isinstance(value, float) else float(value) for value in (self.begin, self.every)]
        begin, every = (exact[0], max(exact[1], 1.0))  # there is no check between two updates
        moments, number = {first}, 1
        # Heads frozen after the last update would not be trained with.
        while (moment := round(begin + number * every)) < updates:
            moments.add(moment)
            number += 1
        return tuple(sorted(moments))

    def first_update(self, updates: int) -> int:
        """Return after how many of `updates` updates the first check comes; raise InputError when there are fewer."""
        return _update_at("begin", self.begin, updates)

    def start(self, *, updates: int, heads: int, limit: int) -> "ValidationBudgetProposer":
        """Return the state machine of a run; raise InputError when it is to freeze more heads than the cap allows."""
        _check_cap(self.cap, heads=heads, limit=limit)
        group = max(1, round(self.group * heads))
        return ValidationBudgetProposer(self.checks(updates), math.log1p(self.budget), group=group, limit=limit)


class ValidationBudgetProposer(Proposer):
    """Propose a group at each check, and to undo it when the losses around it say that it costs too much."""

    name, state = ValidationBudget.name, ("limit", "check", "spent", "frozen", "undo")

    def __init__(self, checks: tuple[int, ...], allowed: float, *, group: int, limit: int):
        self.checks, self.allowed, self.group, self.limit = (checks, allowed, group, limit)
        self.check = 0
        """Checks that are over."""
        self.spent = 0.0
        """Increase of the loss by the groups that stay, nats."""
        self.frozen = 0
        self.undo: dict[str, Any] | None = None
        """Number and reason of the event to take back."""

    @property
    def finished(self) -> bool:
        """Whether all checks are over, or all heads frozen that may be."""
        return self.undo is None and (self.check == len(self.checks) or self.frozen >= self.limit)

    def propose(self, update: int) -> list[Event]:
        """Return the group of the check that is due, or the undoing of the one that cost too much."""
        if self.undo is not None:
            return [Undo(**self.undo, batches=BATCHES)]
        if self.finished or update < self.checks[self.check]:
            return []
        left = f"{self.spent:.3g} of {self.allowed:.3g} nats are spent"
        reason = f"{self.name}: check {self.check + 1} of {len(self.checks)}, {left}"
        return [Freeze(count=min(self.group, self.limit - self.frozen), batches=BATCHES, reason=reason)]

    def done(self, event: Event, outcome: Outcome) -> None:
        """Let a group stay whose cost fits into the budget, or have it undone; after that the check is over."""
        if isinstance(event, Undo):
            self.undo = None
        else:
            cost = outcome.loss_after - outcome.loss_before
            # Not "> allowed": a group whose cost is NaN never stays.
            if not self.spent + cost <= self.allowed:
                reason = f"{self.name}: {cost:.3g} nats beside {self.spent:.3g} are more than {self.allowed:.3g}"
                self.undo = {"event": outcome.number, "reason": reason}
                return
            self.spent += cost
            self.frozen += len(outcome.heads)
        self.check += 1


# --- train loss: Eqs. S.22 to S.24

# Every constant is a share of training or a ratio to the noise of the loss, so that a run of any length and any task
# has the same decisions. Below 32 losses the first variance is off by more than a quarter; 1% of a long run is past the
# steepest fall.
_BURN_IN = (32, 0.01)
# A half-life of 0.5% of the updates is short beside the 5% to 20% that a loss takes to level off; below 8 updates the
# average is hardly quieter than the losses.
_HALF_LIFE = (8, 0.005)
_SLOW = 4
"""Half-lives of the fast average in one of the slow one, and how many a step has to be absorbed."""
_MOST_UNDONE = 2
"""A second step that was not absorbed says that no further one will be."""


@dataclass(frozen=True)
class TrainLoss:
    """Freeze a small group whenever the training loss has levelled off, and undo it unless the loss recovers.

    Averages of the loss run from the first update on, or from where a run continues from its parent. The settings of
    freezing say how many heads may be frozen in all.
    """

    name: ClassVar[str] = "train_loss"
    chooses_once: ClassVar[bool] = False
    several_events: ClassVar[bool] = True
    multiplier: float = 3.0
    """How many standard deviations of the averaged loss a change must exceed to count: with more, a plateau is found
    earlier and a step passes as absorbed more easily."""
    group: float = 0.02
    """Heads proposed at a time, as a share of all, at least one."""
    cap: float = 0.5
    """Largest share of all heads that the settings of freezing may ask for."""

    def __post_init__(self):
        _check_numbers(self, lambda value: value > 0, "above 0", "multiplier")
        _check_numbers(self, lambda value: 0 < value <= 1, "above 0 and at most 1", "group", "cap")

    def first_update(self, updates: int) -> None:
        """Return None: the loss decides when the first event comes."""

    def start(self, *, updates: int, heads: int, limit: int) -> "TrainLossProposer":
        """Return the state machine of a run; raise InputError when it is to freeze more heads than the cap allows."""
        _check_cap(self.cap, heads=heads, limit=limit)
        group = max(1, round(self.group * heads))
        return TrainLossProposer(self.multiplier, updates=updates, group=group, limit=limit)


@dataclass(kw_only=True)
class Averages:
    """Running averages of the loss, nats: its level, its descent and its noise."""

    seen: int = 0
    """Losses so far."""
    last: float = 0.0
    fast: float = 0.0
    slow: float = 0.0
    descent: float = 0.0
    """Slow average of what an update takes off the fast average."""
    variance: float = 0.0
    """Of the noise of one update's loss."""
    peak: float = 0.0
    """Largest difference of the slow average from the fast one so far."""
    since_peak: int = 0
    """Losses since then."""
    first: list[float] = field(default_factory=list)
    """The losses of the burn-in, while it lasts."""

    @property
    def gap(self) -> float:
        """The gap g of Eq. S.22, positive while the loss falls."""
        return self.slow - self.fast

    def take(self, loss: float, *, fast: float, slow: float, burn_in: int) -> None:
        """Take in a loss, with these coefficients of the averages."""
        if not self.seen:
            self.last = self.fast = self.slow = loss
        change = loss - self.last + self.descent
        before, self.last = self.fast, loss
        self.fast += fast * (loss - self.fast)
        self.slow += slow * (loss - self.slow)
        self.descent += slow * (before - self.fast - self.descent)
        self.seen += 1
        self.since_peak += 1
        if self.gap > self.peak:
            self.peak, self.since_peak = self.gap, 0
        if self.seen <= burn_in:
            self.first.append(loss)
        else:
            # From changes of the loss, as in the burn-in: a fall or a rise has next to no influence on them.
            self.variance += fast * (change**2 / 2 - self.variance)
        if self.seen == burn_in:
            self.variance, self.first = _noise(self.first), []


def _noise(losses: list[float]) -> float:
    """Return half the variance of the changes from loss to loss about their straight line."""
    changes = [later - earlier for earlier, later in pairwise(losses)]
    slope, start = linear_regression(range(len(changes)), changes)
    residuals = [change - start - slope * number for number, change in enumerate(changes)]
    return fmean(one**2 for one in residuals) * len(residuals) / (len(residuals) - 2) / 2


@dataclass(frozen=True, kw_only=True)
class Step:
    """A group that was frozen and not yet absorbed."""

    event: int
    """Its number in the run."""
    seen: int
    """Losses before it."""
    fast: float
    """Fast average at the event."""
    descent: float
    """What the loss fell by in an update then."""
    lowest_score: float | None


class TrainLossProposer(Proposer):
    """Propose a group at a plateau of the training loss, and to undo it when the loss does not recover in time."""

    name = TrainLoss.name
    state = ("limit", "update", "armed", "undo", "frozen", "events", "undone", "below", "recoveries", "stopped")

    def __init__(self, multiplier: float, *, updates: int, group: int, limit: int):
        self.multiplier, self.updates, self.group, self.limit = (multiplier, updates, group, limit)
        self.half_life = max(_HALF_LIFE[0], _HALF_LIFE[1] * updates)
        self.burn_in = max(_BURN_IN[0], math.ceil(_BURN_IN[1] * updates))
        self.patience = _SLOW * self.half_life
        """Updates within which a step must be absorbed."""
        self._fast = 1 - 2 ** (-1 / self.half_life)
        self._slow = 1 - 2 ** (-1 / self.patience)
        self.averages = Averages()
        self.step: Step | None = None
        self.update = 0
        self.armed = True
        """Whether a plateau may be answered: at first, and again once the loss fell after an event."""
        self.undo: str | None = None
        """Why the step is to be undone; None unless it is."""
        self.frozen = self.events = self.undone = 0
        """Heads frozen so far; groups frozen, undone ones included; groups undone."""
        self.below: float | None = None
        """Only heads that score less are proposed, since a group was undone."""
        self.recoveries: tuple[int, ...] = ()
        """Updates that each absorbed step took."""
        self.stopped = False
        """Whether nothing was eligible any more."""

    @property
    def tolerance(self) -> float:
        """The threshold z n of Eq. S.23, nats: smaller differences of the averaged loss mean nothing."""
        return self.multiplier * math.sqrt(self.averages.variance * self._fast / (2 - self._fast))

    @property
    def finished(self) -> bool:
        """Whether no event comes any more."""
        ended = self.stopped or self.undone >= _MOST_UNDONE or self.frozen >= self.limit
        return self.step is None and (ended or self.too_late(self.update))

    def too_late(self, update: int) -> bool:
        """Return whether fewer updates are left than steps took to be absorbed on average."""
        return self.updates - update < (fmean(self.recoveries) if self.recoveries else self.patience)

    def observe(self, update: int, loss: float) -> None:
        """Take the loss of an update; raise InputError when it is not finite."""
        if not math.isfinite(loss):
            raise InputError(f"a training loss must be finite, got {loss} at update {update}")
        self.update = update
        self.averages.take(loss, fast=self._fast, slow=self._slow, burn_in=self.burn_in)
        if self.averages.seen < self.burn_in:
            return
        if self.step is not None:
            self._follow(self.step)
        if self.averages.gap > self.tolerance:
            self.armed = True

    def _follow(self, step: Step) -> None:
        """Decide whether a step is absorbed, or is to be undone, Eq. S.24."""
        elapsed = self.averages.seen - step.seen
        # Before one half-life most of the average is of losses before the event: nearly any step would pass.
        if elapsed < self.half_life:
            return
        excess = self.averages.fast - (step.fast - step.descent * elapsed)
        if excess <= self.tolerance:
            self.recoveries = (*self.recoveries, elapsed)
            self.step, self.undo = None, None
        elif elapsed > self.patience:
            self.undo = (
                f"{self.name}: after {elapsed} updates the loss is {excess:.5f} nats above its path before "
                f"event {step.event}, more than {self.tolerance:.5f}"
            )

    def propose(self, update: int) -> list[Event]:
        """Return a group where the loss has levelled off, or the undoing of the one that was not absorbed."""
        known = self.averages
        if self.step is not None:
            return [] if self.undo is None else [Undo(event=self.step.event, reason=self.undo)]
        if self.finished or known.seen < self.burn_in or self.too_late(update) or not self._level():
            return []
        reason = f"{self.name}: the averaged loss fell by {known.gap:.5f} nats, less than {self.tolerance:.5f}"
        return [Freeze(count=min(self.group, self.limit - self.frozen), below=self.below, reason=reason)]

    def _level(self) -> bool:
        """Return whether the tests of a plateau hold: all three of Eq. S.23 for the first event."""
        known, plateau = self.averages, self.averages.gap < self.tolerance
        if self.events:
            return plateau and self.armed
        return plateau and self.tolerance <= known.peak and known.since_peak >= self.half_life

    def done(self, event: Event, outcome: Outcome) -> None:
        """Begin to follow a group that was frozen, or give up on heads that score as high as one that was undone."""
        known = self.averages
        self.armed = False
        if isinstance(event, Undo):
            assert self.step is not None
            self.frozen -= len(outcome.heads)
            self.undone += 1
            self.below, self.step, self.undo = self.step.lowest_score, None, None
            return
        self.events += 1
        self.stopped = not len(outcome.heads)
        if not self.stopped:
            self.frozen += len(outcome.heads)
            now = {"seen": known.seen, "fast": known.fast, "descent": known.descent}
            self.step = Step(event=outcome.number, lowest_score=outcome.lowest_score, **now)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, the step that is followed and the decisions."""
        step = None if self.step is None else asdict(self.step)
        return {**super().state_dict(), "averages": asdict(self.averages), "step": step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        super().load_state_dict(state)
        self.averages = Averages(**{**state["averages"], "first": list(state["averages"]["first"])})
        self.step = None if state["step"] is None else Step(**state["step"])


# --- checks


def setting_of_moment(schedule: Timetable) -> str:
    """Return the setting that says when a schedule's first event comes, as its flag is called."""
    return next((f"schedule.{name}" for name in ("at", "begin") if hasattr(schedule, name)), "schedule")


def _check_moments(schedule: Timetable, *names: str) -> None:
    """Raise InputError unless settings are moments of training: whole numbers of updates, or shares in [0, 1]."""

    def usable(value: Any) -> bool:
        return value >= 0 and (isinstance(value, Integral) or value <= 1)

    _check_numbers(schedule, usable, "a whole number of updates from 0, or a share in [0, 1]", *names)


def _check_numbers(schedule: Timetable, usable: Callable[[Any], bool], expected: str, *names: str) -> None:
    """Raise InputError unless settings are usable finite numbers."""
    for name in names:
        value: Any = getattr(schedule, name)
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
        if not (math.isfinite(number) and usable(value)):
            raise InputError(f"schedule.{name} must be {expected}, got {value!r}")


def _check_cap(cap: float, *, heads: int, limit: int) -> None:
    """Raise InputError when the settings of freezing ask for more heads than an adaptive schedule may ever freeze."""
    if limit > cap * heads:
        raise InputError(
            f"heads to freeze must be at most schedule.cap={cap:g} of {heads}, got {limit}; lower the rate or raise it"
        )


def _update_at(name: str, value: float, updates: int) -> int:
    """Return the update of a moment: 1.0 is the end of all, 1 the first; raise InputError when there are fewer."""
    moment = int(value) if isinstance(value, Integral) else round(value * updates)
    if moment > updates:
        raise InputError(f"schedule.{name} must be a share in [0, 1] or an update in [0, {updates}], got {value}")
    return moment


# --- the registry

Schedule = OneTime | Gradual | ValidationBudget | TrainLoss
"""Every schedule that settings may name."""
SCHEDULES: dict[str, type[Schedule]] = {each.name: each for each in (OneTime, Gradual, ValidationBudget, TrainLoss)}


def schedule_to_dict(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule's name and settings as plain values for JSON.

    >>> schedule_to_dict(OneTime(at=0.25))
    {'name': 'one_time', 'at': 0.25}
    """
    return {"name": schedule.name, **asdict(schedule)}


def schedule_from_dict(values: dict[str, Any]) -> Schedule:
    """Build a schedule from `schedule_to_dict`'s form; raise InputError naming an unknown schedule or setting.

    >>> schedule_from_dict({"name": "one_time", "at": 100})
    OneTime(at=100)
    """
    name = values.get("name")
    if name not in SCHEDULES:
        raise InputError(f"schedule must be one of {sorted(SCHEDULES)}; got {name!r}{did_you_mean(name, SCHEDULES)}")
    try:
        return SCHEDULES[name](**{key: value for key, value in values.items() if key != "name"})
    except TypeError as error:
        raise InputError(f"not the settings of a {name} schedule: {error}") from error
