import json

import pytest

from saf.errors import CheckpointError, InputError
from saf.heads import HeadSet
from saf.schedules import (
    SCHEDULES,
    Freeze,
    Gradual,
    OneTime,
    Outcome,
    TrainLoss,
    ValidationBudget,
    schedule_from_dict,
    schedule_to_dict,
)

OUTCOME = Outcome(number=1, heads=HeadSet([(0, 1)]), loss_before=3.0, loss_after=3.1, seconds=0.5)


def start(at=3):
    return OneTime(at=at).start(updates=10, heads=8, limit=4)


def test_one_event_when_its_update_is_done():
    proposer = start()
    assert [proposer.propose(update) for update in range(3)] == [[], [], []]
    (event,) = proposer.propose(3)
    assert isinstance(event, Freeze)
    assert event == Freeze(reason=event.reason)
    assert "update 3" in event.reason


def test_asking_twice_changes_nothing_and_an_event_done_is_over():
    proposer = start()
    (event,) = proposer.propose(3)
    assert proposer.propose(3) == [event]
    assert not proposer.finished
    proposer.done(event, OUTCOME)
    assert proposer.propose(3) == []
    assert proposer.propose(4) == []
    assert proposer.finished


def test_ignores_the_loss():
    proposer = start()
    before = proposer.state_dict()
    proposer.observe(1, 9.0)
    assert proposer.state_dict() == before


def test_state_carries_over():
    proposer = start()
    waiting = proposer.state_dict()
    proposer.done(proposer.propose(3)[0], OUTCOME)
    other = start()
    other.load_state_dict(json.loads(json.dumps(proposer.state_dict())))
    assert other.propose(5) == []
    other.load_state_dict(waiting)
    assert [event.kind for event in other.propose(5)] == ["freeze"]


def test_a_share_is_of_the_whole_schedule_of_updates():
    assert OneTime(at=0.5).first_update(5_000) == 2_500
    assert OneTime(at=1).first_update(5_000) == 1
    assert OneTime(at=1.0).first_update(5_000) == 5_000


def test_refuses_another_moment():
    with pytest.raises(CheckpointError, match="at=4"):
        start(4).load_state_dict(start(3).state_dict())
    with pytest.raises(InputError, match="at=-1"):
        OneTime(at=-1)
    with pytest.raises(InputError, match=r"at=1\.5"):
        OneTime(at=1.5)
    with pytest.raises(InputError, match=r"\[0, 10\]; got 11"):
        OneTime(at=11).first_update(10)


@pytest.mark.parametrize(
    "schedule",
    [
        *(OneTime(), OneTime(at=0.25), OneTime(at=3), Gradual(begin=10, end=0.5, groups=2)),
        *(ValidationBudget(budget=0.02, every=10), TrainLoss(multiplier=1.5)),
    ],
)
def test_settings_round_trip_through_json_by_name(schedule):
    values = json.loads(json.dumps(schedule_to_dict(schedule)))
    assert SCHEDULES[values["name"]] is type(schedule)
    again = schedule_from_dict(values)
    assert again == schedule
    assert list(map(type, vars(again).values())) == list(map(type, vars(schedule).values()))


def test_unknown_schedules_and_settings_are_named():
    with pytest.raises(InputError, match=r"schedule must be one of.*got 'never'"):
        schedule_from_dict({"name": "never"})
    with pytest.raises(InputError, match=r"one_time schedule.*'when'"):
        schedule_from_dict({"name": "one_time", "when": 3})
