import pytest

from saf.errors import CheckpointError, InputError
from saf.heads import HeadSet
from saf.schedules import Freeze, Gradual, OneTime, Outcome
from tests.schedules.simulated import HEADS, Simulated, score


def test_five_near_equal_groups_at_evenly_spaced_updates():
    run = Simulated(Gradual(), 5_000, limit=36).run()
    assert run.told() == [
        (2500, "freeze", 8),
        (2625, "freeze", 7),
        (2750, "freeze", 7),
        (2875, "freeze", 7),
        (3000, "freeze", 7),
    ]
    assert run.proposer.finished


def test_the_first_event_chooses_all_heads_and_later_ones_take_them_in_order():
    run = Simulated(Gradual(groups=3), 600, limit=10).run()
    first, *later = [event for _, event, _ in run.events]
    assert first == Freeze(first=4, reason=first.reason)
    assert [event.among for event in later] == [
        tuple((0, head) for head in (4, 5, 6)),
        tuple((0, head) for head in (7, 8, 9)),
    ]
    assert "group 1 of 3, update 300 is done" in first.reason


def test_the_final_set_is_that_of_one_time():
    unfit = [(0, 1), (0, 5), (3, 0)]
    frozen = [
        sorted(
            head
            for _, _, outcome in Simulated(schedule, 100, limit=40, unfit=unfit).run().events
            for head in outcome.heads
        )
        for schedule in (Gradual(), OneTime())
    ]
    assert frozen[0] == frozen[1]
    assert len(frozen[0]) == 40


def test_groups_are_smaller_when_fewer_heads_than_asked_for_can_be_frozen():
    run = Simulated(
        Gradual(groups=3), 100, limit=9, unfit=[(layer, head) for layer in range(12) for head in range(12)][5:]
    ).run()
    assert [count for _, _, count in run.told()] == [3, 1, 1]
    nothing = Simulated(Gradual(groups=3), 100, limit=9, unfit=list(Simulated(Gradual(), 100).live)).run()
    assert [count for _, _, count in nothing.told()] == [0]
    assert nothing.proposer.finished


def test_shares_are_of_all_updates_and_groups_of_a_short_run_may_share_an_update():
    assert Gradual(begin=0.25, end=0.75, groups=3).events(100) == (25, 50, 75)
    assert Gradual(begin=10, end=0.5, groups=3).events(100) == (10, 30, 50)
    assert Gradual(begin=0.5, end=0.5, groups=1).events(100) == (50,)
    assert Gradual(begin=1.0, end=1.0, groups=2).events(100) == (100, 100)
    assert Gradual().events(12) == (6, 6, 7, 7, 7)
    assert [update for update, *_ in Simulated(Gradual(), 12, limit=5).run().told()] == [6, 6, 7, 7, 7]


def test_resumed_anywhere_it_proposes_the_same():
    whole, restarted = (Simulated(Gradual(), 60, limit=36, restarts=restarts).run() for restarts in (False, True))
    assert restarted.events == whole.events


def test_an_event_is_met_again_until_it_was_carried_out():
    proposer = Gradual(groups=2).start(updates=10, heads=HEADS, limit=4)
    assert proposer.propose(4) == []
    (event,) = proposer.propose(5)
    assert proposer.propose(9) == [event]
    heads, deferred = HeadSet([(0, 0), (0, 1)]), ((0, 3), (0, 2))
    proposer.done(event, Outcome(number=1, heads=heads, loss_before=3, loss_after=3, seconds=1, deferred=deferred))
    assert not proposer.finished
    assert proposer.propose(5) == []
    assert proposer.propose(6)[0].among == deferred
    with pytest.raises(CheckpointError, match="expected the state of a gradual schedule"):
        proposer.load_state_dict({"name": "one_time"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"begin": 0.6, "end": 0.5}, "ends where it begins or later"),
        ({"begin": -0.1}, "begin of a gradual schedule is a whole number of updates"),
        ({"end": 1.5}, r"share in \[0, 1\]; got end=1.5"),
        ({"begin": float("nan")}, "got begin=nan"),
        ({"begin": "half"}, "got begin='half'"),
        ({"end": True}, "got end=True"),
        ({"groups": 0}, "whole number from 1; got groups=0"),
        ({"groups": 2.5}, "got groups=2.5"),
    ],
)
def test_settings_that_no_run_has_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        Gradual(**settings)


def test_settings_that_do_not_fit_the_run_are_refused_at_its_start():
    with pytest.raises(InputError, match="5 groups needs as many heads; 4 are to be frozen"):
        Gradual().start(updates=100, heads=8, limit=4)
    with pytest.raises(InputError, match=r"end must be .*\[0, 50\]; got 60"):
        Gradual(begin=10, end=60).start(updates=50, heads=8, limit=8)
    with pytest.raises(InputError, match="begins after update 50 and ends after update 20"):
        Gradual(begin=0.5, end=20).start(updates=100, heads=8, limit=8)


def test_scores_of_the_simulation_ascend():
    heads = Simulated(Gradual(), 10).live
    assert sorted(heads, key=score) == heads
