import pytest

from saf.errors import CheckpointError, InputError
from saf.schedules import SCHEDULES, Event, OneTime


def test_one_event_when_its_update_is_done():
    schedule = OneTime(at=3, rate=0.5)
    assert [schedule.due(update) for update in range(3)] == [[], [], []]
    assert schedule.due(3) == [Event(3, 0.5)]


def test_asking_twice_changes_nothing_and_an_event_done_is_over():
    schedule = OneTime(at=3, rate=0.5)
    (event,) = schedule.due(3)
    assert schedule.due(3) == [event]
    schedule.done(event)
    assert schedule.due(3) == []
    assert schedule.due(4) == []


def test_ignores_the_loss():
    schedule = OneTime(at=3, rate=0.5)
    before = schedule.state_dict()
    schedule.observe(1, 9.0)
    assert schedule.state_dict() == before


def test_state_carries_over():
    schedule = OneTime(at=3, rate=0.5)
    waiting = schedule.state_dict()
    schedule.done(schedule.due(3)[0])
    other = OneTime(at=3, rate=0.5)
    other.load_state_dict(schedule.state_dict())
    assert other.due(5) == []
    other.load_state_dict(waiting)
    assert other.due(5) == [Event(5, 0.5)]


def test_refuses_another_moment():
    with pytest.raises(CheckpointError, match="at=4"):
        OneTime(at=4, rate=0.5).load_state_dict(OneTime(at=3, rate=0.5).state_dict())
    with pytest.raises(InputError, match="at=-1"):
        OneTime(at=-1, rate=0.5)


def test_known_by_name():
    assert isinstance(SCHEDULES["one_time"](at=1, rate=0.1), OneTime)
