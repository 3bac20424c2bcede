import math

import pytest

from saf.errors import CheckpointError, InputError
from saf.schedules import Freeze, Undo, ValidationBudget
from saf.schedules.validation_budget import BATCHES
from tests.schedules.simulated import HEADS, Simulated

ONE_PERCENT = math.log(1.01)


def test_two_percent_of_all_heads_every_twentieth_of_training_from_its_middle():
    run = Simulated(ValidationBudget(), 5_000).run()
    assert run.told() == [(2500 + 250 * number, "freeze", 3) for number in range(10)]
    assert all(event == Freeze(count=3, batches=8, reason=event.reason) for _, event, _ in run.events)
    assert run.proposer.finished


def test_groups_are_kept_while_their_costs_add_up_to_no_more_than_the_budget():
    thirds = [0.33 * ONE_PERCENT] * 3 + [0.02 * ONE_PERCENT] + [0.005 * ONE_PERCENT] * 9
    run = Simulated(ValidationBudget(), 5_000, controller=thirds).run()
    assert run.told()[:5] == [
        (2500, "freeze", 3),
        (2750, "freeze", 3),
        (3000, "freeze", 3),
        (3250, "freeze", 3),
        (3250, "undo", 3),
    ]
    undo = run.events[4][1]
    assert undo == Undo(event=4, batches=BATCHES, reason=undo.reason)
    assert "0.000199 nats beside 0.00985 are more than 0.00995" in undo.reason
    # The next checks try again: two more fit into what is left.
    assert [kind for _, kind, _ in run.told()[5:]] == ["freeze", "freeze", "freeze", "undo"] + ["freeze", "undo"] * 3
    assert run.proposer.spent == pytest.approx(ONE_PERCENT * (0.99 + 0.01))
    assert run.proposer.frozen == len({head for _, heads in run.in_force.values() for head in heads}) == 15


def test_checks_go_on_while_fewer_heads_fit_than_are_proposed():
    unfit = [(layer, head) for layer in range(12) for head in range(12) if (layer, head) > (0, 3)]
    run = Simulated(ValidationBudget(budget=0.5), 5_000, limit=6, unfit=unfit).run()
    assert [heads for _, _, heads in run.told()] == [3, 1] + [0] * 8, "four are frozen, two more may be"


def test_what_lowers_the_loss_makes_room():
    run = Simulated(ValidationBudget(), 100, controller=[-0.01, 0.015, 0.004, 0.004]).run()
    assert [kind for _, kind, _ in run.told()[:5]] == ["freeze", "freeze", "freeze", "freeze", "undo"]
    assert run.proposer.spent == pytest.approx(0.009)


def test_a_budget_of_nothing_undoes_all_that_costs():
    run = Simulated(ValidationBudget(budget=0), 100, controller=[1e-9] * 10).run()
    assert [kind for _, kind, _ in run.told()] == ["freeze", "undo"] * 10
    assert run.proposer.frozen == 0


def test_a_cost_that_is_no_number_is_not_kept():
    run = Simulated(ValidationBudget(budget=1e9), 100, controller=[math.nan]).run()
    assert [kind for _, kind, _ in run.told()[:2]] == ["freeze", "undo"]


def test_the_settings_of_freezing_say_how_many_heads_there_may_be_in_all():
    run = Simulated(ValidationBudget(), 5_000, limit=8).run()
    assert [count for _, _, count in run.told()] == [3, 3, 2]
    assert run.proposer.finished


def test_a_check_that_finds_no_head_costs_nothing_and_the_next_one_comes():
    run = Simulated(ValidationBudget(), 100, unfit=Simulated(ValidationBudget(), 100).live).run()
    assert run.told() == [(50 + 5 * number, "freeze", 0) for number in range(10)]


@pytest.mark.parametrize("controller", [[0.001] * 10, [0.004] * 10, [0.02, -0.001] * 5])
def test_resumed_anywhere_even_between_a_measurement_and_its_outcome(controller):
    whole, restarted = (
        Simulated(ValidationBudget(), 100, controller=controller, restarts=restarts).run() for restarts in (False, True)
    )
    assert restarted.events == whole.events
    assert restarted.proposer.spent == whole.proposer.spent
    with pytest.raises(CheckpointError, match="expected the state of a validation_budget schedule"):
        whole.proposer.load_state_dict({"name": "gradual"})


def test_checks_by_updates_and_in_short_runs():
    assert ValidationBudget(begin=10, every=20).checks(60) == (10, 30, 50)
    assert ValidationBudget(begin=0, every=0.5).checks(10) == (0, 5)
    assert ValidationBudget().checks(12) == ValidationBudget(every=1e-12).checks(12) == (6, 7, 8, 9, 10, 11)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": -0.01}, "budget of a validation_budget schedule is a number of at least 0; got budget=-0.01"),
        ({"budget": math.nan}, "got budget=nan"),
        ({"budget": math.inf}, "got budget=inf"),
        ({"budget": "1%"}, "got budget='1%'"),
        ({"begin": 1.5}, "got begin=1.5"),
        ({"every": 0.0}, "some updates apart; got every=0.0"),
        ({"group": 0.0}, "above 0 and at most 1; got group=0.0"),
        ({"cap": 1.5}, "above 0 and at most 1; got cap=1.5"),
    ],
)
def test_settings_that_no_run_has_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        ValidationBudget(**settings)


def test_settings_that_do_not_fit_the_run_are_refused_at_its_start():
    with pytest.raises(InputError, match=r"ask for 73 of 144 heads; .* cap=0\.5 freezes at most 72"):
        ValidationBudget().start(updates=100, heads=HEADS, limit=73)
    ValidationBudget(cap=0.75).start(updates=100, heads=HEADS, limit=73)
    with pytest.raises(InputError, match="needs updates after its first check"):
        ValidationBudget(begin=1.0).start(updates=100, heads=HEADS, limit=3)
