"""The paper's default: one event, near the middle of training."""

from typing import Any

from saf.errors import CheckpointError, InputError
from saf.schedules.schedule import Event


class OneTime:
    """Freeze once, after `at` updates.

    >>> schedule = OneTime(at=50, rate=0.25)
    >>> schedule.due(49), schedule.due(50)
    ([], [Event(update=50, rate=0.25)])
    """

    def __init__(self, *, at: int, rate: float):
        """Take the number of updates before the event and the share of all heads to freeze."""
        if at < 0:
            raise InputError(f"a freezing event comes after 0 or more updates; got at={at}")
        self.at = at
        self.rate = rate
        self._fired = False

    def observe(self, update: int, loss: float) -> None:
        """Ignore the loss: the moment is fixed in advance."""

    def due(self, update: int) -> list[Event]:
        """Return the event from update `at` on until it was carried out."""
        return [] if self._fired or update < self.at else [Event(update, self.rate)]

    def done(self, event: Event) -> None:
        """Never propose the event again."""
        self._fired = True

    @property
    def finished(self) -> bool:
        """Whether the event is over."""
        return self._fired

    def state_dict(self) -> dict[str, Any]:
        """Return the settings and whether the event is over."""
        return {"schedule": "one_time", "at": self.at, "fired": self._fired}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`; raise CheckpointError if it is another schedule's."""
        if state.get("schedule") != "one_time" or state.get("at") != self.at:
            raise CheckpointError(
                f"expected the state of a one_time schedule with at={self.at}; got {state}. "
                "Resume with the settings of the run"
            )
        self._fired = bool(state["fired"])
