"""What the controller decides on curves of the loss; the steep fall of the first updates is that of real runs."""

import math
import random
from itertools import pairwise
from statistics import linear_regression, pvariance

import pytest

from saf.errors import CheckpointError, InputError
from saf.schedules import Freeze, TrainLoss
from saf.schedules.train_loss import _noise
from tests.schedules.simulated import HEADS, Simulated

UPDATES = 3_000
H = 15  # half-life of the fast average in a run of 3,000 updates


def levels_off(update):
    """Return a loss that falls steadily for 600 updates and stays where it is."""
    return max(6 - update / 200, 3.0)


def slows_down(update):
    """Return a loss by a power law, which never stands still."""
    return 3 + 8 * (update + 20) ** -0.5


def falls_again(*updates):
    """Return such a loss that falls for some twenty updates more after each of these."""
    return lambda t: levels_off(t) - sum(0.4 * (1 - math.exp(-max(t - at, 0) / 20)) for at in updates)


def test_the_first_event_needs_a_plateau_power_and_a_peak_passed():
    """Against the three tests written down as they are in docs/method.md, over whole series."""
    z, noise = 3.0, 0.02
    rng = random.Random(0)
    losses = [levels_off(update) + rng.gauss(0, noise) for update in range(1, UPDATES + 1)]
    fast, slow = [losses[0]], [losses[0]]
    a, b = 1 - 0.5 ** (1 / H), 1 - 0.5 ** (1 / (4 * H))
    descent, variance, expected = 0.0, None, None
    peak, peak_at = 0.0, 0
    for t in range(1, UPDATES):
        change = losses[t] - losses[t - 1] + descent
        fast.append((1 - a) * fast[-1] + a * losses[t])
        slow.append((1 - b) * slow[-1] + b * losses[t])
        descent = (1 - b) * descent + b * (fast[-2] - fast[-1])
        if slow[-1] - fast[-1] > peak:
            peak, peak_at = slow[-1] - fast[-1], t
        if t == 31:
            changes = [losses[i + 1] - losses[i] for i in range(31)]
            slope, start = linear_regression(range(31), changes)
            variance = sum((c - start - slope * i) ** 2 for i, c in enumerate(changes)) / 29 / 2
        elif variance is not None:
            variance = (1 - a) * variance + a * change**2 / 2
        if variance is None:
            continue
        n = math.sqrt(variance * a / (2 - a))
        if slow[-1] - fast[-1] < z * n and n <= peak / z and t - peak_at >= H:
            expected = t + 1
            break
    run = Simulated(TrainLoss(multiplier=z), UPDATES, levels_off, noise=noise).run()
    assert run.events[0][0] == expected
    assert 600 < expected < 1_100
    assert run.events[0][1] == Freeze(count=3, reason=run.events[0][1].reason)
    assert "train_loss: the averaged loss fell by" in run.events[0][1].reason


@pytest.mark.parametrize(("multiplier", "noise", "seed"), [(6.0, 0.1, 3), (3.0, 0.3, 5)])
def test_noise_that_hides_the_fall_is_no_plateau_before_the_peak_is_passed(multiplier, noise, seed):
    run = Simulated(TrainLoss(multiplier=multiplier), UPDATES, levels_off, noise=noise, seed=seed, limit=3).run()
    assert run.events[0][0] > 600, "the curve falls until then"


def test_the_noise_is_that_of_the_loss_whatever_its_slope():
    rng = random.Random(1)
    for slope in (0.0, -0.05):
        losses = [3 + slope * t + rng.gauss(0, 0.02) for t in range(2_000)]
        assert math.sqrt(_noise(losses)) == pytest.approx(0.02, rel=0.05)
        proposer = TrainLoss().start(updates=10_000, heads=HEADS, limit=72)
        found = []
        for update, loss in enumerate(losses, start=1):
            proposer.observe(update, loss)
            found.append(proposer.averages.variance)
        assert math.sqrt(sum(found[500:]) / 1500) == pytest.approx(0.02, rel=0.1)
    assert pvariance(losses) > 1


