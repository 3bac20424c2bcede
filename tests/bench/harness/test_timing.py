import time

import pytest
import torch

from saf.bench.harness.timing import event_block, repeats_within, resting_ms, settling_calls, wall_block
from saf.bench.model.prefill import PrefillSettings
from saf.bench.operator.case import OpSettings
from saf.errors import InputError

CPU = torch.device("cpu")


def test_settling_calls_are_made_before_the_timed_ones_and_not_timed():
    calls = []

    def call():
        calls.append(None)
        time.sleep(0.05 if len(calls) <= 2 else 0.001)

    assert wall_block(call, repeats=3, device=CPU, settle=2) < 30
    assert len(calls) == 5


def test_a_block_begins_after_the_rest_and_does_not_count_it():
    began = time.perf_counter()
    assert event_block(lambda: None, repeats=3, device=CPU, rest=60.0) < 30
    assert time.perf_counter() - began >= 0.06


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
