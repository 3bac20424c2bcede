"""Memory that a calibration plans, against what it holds, and refusals before the model runs."""

import pytest
import torch

from saf.calibration import calibrate, heads_at_a_time, plan, plan_calibration
from saf.calibration.capture import CapturedSlots, capture
from saf.errors import InputError
from saf.heads import HeadSet
from saf.models import GPT, preset
from saf.models.adapter import adapter_for
from saf.patterns import CompactPattern
from saf.surgery import install_
from tests.calibration.test_calibrate import model, tokens

LAYER = 2 * 5 * 40 * 32 * 4
"""Bytes of queries and keys of a layer in float32."""


@pytest.mark.parametrize(("heads", "lower"), [(None, False), ([(0, 2), (2, 0), (2, 3)], True)])
def test_queries_and_keys_take_the_planned_bytes(heads, lower):
    small = model(torch.float32)
    install_(small, HeadSet([(1, 1)]), CompactPattern.from_parameters(*torch.randn(2, 1, 40)))
    with torch.autocast("cpu", torch.bfloat16, enabled=lower), torch.no_grad():
        plan = plan_calibration(small, [tokens()], heads=heads)
        adapter, layers = adapter_for(small), plan.groups[0]
        slots = {layer: CapturedSlots.of(adapter.sites()[layer], plan.heads.in_layer(layer)) for layer in layers}
        captured = capture(adapter, slots, [tokens()[:2], tokens()[2:]])
    held = {layer: sum(part.untyped_storage().nbytes() for part in parts) for layer, parts in captured.items()}
    assert held == plan.layer_bytes
    assert plan.capture_bytes == sum(held.values())
    assert len(plan.groups) == 1


def test_a_limit_splits_the_layers_and_refuses_less_than_one():
    small = model(torch.float32)
    for layers, groups in ((1, [[0], [1], [2]]), (2, [[0, 1], [2]]), (3, [[0, 1, 2]])):
        assert plan_calibration(small, [tokens()], capture_bytes=layers * LAYER).groups == groups
    small.blocks[0].register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    with pytest.raises(InputError, match=r"\(capture_bytes\), got 50 KiB"):
        calibrate(small, [tokens()], capture_bytes=LAYER - 1)


def test_free_memory_decides_how_many_layers_and_heads_go_together(monkeypatch):
    small, mean, free = model(torch.float32), 40 * 40 * 4, [0]
    monkeypatch.setattr(plan, "free_bytes", lambda device: free[0])
    for free[0], layers in ((6 * LAYER, 3), (4 * LAYER + 10, 2), (LAYER, 1), (None, 3)):
        assert len(plan_calibration(small, [tokens()]).groups[0]) == layers
    free[0] = LAYER - 1
    with pytest.raises(InputError, match="free memory"):
        plan_calibration(small, [tokens()])
    for free[0], heads in ((6 * mean + 1, 3), (mean, 1), (None, plan.COLLECT_BYTES // mean)):
        assert heads_at_a_time(small, ("mean",), sequences=5, length=40) == heads
    free[0] = 12 * mean - 1
    with pytest.raises(InputError, match="heads="):
        calibrate(small, [tokens()], collect=("mean",), capture_bytes=1 << 20)


def test_the_papers_model_is_planned_at_a_long_context():
    with torch.device("meta"):
        large = GPT(preset("124m", max_length=65_536))
    plan = plan_calibration(large, torch.zeros(4, 65_536, dtype=torch.long).split(1), capture_bytes=1 << 40)
    assert set(plan.layer_bytes.values()) == {4 * 65_536 * 2 * 768 * 4}
    assert "144 heads on 4 sequences of 65,536 tokens" in str(plan)
