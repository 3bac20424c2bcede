"""Freeze in small steps when the training loss has stopped falling, once it made up for the last step.

Equations S.22 to S.24 of docs/method.md. Every constant is a share of training or a ratio to the noise of the loss, so
that a run of any length and any task has the same decisions.
"""

import math
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import fmean, linear_regression
from typing import Any, ClassVar

from saf.errors import InputError
from saf.schedules.schedule import (
    Event,
    Freeze,
    Outcome,
    Undo,
    check_cap,
    check_number,
    check_state,
    group_size,
)

# Below 32 losses the first variance is off by more than a quarter; 1% of a long run is past the steepest fall.
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

    Averages of the loss are kept from the first update on, or from where a run continues from its parent. The settings
    of freezing say how many heads may be frozen in all.
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
        """Raise InputError for a multiplier that is not positive, and shares out of range."""
        check_number(self.name, "multiplier", self.multiplier, above=True)
        for name in ("group", "cap"):
            check_number(self.name, name, getattr(self, name), above=True, high=1)

    def first_update(self, updates: int) -> None:
        """Return None: the loss decides when the first event comes."""

    def start(self, *, updates: int, heads: int, limit: int) -> "TrainLossProposer":
        """Return the state machine of a run; raise InputError when it is to freeze more heads than the cap allows."""
        check_cap(self.name, self.cap, heads=heads, limit=limit)
        return TrainLossProposer(self.multiplier, updates=updates, group=group_size(self.group, heads), limit=limit)


@dataclass(kw_only=True)
class Averages:
    """Hold what is known of the loss, nats: its averages, its noise, and how far it has fallen."""

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
        """Return g of Eq. (S.22), positive while the loss falls."""
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
            # As the seed is taken: from changes of the loss, on which a fall or a rise has next to no influence.
            self.variance += fast * (change**2 / 2 - self.variance)
        if self.seen == burn_in:
            self.variance, self.first = _noise(self.first), []


def _noise(losses: list[float]) -> float:
    """Return half the variance of the changes from loss to loss about their straight line."""
    changes = [later - earlier for earlier, later in pairwise(losses)]
    slope, start = linear_regression(range(len(changes)), changes)
    left = [change - start - slope * number for number, change in enumerate(changes)]
    return fmean(one**2 for one in left) * len(left) / (len(left) - 2) / 2


@dataclass(kw_only=True)
class Step:
    """Hold a group that was frozen and not yet absorbed."""

    event: int
    """Its number in the run."""
    seen: int
    """Losses before it."""
    fast: float
    """Fast average at the event."""
    descent: float
    """What the loss fell by in an update then."""
    lowest_score: float | None


@dataclass(kw_only=True)
class Decisions:
    """Hold what was decided so far."""

    armed: bool = True
    """Whether a plateau may be answered: at first, and again once the loss fell after an event."""
    step: Step | None = None
    undo: str | None = None
    """Why the step is to be undone; None unless it is."""
    frozen: int = 0
    """Heads frozen so far."""
    events: int = 0
    """Groups frozen, undone ones included."""
    undone: int = 0
    below: float | None = None
    """Only heads that score less are proposed, since a group was undone."""
    recoveries: list[int] = field(default_factory=list)
    """Updates that each absorbed step took."""
    stopped: bool = False
    """Whether nothing was eligible any more."""


