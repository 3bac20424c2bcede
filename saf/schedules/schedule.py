"""What a run asks of a schedule: the events it may propose, and what it hears of their outcome.

A schedule is a setting, a frozen dataclass such as `OneTime(at=0.5)`. Its `start` makes the small state machine that a
run keeps: it observes losses, proposes events, and hears what came of each.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from saf.heads import HeadSet


@dataclass(frozen=True, kw_only=True)
class Freeze:
    """Propose to freeze heads: the lowest-scoring of those still live, chosen as the run's FreezeConfig says."""

    kind: ClassVar[str] = "freeze"
    rate: float
    """Share of all heads of the original model that this event freezes."""
    reason: str = ""
    """Why now, in words for the record."""


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Propose to remove heads altogether; no run carries that out yet."""

    kind: ClassVar[str] = "prune"
    rate: float
    """Share of all heads of the original model that this event removes."""
    reason: str = ""
    """Why now, in words for the record."""


@dataclass(frozen=True, kw_only=True)
class Undo:
    """Propose to take an earlier event back: its heads are live again, with the rows they had when it happened."""

    kind: ClassVar[str] = "undo"
    event: int
    """Number of the event in the run, from 1."""
    reason: str = ""
    """Why now, in words for the record."""


Event = Freeze | Prune | Undo


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Hold what came of an event that a run carried out."""

    number: int
    """The event's number in the run, from 1."""
    heads: HeadSet
    """The heads that were frozen, or live again."""
    loss_before: float
    """Loss on the controller's windows just before, nats per target."""
    loss_after: float
    """The same just after."""
    seconds: float
    """What the event cost, evaluations left out."""


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

    def first_update(self, updates: int) -> int | None:
        """Return the update after which the first event may come, in a run of `updates`; None when nothing fixes it.

        An ordinary arm saves a checkpoint there, to branch from. Raises InputError for settings that do not fit into
        so many updates.
        """
        ...

    def start(self, *, updates: int, rate: float) -> Proposer:
        """Return the state machine for a run of `updates` updates, whose FreezeConfig freezes `rate` of the heads."""
        ...
