from types import SimpleNamespace

import pytest
import torch

from saf.bench.harness import timing
from saf.bench.harness.timing import event_block, repeats_within, resting_ms, settling_calls, wall_block
from saf.bench.model.prefill import PrefillSettings
from saf.bench.operator.case import OpSettings
from saf.errors import InputError

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """A clock that moves when somebody sleeps, and only then."""
    clock = SimpleNamespace(now=0.0, slept=[])

    def sleep(seconds: float) -> None:
        clock.now += seconds
        clock.slept.append(seconds)

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now, sleep=sleep))
    clock.sleep = sleep
    return clock


def test_settling_calls_are_made_before_the_timed_ones_and_not_timed(clock):
    lengths = iter([0.5, 0.5, 0.001, 0.004, 0.002])
    assert wall_block(lambda: clock.sleep(next(lengths)), repeats=3, device=CPU, settle=2) == pytest.approx(2)
    assert next(lengths, None) is None


def test_a_block_begins_after_the_rest_and_does_not_count_it(clock):
    assert event_block(lambda: clock.sleep(0.001), repeats=3, device=CPU, rest=60.0) == pytest.approx(1)
    assert clock.slept == [0.06, 0.001, 0.001, 0.001]


def test_operators_rest_on_a_gpu_alone_unless_asked():
    assert resting_ms(None, CPU) == 0
    assert resting_ms(None, torch.device("cuda")) == 200
    assert resting_ms(5.0, CPU) == 5


def test_a_call_longer_than_the_settling_time_settles_itself():
    assert settling_calls(50.0, 60.0, CPU) == 0
    assert settling_calls(50.0, 20.0, CPU) == 2
    assert settling_calls(None, 20.0, CPU) == 0
    assert settling_calls(None, 20.0, torch.device("cuda")) == 20
    assert repeats_within(50.0, 60.0, 20) == 1
    assert repeats_within(50.0, 1.0, 20) == 20


@pytest.mark.parametrize(
    ("kind", "field"), [(OpSettings, "rest_ms"), (OpSettings, "block_ms"), (PrefillSettings, "settle_ms")]
)
def test_negative_times_are_refused(kind, field):
    with pytest.raises(InputError, match=field):
        kind(**{field: -1.0})