class TrainLossProposer:
    """Propose a group at a plateau of the training loss, and to undo it when the loss does not recover in time."""

    def __init__(self, multiplier: float, *, updates: int, group: int, limit: int):
        """Take the multiplier z, the updates of the run, the size of a group, and the most heads."""
        self.multiplier = multiplier
        self.updates = updates
        self.group = group
        self.limit = limit
        self.half_life = max(_HALF_LIFE[0], _HALF_LIFE[1] * updates)
        self.burn_in = max(_BURN_IN[0], math.ceil(_BURN_IN[1] * updates))
        self.patience = _SLOW * self.half_life
        """Updates within which a step must be absorbed."""
        self._fast = 1 - 2 ** (-1 / self.half_life)
        self._slow = 1 - 2 ** (-1 / self.patience)
        self._last_update = 0
        self.averages = Averages()
        self.decisions = Decisions()

    @property
    def tolerance(self) -> float:
        """Return z n of Eq. (S.23), nats: what the averaged loss may differ by without that meaning anything."""
        return self.multiplier * math.sqrt(self.averages.variance * self._fast / (2 - self._fast))

    @property
    def finished(self) -> bool:
        """Return whether no event comes any more."""
        made = self.decisions
        if made.step is not None:
            return False
        ended = made.stopped or made.undone >= _MOST_UNDONE or made.frozen >= self.limit
        return ended or self._too_late(self._last_update)

    def _too_late(self, update: int) -> bool:
        """Return whether fewer updates are left than steps took to be absorbed on average."""
        recovery = fmean(self.decisions.recoveries) if self.decisions.recoveries else self.patience
        return self.updates - update < recovery

    def observe(self, update: int, loss: float) -> None:
        """Take the loss of an update; raise InputError when it is not finite."""
        if not math.isfinite(loss):
            raise InputError(f"a training loss is a finite number of nats; got {loss} at update {update}")
        self._last_update = update
        self.averages.take(loss, fast=self._fast, slow=self._slow, burn_in=self.burn_in)
        if self.averages.seen < self.burn_in:
            return
        if self.decisions.step is not None:
            self._follow(self.decisions.step)
        if self.averages.gap > self.tolerance:
            self.decisions.armed = True

    def _follow(self, step: Step) -> None:
        """Decide whether a step is absorbed, or is to be undone, Eq. (S.24)."""
        elapsed = self.averages.seen - step.seen
        # Before one half-life most of the average is of losses before the event: nearly any step would pass.
        if elapsed < self.half_life:
            return
        excess = self.averages.fast - (step.fast - step.descent * elapsed)
        if excess <= self.tolerance:
            self.decisions.recoveries.append(elapsed)
            self.decisions.step, self.decisions.undo = None, None
        elif elapsed > self.patience:
            self.decisions.undo = (
                f"{TrainLoss.name}: after {elapsed} updates the loss is {excess:.5f} nats above its path before "
                f"event {step.event}, more than {self.tolerance:.5f}"
            )

    def propose(self, update: int) -> list[Event]:
        """Return a group where the loss has levelled off, or the undoing of the one that was not absorbed."""
        made, known = self.decisions, self.averages
        if made.step is not None:
            return [] if made.undo is None else [Undo(event=made.step.event, reason=made.undo)]
        if self.finished or known.seen < self.burn_in or self._too_late(update) or not self._level():
            return []
        reason = f"{TrainLoss.name}: the averaged loss fell by {known.gap:.5f} nats, less than {self.tolerance:.5f}"
        return [Freeze(count=min(self.group, self.limit - made.frozen), below=made.below, reason=reason)]

    def _level(self) -> bool:
        """Return whether the tests of a plateau hold: all three of Eq. (S.23) for the first event."""
        known, tolerance = self.averages, self.tolerance
        plateau = known.gap < tolerance
        if self.decisions.events:
            return plateau and self.decisions.armed
        return plateau and tolerance <= known.peak and known.since_peak >= self.half_life

    def done(self, event: Event, outcome: Outcome) -> None:
        """Begin to follow a group that was frozen, or give up on heads that score as high as one that was undone."""
        made, known = self.decisions, self.averages
        made.armed = False
        if isinstance(event, Undo):
            assert made.step is not None
            made.frozen -= len(outcome.heads)
            made.undone += 1
            made.below = made.step.lowest_score
            made.step, made.undo = None, None
            return
        made.events += 1
        made.stopped = not len(outcome.heads)
        if made.stopped:
            return
        made.frozen += len(outcome.heads)
        made.step = Step(
            event=outcome.number,
            seen=known.seen,
            fast=known.fast,
            descent=known.descent,
            lowest_score=outcome.lowest_score,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and the decisions."""
        state = {"averages": asdict(self.averages), "decisions": asdict(self.decisions)}
        return {"name": TrainLoss.name, "limit": self.limit, "update": self._last_update, **state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`; raise CheckpointError if it is another schedule's."""
        check_state(state, TrainLoss.name)
        averages, decisions = state["averages"], state["decisions"]
        self.limit, self._last_update = int(state["limit"]), int(state["update"])
        self.averages = Averages(**{**averages, "first": list(averages["first"])})
        step = None if decisions["step"] is None else Step(**decisions["step"])
        recoveries = list(decisions["recoveries"])
        self.decisions = Decisions(**{**decisions, "step": step, "recoveries": recoveries})
