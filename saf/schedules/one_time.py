"""The paper's default: one event, near the middle of training."""

from dataclasses import dataclass
from typing import Any, ClassVar

from saf.errors import CheckpointError
from saf.schedules.schedule import Event, Freeze, Outcome, check_moment, check_state, update_at


@dataclass(frozen=True)
class OneTime:
    """Freeze once, at a fixed moment; an ordinary arm saves a checkpoint there, to branch from."""

    name: ClassVar[str] = "one_time"
    chooses_once: ClassVar[bool] = True
    several_events: ClassVar[bool] = False
    at: int | float = 0.5
    """When: a whole number of updates, or a share of all of them, also where a run gets time and does more or fewer."""

    def __post_init__(self):
        """Raise InputError for a moment that no run has."""
        check_moment(self.name, "at", self.at)

    def first_update(self, updates: int) -> int:
        """Return after how many of `updates` updates the event comes; raise InputError when there are fewer.

        >>> OneTime(at=0.5).first_update(5_000)
        2500
        """
        return update_at("at", self.at, updates)

    def start(self, *, updates: int, heads: int, limit: int) -> "OneTimeProposer":
        """Return the state machine of a run of `updates` updates, which freezes what its settings ask for."""
        return OneTimeProposer(self.first_update(updates))


class OneTimeProposer:
    """Propose one freeze from update `at` on, until it was carried out.

    >>> proposer = OneTime(at=50).start(updates=100, heads=144, limit=36)
    >>> proposer.propose(49), [event.kind for event in proposer.propose(50)]
    ([], ['freeze'])
    """

    def __init__(self, at: int):
        """Take the number of updates before the event."""
        self.at = at
        self._fired = False

    @property
    def finished(self) -> bool:
        """Return whether the event is over."""
        return self._fired

    def observe(self, update: int, loss: float) -> None:
        """Ignore the loss: the moment is fixed in advance."""

    def propose(self, update: int) -> list[Event]:
        """Return the event from update `at` on until it was carried out."""
        if self._fired or update < self.at:
            return []
        return [Freeze(reason=f"one_time: update {self.at} is done")]

    def done(self, event: Event, outcome: Outcome) -> None:
        """Never propose the event again."""
        self._fired = True

    def state_dict(self) -> dict[str, Any]:
        """Return the moment and whether the event is over."""
        return {"name": OneTime.name, "at": self.at, "fired": self._fired}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`; raise CheckpointError if it is another schedule's."""
        check_state(state, OneTime.name)
        if state.get("at") != self.at:
            raise CheckpointError(
                f"expected the state of a one_time schedule with at={self.at}; got {state}. "
                "Resume with the settings of the run"
            )
        self._fired = bool(state["fired"])