def test_nothing_happens_in_the_burn_in_nor_while_the_loss_falls():
    assert Simulated(TrainLoss(), 5_000, lambda t: 10 - t / 500, noise=0.02).run().events == []
    early = Simulated(TrainLoss(multiplier=30.0), 3_000, lambda t: max(6 - t / 5, 3.0), noise=0.02).run()
    assert early.events[0][0] >= 32


def test_a_larger_multiplier_or_more_noise_finds_the_plateau_earlier():
    first = {
        (z, noise): Simulated(TrainLoss(multiplier=z), 5_000, slows_down, noise=noise).run().events[0][0]
        for z, noise in ((1.5, 0.02), (3.0, 0.02), (3.0, 0.04))
    }
    assert first[1.5, 0.02] > first[3.0, 0.02] > first[3.0, 0.04]


def test_a_loss_that_never_fell_has_no_power():
    assert Simulated(TrainLoss(multiplier=6.0), UPDATES, lambda t: 3.0, noise=0.02).run().events == []


def test_spikes_neither_trigger_nor_undo():
    def falling(t):
        return 10 - t / 300 + (0.5 if t % 500 == 0 else 0.0)

    assert Simulated(TrainLoss(), UPDATES, falling, noise=0.02).run().events == []
    quiet = Simulated(TrainLoss(), UPDATES, levels_off, noise=0.02, limit=3).run()
    at = quiet.events[0][0]
    spiky = Simulated(
        TrainLoss(), UPDATES, lambda t: levels_off(t) + (0.5 if t == at + H // 2 else 0.0), noise=0.02, limit=3
    ).run()
    assert [(update, kind) for update, kind, _ in spiky.told()] == [(at, "freeze")]
    assert spiky.proposer.decisions.step is None


def test_a_step_is_absorbed_when_the_loss_is_back_on_its_path():
    heals = Simulated(
        TrainLoss(), 5_000, slows_down, noise=0.02, limit=3, cost=lambda number, age: 0.05 * math.exp(-age / 15)
    ).run()
    assert [kind for _, kind, _ in heals.told()] == ["freeze"]
    (recovery,) = heals.proposer.decisions.recoveries
    assert 25 < recovery <= 100
    free = Simulated(TrainLoss(), 5_000, slows_down, noise=0.02, limit=3).run()
    assert free.proposer.decisions.recoveries == [25]


def test_a_step_that_is_not_absorbed_is_undone_after_four_half_lives_and_the_second_one_ends_it():
    def stays(number, age):
        return 0.1

    run = Simulated(TrainLoss(), UPDATES, falls_again(1_500), noise=0.02, cost=stays, rescored=True).run()
    kinds = [kind for _, kind, _ in run.told()]
    assert kinds == ["freeze", "undo", "freeze", "undo"]
    (at, _, first), (undone, undo, _), (later, second, _), _ = run.events
    assert undone == at + 4 * H + 1
    assert undo.event == 1
    assert "after 61 updates the loss is 0.10121 nats above its path before event 1" in undo.reason
    assert second.below == first.lowest_score
    assert later > undone
    assert run.proposer.finished
    assert run.proposer.decisions.frozen == 0


def test_heads_that_score_as_high_as_an_undone_group_are_not_proposed_again():
    """Here none scores less: the second proposal finds nothing eligible, which ends the schedule."""

    run = Simulated(
        TrainLoss(), UPDATES, falls_again(1_500), noise=0.02, cost=lambda number, age: 0.1 if number == 1 else 0.0
    ).run()
    assert run.told()[:2] == [(run.events[0][0], "freeze", 3), (run.events[1][0], "undo", 3)]
    assert run.told()[2:] == [(run.events[2][0], "freeze", 0)]
    assert run.events[2][1].below == 0.0
    assert run.proposer.decisions.stopped
    assert run.proposer.finished


def test_a_loss_that_drifts_up_after_a_step_is_not_absorbed():
    first = Simulated(TrainLoss(), UPDATES, levels_off, noise=0.02, limit=3).run().events[0][0]
    drift = Simulated(
        TrainLoss(), UPDATES, lambda t: levels_off(t) + 0.003 * max(t - first, 0), noise=0.02, limit=3
    ).run()
    assert [kind for _, kind, _ in drift.told()[:2]] == ["freeze", "undo"]


def test_a_second_plateau_is_answered_only_after_the_loss_fell_again():
    """The first one is answered once or more, while the difference of the averages still crosses the noise."""
    flat, again = (
        Simulated(TrainLoss(), UPDATES, curve, noise=0.02).run() for curve in (levels_off, falls_again(1_500))
    )
    first = [event for event in flat.told() if event[0] < 1_500]
    assert again.told()[: len(first)] == flat.told() == first
    later = [update for update, _, _ in again.told()[len(first) :]]
    assert 1_520 < later[0] < 2_000
    proposer = TrainLoss().start(updates=UPDATES, heads=HEADS, limit=72)
    rng, armed = random.Random(0), []
    for update in range(1, UPDATES + 1):
        proposer.observe(update, falls_again(1_500)(update) + rng.gauss(0, 0.02))
        armed += [update] * (proposer.averages.gap > proposer.tolerance)
    times = [update for update, _, _ in again.told()]
    assert all(any(one < update < other for update in armed) for one, other in pairwise(times))
    assert not set(times) & set(armed)


def test_stops_at_the_most_heads():
    stairs = falls_again(1_100, 1_500, 1_900, 2_300)
    many, few = (Simulated(TrainLoss(), UPDATES, stairs, noise=0.02, limit=limit).run() for limit in (72, 7))
    assert len(many.events) > 5
    assert [count for _, _, count in few.told()] == [3, 3, 1]
    assert few.events[-1][0] == many.events[2][0]
    assert few.proposer.finished


def test_stops_when_fewer_updates_are_left_than_a_step_may_take():
    """Runs of less than 1,600 updates have the same averages: half-lives of 8 updates, and 32 to absorb a step."""
    at = Simulated(TrainLoss(), 1_000, levels_off, noise=0.02).run().events[0][0]
    assert Simulated(TrainLoss(), at + 32, levels_off, noise=0.02).run().told()[0] == (at, "freeze", 3)
    late = Simulated(TrainLoss(), at + 31, levels_off, noise=0.02).run()
    assert late.events == []
    assert late.proposer.finished
    known = TrainLoss().start(updates=at + 31, heads=HEADS, limit=72)
    known.decisions.recoveries += [8, 10]
    assert not known._too_late(at + 22)
    assert known._too_late(at + 23)


@pytest.mark.parametrize("cost", [0.0, 0.02, 0.1])
def test_resumed_anywhere_even_between_a_measurement_and_its_outcome(cost):
    whole, restarted = (
        Simulated(
            TrainLoss(), 2_400, falls_again(1_500), noise=0.02, cost=lambda number, age: cost, restarts=restarts
        ).run()
        for restarts in (False, True)
    )
    assert whole.events
    assert restarted.events == whole.events
    assert restarted.proposer.state_dict() == whole.proposer.state_dict()
    with pytest.raises(CheckpointError, match="expected the state of a train_loss schedule"):
        whole.proposer.load_state_dict({"name": "gradual"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"multiplier": math.nan}, "multiplier of a train_loss schedule is a number above 0; got multiplier=nan"),
        ({"multiplier": 0}, "got multiplier=0"),
        ({"multiplier": -1.5}, "got multiplier=-1.5"),
        ({"multiplier": math.inf}, "got multiplier=inf"),
        ({"multiplier": None}, "got multiplier=None"),
        ({"group": 2}, "got group=2"),
        ({"cap": 0}, "got cap=0"),
    ],
)
def test_settings_that_no_run_has_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        TrainLoss(**settings)


def test_more_heads_than_the_cap_and_losses_that_are_no_numbers_are_refused():
    with pytest.raises(InputError, match=r"ask for 100 of 144 heads; a train_loss schedule with cap=0\.5"):
        TrainLoss().start(updates=100, heads=HEADS, limit=100)
    with pytest.raises(InputError, match="finite number of nats; got nan at update 1"):
        TrainLoss().start(updates=100, heads=HEADS, limit=10).observe(1, math.nan)


def test_nothing_fixes_the_first_update():
    assert TrainLoss().first_update(100) is None
