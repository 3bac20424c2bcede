import time

import pytest
import torch

from saf.bench.settings import OpSettings
from saf.bench.timing import event_block, repeats_within, settling_calls, wall_block
from saf.errors import InputError

CPU = torch.device("cpu")


@pytest.mark.parametrize("block", [wall_block, event_block])
def test_settling_calls_are_made_before_the_timed_ones_and_not_timed(block):
    calls = []

    def call():
        calls.append(None)
        time.sleep(0.05 if len(calls) <= 2 else 0.001)

    assert block(call, repeats=3, device=CPU, settle=2) < 30
    assert len(calls) == 5


def test_a_call_longer_than_the_settling_time_settles_itself():
    assert settling_calls(50.0, 60.0, CPU) == 0
    assert settling_calls(50.0, 20.0, CPU) == 2
    assert settling_calls(None, 20.0, CPU) == 0
    assert settling_calls(None, 20.0, torch.device("cuda")) == 20
    assert repeats_within(50.0, 60.0, 20) == 1
    assert repeats_within(50.0, 1.0, 20) == 20


@pytest.mark.parametrize("field", ["settle_ms", "block_ms"])
def test_negative_times_are_refused(field):
    with pytest.raises(InputError, match=field):
        OpSettings(**{field: -1.0})
