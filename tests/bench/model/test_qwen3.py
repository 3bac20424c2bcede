"""Prefill of Qwen3's shape, made small: every arm is the same model but for its frozen heads."""

import pytest
import torch

from saf.bench.harness import shape as shapes
from saf.bench.harness.arms import Arm
from saf.bench.harness.baselines import free_backend
from saf.bench.harness.settings import Point
from saf.bench.kinds import SPEED_KINDS
from saf.bench.model.models import ModelPlan, build_model
from saf.bench.model.prefill import PrefillKind, PrefillSettings, prefill_passes
from saf.bench.model.update import UpdateKind, UpdateSettings
from saf.errors import InputError, UnsupportedError
from saf.machine.cuda_graphs import GraphPool
from saf.models import preset
from saf.ops import ways
from saf.prefill import LastToken

pytest.importorskip("transformers")

CPU, LENGTH = torch.device("cpu"), 40
SMALL = shapes.ModelShape(
    family="Qwen3",
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=24,
    vocab_size=50,
    mlp_matrices=3,
    mlp_size=40,
)


def points_of(settings):
    return SPEED_KINDS[settings.kind].points(settings)


def rates_of(settings):
    return SPEED_KINDS[settings.kind].rates(settings)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(shapes.TRANSFORMERS, "qwen3-4b", SMALL)


def settings(**changes) -> PrefillSettings:
    given = {"model": "qwen3-4b", "device": "cpu", "compile": "off", "warmup": 0, "repeats": 1, "rates": (0.5,)}
    return PrefillSettings(**(given | changes))


def entries(model) -> int:
    """Matrix entries of the layers."""
    return sum(parameter.numel() for parameter in model.model.layers.parameters() if parameter.dim() > 1)


def test_arms_are_one_model_but_for_its_frozen_heads():
    plan = ModelPlan.of(settings(), LENGTH)
    before = torch.random.get_rng_state()
    ordinary, other = (build_model(plan, arm, device=CPU) for arm in (Arm("math"), Arm("auto", control=True)))
    frozen = build_model(plan, Arm("math", "toeplitz", 0.5), device=CPU)
    assert torch.equal(before, torch.random.get_rng_state())
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % 50
    with torch.no_grad():
        torch.testing.assert_close(ordinary(tokens).logits, other(tokens).logits)
        torch.testing.assert_close(LastToken(frozen)(tokens), frozen(tokens).logits[:, -1:])
        assert not torch.allclose(ordinary(tokens).logits, frozen(tokens).logits, atol=1e-3)
    layouts = plan.layouts(Arm("math", "toeplitz", 0.5))
    assert sum(layout.num_frozen for layout in layouts) == 6
    assert any(len(layout.rows["key"]) < 2 for layout in layouts), "a group without live heads has no keys"
    assert entries(ordinary) == 3 * SMALL.layer_entries(SMALL.layout())
    assert entries(frozen) == sum(map(SMALL.layer_entries, layouts))
    assert {layer.self_attn.saf.kernel for layer in frozen.model.layers} == {"math"}


def test_shapes_count_the_entries_of_this_project_s_decoder_too():
    plan = ModelPlan.of(settings(model="tiny"), LENGTH)
    model = build_model(plan, Arm("auto", "toeplitz", 0.5), device=CPU)
    found = sum(parameter.numel() for parameter in model.blocks.parameters() if parameter.dim() > 1)
    assert found == sum(map(plan.shape.layer_entries, plan.layouts(Arm("auto", "toeplitz", 0.5))))
    shape = shapes.shape_of("124m", 64)
    assert shape.layer_entries(shape.layout()) == 12 * 768**2
    assert preset("124m").num_layers == shapes.shape_of("124m", 64).num_layers == 12


def test_a_prefill_is_timed_and_its_work_counted():
    point = Point(LENGTH, 2, precision="fp32")
    work = {}
    with free_backend():
        for arm in (Arm("math"), Arm("math", "toeplitz", 0.5), Arm("math", "free", 0.5)):
            subject = prefill_passes(settings(), point, arm, GraphPool())
            subject.warm_up()
            assert subject.timed_block("call") > 0
            work[arm.backend] = PrefillKind().work(settings(), point, arm).flops
    assert work[None] > work["toeplitz"] > work["free"]


def test_fewer_layers_are_told():
    assert ModelPlan.of(settings(num_layers=2), LENGTH).name == "qwen3-4b, 2 layers"
    assert ModelPlan.of(settings(num_layers=2), LENGTH).shape.num_layers == 2
    plan = ModelPlan.of(settings(model="774m", num_layers=2), LENGTH)
    assert (plan.config.num_layers, plan.config.num_heads, plan.name) == (2, 20, "774m, 2 layers")
    assert ModelPlan.of(settings(), LENGTH).name == "qwen3-4b"


def test_what_is_not_measured_says_so():
    with pytest.raises(UnsupportedError, match="flex is measured in this project's decoder only"):
        build_model(ModelPlan.of(settings(), LENGTH), Arm("flex"), device=CPU)
    asked = UpdateSettings(model="qwen3-4b", device="cpu", compile="off")
    with pytest.raises(InputError, match="qwen3-4b can be measured by prefill, attention and decode alone"):
        UpdateKind().build(asked, Point(LENGTH, 1, 1), Arm("auto"), GraphPool())
    with pytest.raises(InputError, match=r"unknown model 'qwen4'; expected one of .*'qwen3-4b'"):
        ModelPlan.of(settings(model="qwen4"), LENGTH)


def test_the_paper_s_grid():
    grid = settings(grid="qwen", rates=())
    assert [(point.length, point.batch_size) for point in points_of(grid)][::3] == [(2048, 4), (2048, 8)]
    assert rates_of(grid) == (0.1, 0.2, 0.3, 0.5, 0.75)


def test_ordinary_models_attend_through_the_seam_too(monkeypatch):
    model = build_model(ModelPlan.of(settings(), LENGTH), Arm("math"), device=CPU)
    calls = []
    real = ways.live_attention

    def counted(*inputs, **options):
        calls.append(options["kernel"])
        return real(*inputs, **options)

    monkeypatch.setattr(ways, "live_attention", counted)
    model(torch.zeros(1, LENGTH, dtype=torch.long))
    assert calls == ["math"] * SMALL.num_layers
