"""Freeze in small steps as long as held-out loss stays within a budget (docs/method.md, Eq. S.21)."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from saf.errors import InputError
from saf.schedules.schedule import (
    Event,
    Freeze,
    Outcome,
    Undo,
    check_cap,
    check_moment,
    check_number,
    check_state,
    group_size,
    update_at,
)

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
    """Largest increase of perplexity that all groups kept may cost together, as a share: 0.01 is one percent."""
    begin: int | float = 0.5
    """When the first check comes: a whole number of updates, or a share of all of them."""
    every: int | float = 0.05
    """From one check to the next, given the same way; the last one comes before the last update."""
    group: float = 0.02
    """Heads proposed at a check, as a share of all, at least one."""
    cap: float = 0.5
    """Largest share of all heads that the settings of freezing may ask for."""

    def __post_init__(self):
        """Raise InputError for moments that no run has, a negative budget, and shares out of range."""
        check_number(self.name, "budget", self.budget)
        check_moment(self.name, "begin", self.begin)
        check_moment(self.name, "every", self.every)
        if not self.every > 0:
            raise InputError(f"checks of a {self.name} schedule are some updates apart; got every={self.every!r}")
        for name in ("group", "cap"):
            check_number(self.name, name, getattr(self, name), above=True, high=1)

    def checks(self, updates: int) -> tuple[int, ...]:
        """Return after how many of `updates` updates each check comes; raise InputError when there are fewer.

        >>> ValidationBudget(budget=0.01).checks(5_000)[:3]
        (2500, 2750, 3000)
        """
        first = self.first_update(updates)
        if first >= updates:
            raise InputError(
                f"a {self.name} schedule needs updates after its first check; got {self}, which comes after update "
                f"{first} of {updates}"
            )
        begin, every = (
            value * updates if isinstance(value, float) else float(value) for value in (self.begin, self.every)
        )
        every = max(every, 1.0)  # there is no check between two updates
        moments, number = {first}, 1
        # Heads frozen after the last update would not be trained with.
        while (moment := round(begin + number * every)) < updates:
            moments.add(moment)
            number += 1
        return tuple(sorted(moments))

    def first_update(self, updates: int) -> int:
        """Return after how many of `updates` updates the first check comes; raise InputError when there are fewer."""
        return update_at("begin", self.begin, updates)

    def start(self, *, updates: int, heads: int, limit: int) -> "ValidationBudgetProposer":
        """Return the state machine of a run; raise InputError when it is to freeze more heads than the cap allows."""
        check_cap(self.name, self.cap, heads=heads, limit=limit)
        return ValidationBudgetProposer(
            self.checks(updates), allowed=math.log1p(self.budget), group=group_size(self.group, heads), limit=limit
        )


class ValidationBudgetProposer:
    """Propose a group at each check, and to undo it when the losses around it say that it costs too much."""

    def __init__(self, checks: tuple[int, ...], *, allowed: float, group: int, limit: int):
        """Take the updates of the checks, the nats allowed in all, the size of a group, and the most heads."""
        self.checks = checks
        self.allowed = allowed
        self.group = group
        self.limit = limit
        self.spent = 0.0
        """Increase of the loss by the groups kept, nats."""
        self.frozen = 0
        """Heads frozen so far."""
        self._check = 0
        self._undo: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        """Return whether all checks are over, or all heads frozen that may be."""
        return self._undo is None and (self._check == len(self.checks) or self.frozen >= self.limit)

    def observe(self, update: int, loss: float) -> None:
        """Ignore the training loss: the controller's decides."""

    def propose(self, update: int) -> list[Event]:
        """Return the group of the check that is due, or the undoing of the one that cost too much."""
        if self._undo is not None:
            return [Undo(**self._undo, batches=BATCHES)]
        if self.finished or update < self.checks[self._check]:
            return []
        left = f"{self.spent:.3g} of {self.allowed:.3g} nats are spent"
        reason = f"{ValidationBudget.name}: check {self._check + 1} of {len(self.checks)}, {left}"
        return [Freeze(count=min(self.group, self.limit - self.frozen), batches=BATCHES, reason=reason)]

    def done(self, event: Event, outcome: Outcome) -> None:
        """Keep a group whose cost fits into the budget, or have it undone; after that the check is over."""
        if isinstance(event, Undo):
            self._undo = None
        else:
            cost = outcome.loss_after - outcome.loss_before
            # Not "> allowed": a cost that is NaN is never kept.
            if not self.spent + cost <= self.allowed:
                told = f"{cost:.3g} nats beside {self.spent:.3g} are more than {self.allowed:.3g}"
                self._undo = {"event": outcome.number, "reason": f"{ValidationBudget.name}: {told}"}
                return
            self.spent += cost
            self.frozen += len(outcome.heads)
        self._check += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the most heads, the checks that are over, what was spent and frozen, and what is to be undone."""
        state = {"limit": self.limit, "check": self._check, "spent": self.spent, "frozen": self.frozen}
        state["undo"] = self._undo
        return {"name": ValidationBudget.name, **state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`; raise CheckpointError if it is another schedule's."""
        check_state(state, ValidationBudget.name)
        self._check, self.spent, self.frozen = int(state["check"]), float(state["spent"]), int(state["frozen"])
        self.limit, self._undo = int(state["limit"]), state["undo"]
