"""The paper's default: one event, near the middle of training."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from saf.errors import CheckpointError, InputError
from saf.schedules.schedule import Event, Freeze, Outcome
from saf.settings import Flag, documented


@documented
@dataclass(frozen=True)
class OneTime:
    """Freeze once, at a fixed moment; an ordinary arm saves a checkpoint there, to branch from.

    >>> OneTime(at=0.5).first_update(5_000)
    2500
    """

    name: ClassVar[str] = "one_time"
    at: Annotated[int | float, Flag("freeze-at")] = 0.5
    """When: a whole number of updates, or a share of all of them."""

    def __post_init__(self):
        """Raise InputError for a moment that no run has."""
        if not self.at >= 0 or (isinstance(self.at, float) and self.at > 1):
            raise InputError(f"a freezing event comes after 0 or more updates, or a share in [0, 1]; got at={self.at}")

    def first_update(self, updates: int) -> int:
        """Return after how many of `updates` updates the event comes; raise InputError when there are fewer."""
        moment = round(self.at * updates) if isinstance(self.at, float) else self.at
        if moment > updates:
            raise InputError(
                f"the schedule's at must be a share in [0, 1] or an update in [0, {updates}]; got {self.at}"
            )
        return moment

    def start(self, *, updates: int, rate: float) -> "OneTimeProposer":
        """Return the state machine of a run of `updates` updates that freezes `rate` of the heads."""
        return OneTimeProposer(self.first_update(updates), rate)


class OneTimeProposer:
    """Propose one freeze from update `at` on, until it was carried out.

    >>> proposer = OneTime(at=50).start(updates=100, rate=0.25)
    >>> proposer.propose(49), [event.rate for event in proposer.propose(50)]
    ([], [0.25])
    """

    def __init__(self, at: int, rate: float):
        """Take the number of updates before the event and the share of all heads to freeze."""
        self.at = at
        self.rate = rate
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
        return [Freeze(rate=self.rate, reason=f"one_time: update {self.at} is done")]

    def done(self, event: Event, outcome: Outcome) -> None:
        """Never propose the event again."""
        self._fired = True

    def state_dict(self) -> dict[str, Any]:
        """Return the moment and whether the event is over."""
        return {"name": OneTime.name, "at": self.at, "fired": self._fired}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`; raise CheckpointError if it is another schedule's."""
        if state.get("name") != OneTime.name or state.get("at") != self.at:
            raise CheckpointError(
                f"expected the state of a one_time schedule with at={self.at}; got {state}. "
                "Resume with the settings of the run"
            )
        self._fired = bool(state["fired"])
