"""What a run asks of a schedule: the events it may propose, and what it hears of their outcome.

A schedule is a setting, a frozen dataclass such as `OneTime(at=0.5)`. Its `start` makes the small state machine that a
run keeps: it observes losses, proposes events, and hears what came of each.
"""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, Protocol

from saf.errors import CheckpointError, InputError
from saf.heads import Head, HeadSet


@dataclass(frozen=True, kw_only=True)
class Freeze:
    """Propose to freeze heads: the lowest-scoring of those still live, chosen as the run's FreezeConfig says.

    What a field leaves open is as the settings have it.
    """

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
    """Controller batches that the losses around the event are of; the run's usual windows when None."""
    reason: str = ""
    """Why now, in words for the record."""


@dataclass(frozen=True, kw_only=True)
class Prune(Freeze):
    """Propose to remove heads altogether, chosen the same way.

    A run whose settings say to prune takes each proposal to freeze for one of these, so that schedules propose to
    freeze and work for both.
    """

    kind: ClassVar[str] = "prune"


@dataclass(frozen=True, kw_only=True)
class Undo:
    """Propose to take an earlier event back: its heads are live again, with the rows they had when it happened."""

    kind: ClassVar[str] = "undo"
    event: int
    """Number of the event in the run, from 1."""
    batches: int | None = None
    """As for a freeze."""
    reason: str = ""
    """Why now, in words for the record."""


Event = Freeze | Prune | Undo


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Hold what came of an event that a run carried out."""

    number: int
    """The event's number in the run, from 1."""
    heads: HeadSet
    """The heads that were frozen, or live again; none where no live head could be frozen."""
    loss_before: float
    """Loss on the controller's windows just before, nats per target."""
    loss_after: float
    """The same just after."""
    seconds: float
    """What the event cost, evaluations left out."""
    lowest_score: float | None = None
    """Lowest score among the heads frozen; None where none was."""
    deferred: tuple[Head, ...] = ()
    """Heads that a freeze with `first` chose and left live, by ascending score."""


class Proposer(Protocol):
    """Decide during one run when events happen; made by a schedule's `start`.

    A run calls `observe` once an update, saves a checkpoint, asks `propose` until it has nothing to propose, carries
    out each event and reports it with `done`. A checkpoint holds `state_dict()` from before the events, so that a run
    killed during one meets it again when resumed.
    """

    @property
    def finished(self) -> bool:
        """Return whether no event comes any more, so that nothing need be measured for one."""
        ...

    def observe(self, update: int, loss: float) -> None:
        """Take the training loss (nats per target) of an update."""
        ...

    def propose(self, update: int) -> list[Event]:
        """Return the events to carry out now that `update` updates are done; asking changes nothing."""
        ...

    def done(self, event: Event, outcome: Outcome) -> None:
        """Take note of an event that was carried out, and of what came of it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to go on after a restart, as JSON values, with the schedule's `name`."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`; raise CheckpointError when it is of another schedule."""
        ...


class Timetable(Protocol):
    """Say what every schedule in the registry is: a frozen dataclass of JSON values with these members."""

    name: ClassVar[str]
    """Its name in the registry, in settings and in checkpoints."""
    chooses_once: ClassVar[bool]
    """Whether the first event chooses all heads; conditions on all of them, such as most per layer, hold only then."""
    several_events: ClassVar[bool]
    """Whether heads may change more than once; a run of "auto" is then compiled by layers on a GPU."""

    def first_update(self, updates: int) -> int | None:
        """Return the update after which the first event may come, in a run of `updates`; None when nothing fixes it.

        An ordinary arm saves a checkpoint there, to branch from. Raises InputError for settings that do not fit into
        so many updates.
        """
        ...

    def start(self, *, updates: int, heads: int, limit: int) -> Proposer:
        """Return the state machine for a run of `updates` updates of a model of so many `heads`, frozen ones included.

        `limit` is how many of its live heads the settings of freezing ask for. Raises InputError for settings that do
        not fit to these.
        """
        ...


def setting_of_moment(schedule: Timetable) -> str:
    """Return the setting that says when a schedule's first event comes, as its flag is called."""
    return next((f"schedule.{name}" for name in ("at", "begin") if hasattr(schedule, name)), "schedule")


def check_moment(schedule: str, name: str, value: Any) -> None:
    """Raise InputError unless a setting is a moment of training: a whole number of updates, or a share in [0, 1]."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not float(value) >= 0 or (_is_share(value) and float(value) > 1):
        raise InputError(
            f"{name} of a {schedule} schedule is a whole number of updates from 0, or a share in [0, 1]; "
            f"got {name}={value!r}"
        )


def update_at(name: str, value: float, updates: int) -> int:
    """Return after how many of `updates` updates a moment comes; raise InputError when there are fewer."""
    moment = round(value * updates) if _is_share(value) else int(value)
    if moment > updates:
        raise InputError(f"the schedule's {name} must be a share in [0, 1] or an update in [0, {updates}]; got {value}")
    return moment


def _is_share(value: Any) -> bool:
    """Return whether a moment is a share of all updates: 1.0 is the end, 1 the first update."""
    return not isinstance(value, Integral)


def check_number(schedule: str, name: str, value: Any, *, above: bool = False, high: float = math.inf) -> None:
    """Raise InputError unless a setting is a finite number of at least (`above`: above) 0 and at most `high`."""
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or number < 0 or (above and number == 0) or number > high:
        most = "" if high == math.inf else f" and at most {high:g}"
        raise InputError(
            f"{name} of a {schedule} schedule is a number {'above' if above else 'of at least'} 0{most}; "
            f"got {name}={value!r}"
        )


def group_size(share: float, heads: int) -> int:
    """Return how many of all heads an adaptive schedule proposes at a time: at least one."""
    return max(1, round(share * heads))


def check_cap(schedule: str, cap: float, *, heads: int, limit: int) -> None:
    """Raise InputError when the settings of freezing ask for more heads than an adaptive schedule may ever freeze."""
    if limit > cap * heads:
        raise InputError(
            f"the settings of freezing ask for {limit} of {heads} heads; a {schedule} schedule with cap={cap:g} "
            f"freezes at most {int(cap * heads)}: ask for a lower rate, or raise its cap"
        )


def check_state(state: dict[str, Any], name: str) -> None:
    """Raise CheckpointError when a `state_dict()` is of another schedule."""
    if state.get("name") != name:
        raise CheckpointError(
            f"expected the state of a {name} schedule; got {state}. Resume with the settings of the run"
        )
