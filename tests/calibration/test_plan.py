"""What a calibration says it will hold, against what it holds, and what it refuses before the model runs."""

import pytest
import torch

from saf.adapters import adapter_for
from saf.calibration import calibrate, heads_at_a_time, plan_calibration
from saf.calibration import plan as planning
from saf.calibration.capture import Wanted, capture
from saf.calibration.layer import measure_layer, strip_bytes
from saf.errors import InputError
from saf.heads import HeadSet
from saf.models import GPT, GPTConfig, preset
from saf.patterns import CompactPattern
from saf.surgery import install_


def model() -> GPT:
    made = GPT(GPTConfig(vocab_size=30, num_layers=3, num_heads=4, hidden_size=32, max_length=40))
    made.reset_parameters(torch.Generator().manual_seed(0))
    return made


def tokens(count: int = 5) -> torch.Tensor:
    return torch.randint(0, 30, (count, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("heads", [None, [(0, 2), (2, 0), (2, 3)]])
@pytest.mark.parametrize("lower", [False, True])
def test_queries_and_keys_take_what_the_plan_says(heads, lower):
    made = model()
    install_(made, HeadSet([(1, 1)]), CompactPattern.from_parameters(*torch.randn(2, 1, 40)))
    with torch.autocast("cpu", torch.bfloat16, enabled=lower), torch.no_grad():
        plan = plan_calibration(made, [tokens()], heads=heads)
        adapter = adapter_for(made)
        wanted = {layer: Wanted.of(adapter.sites()[layer], plan.heads.in_layer(layer)) for layer in plan.layers}
        kept = capture(adapter, wanted, [tokens()[:2], tokens()[2:]])
    held = {layer: sum(part.untyped_storage().nbytes() for part in parts) for layer, parts in kept.items()}
    assert held == plan.layer_bytes
    assert plan.capture_bytes == sum(held.values())
    assert len(plan.groups) == 1


def test_a_limit_splits_the_layers_and_refuses_less_than_one():
    each = 2 * 5 * 40 * 32 * 4
    for layers, groups in ((1, [[0], [1], [2]]), (2, [[0, 1], [2]]), (3, [[0, 1, 2]])):
        assert plan_calibration(model(), [tokens()], capture_bytes=layers * each).groups == groups
    with pytest.raises(InputError, match=r"one layer take 51.20 KB for 5 sequences of 40 tokens, capture_bytes allows"):
        plan_calibration(model(), [tokens()], capture_bytes=each - 1)


def test_what_does_not_fit_is_refused_before_the_model_runs(monkeypatch):
    made = model()
    made.blocks[0].register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    needed = plan_calibration(made, [tokens()]).device_bytes
    monkeypatch.setattr(planning, "free_bytes", lambda device: needed - 1)
    with pytest.raises(InputError, match=r"not enough memory: calibration of 12 heads on 5 x 40 tokens.*capture_bytes"):
        calibrate(made, [tokens()])
    plan_calibration(made, [tokens()], capture_bytes=1 << 20)
    plan_calibration(made, [tokens(4)])
    monkeypatch.setattr(planning, "free_bytes", lambda device: needed)
    plan_calibration(made, [tokens()])


def test_half_of_free_memory_is_taken_by_default(monkeypatch):
    each = 2 * 5 * 40 * 32 * 4
    for free, layers in ((10**9, 3), (4 * each + 10, 2), (2 * each, 1)):
        monkeypatch.setattr(planning, "free_bytes", lambda device, free=free: free)
        monkeypatch.setattr(planning, "_check", lambda *_: None)
        assert len(plan_calibration(model(), [tokens()]).groups[0]) == layers
    monkeypatch.setattr(planning, "free_bytes", lambda device: None)
    assert "free" not in str(plan_calibration(model(), [tokens()]))


def test_collections_must_fit_beside_it(monkeypatch):
    monkeypatch.setattr(planning, "free_bytes", lambda device: 1 << 26)
    monkeypatch.setattr(planning, "collection_bytes", lambda *_, **__: (1 << 26) + 1)
    with pytest.raises(InputError, match=r"67.11 MB are to be collected, 67.11 MB are free on the CPU; .*heads="):
        plan_calibration(model(), [tokens()], collect=("mean",))


def test_as_many_heads_at_a_time_as_half_of_free_memory_holds(monkeypatch):
    each = 40 * 40 * 4
    for free, heads in ((2 * 3 * each + 1, 3), (each, 1), (None, planning.COLLECT_BYTES // each)):
        monkeypatch.setattr(planning, "free_bytes", lambda device, free=free: free)
        assert heads_at_a_time(model(), ("mean",), sequences=5, length=40) == heads
        assert heads_at_a_time(model().double(), ("mean",), sequences=5, length=40) == max(1, heads // 2)


@pytest.mark.parametrize(("length", "sequences"), [(4096, 32), (16384, 16), (65536, 4)])
def test_the_papers_model_is_planned_at_every_length(length, sequences):
    with torch.device("meta"):
        made = GPT(preset("124m", max_length=length))
    plan = plan_calibration(made, torch.zeros(sequences, length, dtype=torch.long).split(1), capture_bytes=1 << 40)
    assert set(plan.layer_bytes.values()) == {sequences * length * 2 * 768 * 4}
    assert plan.device_bytes < 60e9
    assert f"144 heads on {sequences} x {length:,} tokens" in str(plan)


def test_strips_shorten_where_many_long_sequences_would_not_fit(generator):
    query, key = torch.randn(2, 6, 1, 50, 8, generator=generator, dtype=torch.float64)
    whole = measure_layer(query, key, kv_head=[0])
    seen = []
    split = measure_layer(
        query, key, kv_head=[0], strip_elements=6 * 50 * 3, take=lambda _, strip: seen.append(strip.logits.numel())
    )
    assert max(seen) <= 6 * 50 * 3
    for one, two in zip(whole, split, strict=True):
        assert ((one - two).abs() <= 1e-10 * one.abs().max()).all()
    cpu = torch.device("cpu")
    assert strip_bytes(2000, 1, 65536, 64, dtype=torch.float32, device=cpu) < 2000 * 65536 * 4 * (5 + 2 * 64) + 1
