"""A run without a model: losses on a curve, heads with scores, and events that cost what a test says."""

import json
import random
from collections.abc import Callable, Sequence

from saf.heads import HeadSet
from saf.schedules import Outcome, Undo

LAYERS, WIDTH = 12, 12
HEADS = LAYERS * WIDTH


class Simulated:
    """Drive a schedule over a curve of the loss; head (layer, head) scores `12 * layer + head`."""

    def __init__(
        self,
        schedule,
        updates: int,
        curve: Callable[[int], float] = lambda update: 3.0,
        *,
        noise: float = 0.0,
        seed: int = 0,
        limit: int = HEADS // 2,
        cost: Callable[[int, int], float] = lambda number, age: 0.0,
        controller: Sequence[float] = (),
        unfit: Sequence[tuple[int, int]] = (),
        rescored: bool = False,
        restarts: bool = False,
    ):
        """Take what the loss is, and what freezes add to it.

        `cost(number, age)` is what the freeze of that number adds to the training loss so many updates later, while it
        is in force; `controller` is what the freezes add to the controller loss, in turn, then nothing. With `rescored`
        every head scores less after an undo; with `restarts` the schedule starts again from its state after every
        update and around every event.
        """
        self.schedule, self.updates, self.curve, self.cost = schedule, updates, curve, cost
        self.noise, self.rng, self.restarts = noise, random.Random(seed), restarts
        self.controller, self.unfit, self.limit = list(controller), set(unfit), limit
        self.rescored, self.shift = rescored, 0.0
        self.live = [(layer, head) for layer in range(LAYERS) for head in range(WIDTH)]
        self.in_force: dict[int, tuple[int, tuple]] = {}
        self.events: list[tuple[int, object, Outcome]] = []
        self.proposer = self._start()

    def _start(self):
        return self.schedule.start(updates=self.updates, heads=HEADS, limit=self.limit)

    def _restart(self) -> None:
        if self.restarts:
            state = json.loads(json.dumps(self.proposer.state_dict()))
            self.proposer = self._start()
            self.proposer.load_state_dict(state)

    def run(self) -> "Simulated":
        self._events(0)
        for update in range(1, self.updates + 1):
            added = sum(self.cost(number, update - at) for number, (at, _) in self.in_force.items())
            self.proposer.observe(update, self.curve(update) + added + self.rng.gauss(0, self.noise))
            self._restart()
            self._events(update)
        return self

    def _events(self, update: int) -> None:
        while event := self.proposer.propose(update):
            assert self.proposer.propose(update) == event
            self._restart()
            number = len(self.events) + 1
            outcome = self._undo(number, event) if isinstance(event, Undo) else self._freeze(number, update, event)
            self.proposer.done(event, outcome)
            self.events.append((update, event, outcome))
            self._restart()

    def _freeze(self, number: int, update: int, event) -> Outcome:
        among = self.live if event.among is None else [head for head in self.live if head in event.among]
        eligible = [head for head in among if event.below is None or score(head) + self.shift < event.below]
        fitting = [head for head in eligible if head not in self.unfit]
        count = len(among) if event.among is not None else self.limit if event.count is None else event.count
        chosen = fitting[:count]
        frozen, deferred = chosen[: event.first], () if event.first is None else tuple(chosen[event.first :])
        self.live = [head for head in self.live if head not in frozen]
        self.in_force[number] = (update, tuple(frozen))
        added = self.controller.pop(0) if self.controller and frozen else 0.0
        return Outcome(
            number=number,
            heads=HeadSet(frozen),
            loss_before=3.0,
            loss_after=3.0 + added,
            lowest_score=score(frozen[0]) + self.shift if frozen else None,
            deferred=deferred,
        )

    def _undo(self, number: int, event) -> Outcome:
        heads = self.in_force.pop(event.event)[1]
        self.shift -= HEADS if self.rescored else 0
        self.live = sorted([*self.live, *heads])
        return Outcome(number=number, heads=HeadSet(heads), loss_before=3.1, loss_after=3.0)

    def short(self) -> list[tuple]:
        """Return update, kind and number of heads of every event."""
        return [(update, event.kind, len(outcome.heads)) for update, event, outcome in self.events]


def score(head: tuple[int, int]) -> float:
    return float(head[0] * WIDTH + head[1])
