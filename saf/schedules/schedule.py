"""What training asks of a schedule."""

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Event:
    """Freeze `rate` of the model's heads once `update` updates are done."""

    update: int
    rate: float


class Schedule(Protocol):
    """Decides at which updates heads are frozen.

    Training calls `observe` once an update, saves a checkpoint, asks `due`, carries the events out and
    reports each with `done`. A checkpoint holds `state_dict()` from before the events, so a run killed
    during one meets it again when resumed. A schedule may have a property `finished`: once it is true no event comes
    any more, and nothing is measured for one.
    """

    def observe(self, update: int, loss: float) -> None:
        """Take the training loss (nats per token) of an update."""
        ...

    def due(self, update: int) -> list[Event]:
        """Return the events to carry out now that `update` updates are done; asking changes nothing."""
        ...

    def done(self, event: Event) -> None:
        """Take note that an event was carried out."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to go on after a restart, as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        ...
