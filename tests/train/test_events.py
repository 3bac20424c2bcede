"""Runs of several events, and what undoes or refuses one."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

import saf.train.loop as loop
from saf.errors import InputError, SafWarning, SelectionError
from saf.freeze_config import FreezeConfig
from saf.frozen_state import state_of
from saf.records.events import read_events
from saf.schedules import Freeze, Prune, Undo
from saf.train import latest, load_model, pretrain
from saf.train.clock import Clock
from tests.train.killed import Killed, die_at

FREEZE = FreezeConfig(rate=0.25, max_fit_kl=10.0)


@dataclass(frozen=True)
class Listed:
    """Propose the events of a list, each at its update."""

    name: ClassVar[str] = "listed"
    chooses_once: ClassVar[bool] = True
    several_events: ClassVar[bool] = False
    events: tuple = ()

    def first_update(self, updates):
        return self.events[0][0]

    def start(self, *, updates, heads, limit):
        return Proposer(self.events)


class Proposer:
    def __init__(self, events):
        self.events, self.count, self.heard = events, 0, []

    @property
    def finished(self):
        return self.count == len(self.events)

    def observe(self, update, loss):
        assert loss > 0

    def propose(self, update):
        return [] if self.finished or self.events[self.count][0] > update else [self.events[self.count][1]]

    def done(self, event, outcome):
        self.count += 1
        self.heard.append((event, outcome))

    def state_dict(self):
        return {"name": "listed", "count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def frozen(path):
    return sum(len(layer["frozen"]) for layer in state_of(load_model(path))[0]["layers"])


SEVERAL = Listed(
    (
        (3, Freeze(count=2, reason="first")),
        (6, Freeze(count=1, reason="second")),
        (6, Undo(event=1, reason="too much")),
        (9, Freeze(count=1, reason="third")),
    )
)


@pytest.mark.parametrize("call", [None, 5, 8, 11])
def test_a_run_has_any_number_of_events_and_resumes_among_them(settings, outcome, monkeypatch, call):
    whole = settings("whole", freeze=FREEZE, schedule=SEVERAL, keep=0)
    result = pretrain(whole)
    events = read_events(whole.out)
    assert [(e.number, e.kind, e.update, len(e.heads)) for e in events] == [
        (1, "freeze", 3, 2),
        (2, "freeze", 6, 1),
        (3, "undo", 6, 2),
        (4, "freeze", 9, 1),
    ]
    assert [e.values["reason"] for e in events] == ["first", "second", "too much", "third"]
    assert events[2].heads == events[0].heads
    assert events[2].values["undoes"] == 1
    assert [e.undone_by for e in events] == [3, None, None, None]
    assert all(e.values["loss_before"] > 0 and e.values["loss_after"] > 0 for e in events)
    assert [frozen(f"{whole.out}/checkpoints/step-{n}") for n in (3, 6, 9, 12)] == [0, 2, 1, 2]
    intervention = result["intervention"]
    assert (intervention["update"], len(intervention["heads"])) == (3, 2)
    assert intervention["heads"] == result["provenance"]["heads"]
    assert intervention["seconds"]["fit"] == pytest.approx(sum(e.seconds.get("fit", 0) for e in events))
    assert intervention["loss_rise"] == pytest.approx(
        sum(e.values["loss_after"] - e.values["loss_before"] for e in events)
    )
    assert (intervention["loss_before"], intervention["loss_after"]) == (
        events[0].values["loss_before"],
        events[3].values["loss_after"],
    )
    if call is None:
        return
    config = settings("killed", freeze=FREEZE, schedule=SEVERAL, keep=0)
    with monkeypatch.context() as patch:
        die_at(patch, loop, "run_update", call)
        with pytest.raises(Killed):
            pretrain(config)
    pretrain(config, resume=True)
    assert outcome(config.out) == outcome(whole.out)
    assert [(e.kind, e.update, e.heads) for e in read_events(config.out)] == [
        (e.kind, e.update, e.heads) for e in events
    ]


def test_a_schedule_hears_what_came_of_its_proposals(settings, monkeypatch):
    made = []
    start = Listed.start
    monkeypatch.setattr(Listed, "start", lambda self, **more: made.append(start(self, **more)) or made[-1])
    pretrain(settings(freeze=FREEZE, schedule=SEVERAL))
    heard = made[0].heard
    assert [event for event, _ in heard] == [event for _, event in SEVERAL.events]
    assert [outcome.number for _, outcome in heard] == [1, 2, 3, 4]
    assert [len(outcome.heads) for _, outcome in heard] == [2, 1, 2, 1]
    assert all(outcome.seconds > 0 and outcome.loss_before > 0 for _, outcome in heard)


@pytest.mark.parametrize(
    ("event", "error", "message"),
    [
        (Prune(), InputError, "pruned heads have no patterns: leave max_fit_kl out"),
        (Undo(event=1), InputError, r"undoes an event of its own, one of \[\]; got event 1"),
    ],
)
def test_an_event_that_cannot_be_carried_out_leaves_no_record(settings, event, error, message):
    config = settings(freeze=FREEZE, schedule=Listed(((3, event),)))
    with pytest.raises(error, match=message):
        pretrain(config)
    assert read_events(config.out) == []
    assert latest(f"{config.out}/checkpoints").name == "step-3"


def test_only_the_first_process_writes(settings, monkeypatch):
    """Another one builds the same run, trains and saves nothing."""
    import saf.train.start as start

    config = settings(freeze=FREEZE)
    monkeypatch.setattr(start, "is_first", lambda: False)
    run = start.start_run(config, resume=False, clock=Clock())
    assert (run.lock, run.observer) == (None, None)
    run.say("nobody hears this")
    record = loop.run_update(run)
    assert record["update"] == 1
    assert run.controller_loss("periodic") > 0
    run.close()
    assert not Path(config.out).exists()


def test_an_event_whose_own_limit_no_head_is_below_changes_nothing_and_leaves_an_ordinary_arm(settings):
    listed = Listed(((6, Freeze(count=2, below=-1.0, reason="none is below")),))
    with pytest.warns(SafWarning, match="only 0 of 2 heads could be frozen: no other may be frozen"):
        result = pretrain(settings("none", freeze=FREEZE, schedule=listed))
    assert (result["arm"], result["intervention"]["heads"]) == ("ordinary", [])
    with pytest.raises(SelectionError, match="no head that may be frozen scores below -1 by variance"):
        pretrain(settings("refused", freeze=replace(FREEZE, below=-1.0)))
