import math

import pytest

from saf.errors import InputError
from saf.train.optimizer import learning_rate, progress_by_time, progress_by_update


def paper_rate(update: int) -> float:
    return learning_rate(progress_by_update(update, updates=5000), peak=6e-4, min_ratio=0.1, warmup=500 / 5000)


@pytest.mark.parametrize(
    ("update", "expected"),
    [(1, 6e-4 / 500), (250, 3e-4), (500, 6e-4), (2750, 3.3e-4), (5000, 6e-5), (6000, 6e-5)],
)
def test_paper_schedule(update, expected):
    assert paper_rate(update) == pytest.approx(expected, rel=1e-12)


def test_decay_is_half_a_cosine():
    expected = 6e-5 + 5.4e-4 * 0.5 * (1 + math.cos(math.pi * (1700 - 500) / 4500))
    assert paper_rate(1700) == pytest.approx(expected, rel=1e-12)


def test_rises_then_falls():
    rates = [paper_rate(update) for update in range(1, 5001)]
    assert rates[:500] == sorted(rates[:500])
    assert rates[499:] == sorted(rates[499:], reverse=True)


def test_without_warmup_starts_at_the_peak():
    assert learning_rate(0.0, peak=1.0) == 1.0


def test_later_continuation_decays_between_its_own_ends():
    rate = lambda update: learning_rate(  # noqa: E731
        progress_by_update(update, updates=7500, start=5000), peak=6e-5, min_ratio=0.1
    )
    assert rate(5000) == pytest.approx(6e-5)
    assert rate(7500) == pytest.approx(6e-6)


def test_time_continues_where_updates_stopped():
    by_update = progress_by_update(2500, updates=5000)
    assert progress_by_time(0.0, budget=60.0, begin=by_update) == by_update
    assert progress_by_time(60.0, budget=60.0, begin=by_update) == 1.0
    assert progress_by_time(90.0, budget=60.0, begin=by_update) == 1.0


def test_refuses_a_warmup_as_long_as_the_schedule():
    with pytest.raises(InputError, match="share of the schedule"):
        learning_rate(0.5, peak=1.0, warmup=1.0)
