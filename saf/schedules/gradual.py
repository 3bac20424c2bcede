"""The same heads as at one time, but in groups at evenly spaced updates (docs/method.md, Eq. S.20)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from saf.errors import InputError
from saf.heads import Head
from saf.schedules.schedule import Event, Freeze, Outcome, check_moment, check_state, update_at


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
    """When the last one is, given the same way."""
    groups: int = 5
    """Number of groups."""

    def __post_init__(self):
        """Raise InputError for moments that no run has, for an end before the beginning, and for no groups."""
        check_moment(self.name, "begin", self.begin)
        check_moment(self.name, "end", self.end)
        if isinstance(self.groups, bool) or not isinstance(self.groups, int) or self.groups < 1:
            raise InputError(f"groups of a gradual schedule is a whole number from 1; got groups={self.groups!r}")
        if type(self.begin) is type(self.end) and self.begin > self.end:
            raise InputError(f"a gradual schedule ends where it begins or later; got {self}")

    def events(self, updates: int) -> tuple[int, ...]:
        """Return after how many of `updates` updates each group comes; raise InputError when there are fewer.

        >>> Gradual(begin=0.5, end=0.6, groups=5).events(5_000)
        (2500, 2625, 2750, 2875, 3000)
        """
        begin, end = self.first_update(updates), update_at("end", self.end, updates)
        if begin > end:
            raise InputError(f"of {updates} updates, {self} begins after update {begin} and ends after update {end}")
        # Shares are rounded once, at each event: rounded ends would move the groups between them.
        exact = [value * updates if isinstance(value, float) else float(value) for value in (self.begin, self.end)]
        steps = max(self.groups - 1, 1)
        return tuple(round(exact[0] + (exact[1] - exact[0]) * group / steps) for group in range(self.groups))

    def first_update(self, updates: int) -> int:
        """Return after how many of `updates` updates the first group comes; raise InputError when there are fewer."""
        return update_at("begin", self.begin, updates)

    def start(self, *, updates: int, heads: int, limit: int) -> "GradualProposer":
        """Return the state machine of a run of `updates` updates; raise InputError for more groups than heads."""
        if self.groups > limit:
            raise InputError(
                f"a gradual schedule of {self.groups} groups needs as many heads; {limit} are to be frozen: "
                "ask for fewer groups, or freeze more"
            )
        return GradualProposer(self.events(updates), limit)


class GradualProposer:
    """Propose to choose all heads and freeze the first group, then group after group of those deferred."""

    def __init__(self, moments: tuple[int, ...], limit: int):
        """Take the number of updates before each group, and how many heads there are to be in all."""
        self.moments = moments
        self.limit = limit
        self._done = 0
        self._waiting: tuple[Head, ...] = ()

    @property
    def finished(self) -> bool:
        """Return whether all groups are over, or no head is left for those to come."""
        return self._done == len(self.moments) or (self._done > 0 and not self._waiting)

    def observe(self, update: int, loss: float) -> None:
        """Ignore the loss: the moments are fixed in advance."""

    def propose(self, update: int) -> list[Event]:
        """Return the event of the next group from its update on until it was carried out."""
        if self.finished or update < self.moments[self._done]:
            return []
        left = len(self.moments) - self._done
        size = -(-(len(self._waiting) if self._done else self.limit) // left)
        reason = f"gradual: group {self._done + 1} of {len(self.moments)}, update {self.moments[self._done]} is done"
        if self._done:
            return [Freeze(among=self._waiting[:size], reason=reason)]
        return [Freeze(first=size, reason=reason)]

    def done(self, event: Event, outcome: Outcome) -> None:
        """Go on to the next group."""
        assert isinstance(event, Freeze)
        self._waiting = outcome.deferred if event.among is None else self._waiting[len(event.among) :]
        self._done += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the moments, the heads in all, how many groups are over, and the heads that wait."""
        waiting = [list(head) for head in self._waiting]
        state = {"moments": list(self.moments), "limit": self.limit, "done": self._done, "waiting": waiting}
        return {"name": Gradual.name, **state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`; raise CheckpointError if it is another schedule's."""
        check_state(state, Gradual.name)
        self.moments = tuple(state["moments"])
        self.limit, self._done = int(state["limit"]), int(state["done"])
        self._waiting = tuple((layer, head) for layer, head in state["waiting"])
