"""The attention layers of small models, timed alone: they compute what they compute inside the model."""

import weakref

import pytest
import torch

from saf.adapters import adapter_for
from saf.bench.harness import shape as shapes
from saf.bench.harness.arms import FREE, Arm
from saf.bench.harness.baselines import free_backend
from saf.bench.harness.settings import Point
from saf.bench.harness.synthetic import random_tokens
from saf.bench.kinds import measure
from saf.bench.model.attention import AttentionKind, AttentionLayers, AttentionSettings
from saf.bench.model.models import ModelPlan, build_model
from saf.errors import InputError
from saf.machine.cuda_graphs import GraphPool

LENGTH = 24
SIZES = {"num_layers": 3, "num_heads": 4, "head_dim": 16, "hidden_size": 24, "vocab_size": 50, "mlp_size": 40}
SMALL = {
    "llama-124m": shapes.ModelShape(family="Llama", num_kv_heads=4, mlp_matrices=3, **SIZES),
    "qwen3-4b": shapes.ModelShape(family="Qwen3", num_kv_heads=2, mlp_matrices=3, **SIZES),
}
MODELS = [*SMALL, "tiny"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, shape in SMALL.items():
        monkeypatch.setitem(shapes.TRANSFORMERS, name, shape)


def settings(model, **changes) -> AttentionSettings:
    given = {"model": model, "device": "cpu", "warmup": 0, "repeats": 1, "rates": (0.5,), "points": (f"{LENGTH}x2",)}
    return AttentionSettings(**(given | changes))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("arm", [Arm("math"), Arm("math", "toeplitz", 0.5)], ids=lambda arm: arm.name)
def test_layers_compute_what_they_compute_in_the_model(model, arm):
    plan = ModelPlan.of(settings(model), LENGTH)
    built = build_model(plan, arm, device=torch.device("cpu")).eval()
    generator = torch.Generator().manual_seed(1)
    tokens = random_tokens(1, 2, LENGTH, plan.shape.vocab_size, generator, torch.device("cpu"))[0][0]
    seen = []
    attention = [site.attention for site in adapter_for(built).sites()]
    handle = attention[0].register_forward_hook(lambda _, __, output: seen.append(output))
    layers = AttentionLayers(built, tokens)
    handle.remove()
    assert list(layers.layers) == attention
    inside = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    with torch.no_grad():
        layers.layers = layers.layers[:1]
        torch.testing.assert_close(layers(), inside, rtol=0, atol=0)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "arm", [Arm("auto"), Arm("auto", "toeplitz", 0.5), Arm("auto", "pruned", 0.5)], ids=lambda arm: arm.name
)
def test_no_other_weights_stay(model, arm, monkeypatch):
    """Peak memory of an arm is that of its attention layers."""
    rest = []

    def built(*args, **options):
        made = build_model(*args, **options)
        rest.extend(weakref.ref(part) for name, part in made.named_modules() if name.endswith("mlp"))
        return made

    monkeypatch.setattr("saf.bench.model.attention.build_model", built)
    subject = AttentionKind().build(settings(model), Point(LENGTH, 2), arm, GraphPool())
    assert rest
    assert not [part for part in rest if part() is not None]
    subject.warm_up()
    assert subject.timed_block("call") > 0


def test_every_layer_runs_once_a_pass():
    built = build_model(ModelPlan.of(settings("qwen3-4b"), LENGTH), Arm("math"), device=torch.device("cpu")).eval()
    layers, calls = AttentionLayers(built, torch.zeros(1, LENGTH, dtype=torch.long)), []
    for number, layer in enumerate(layers.layers):
        layer.register_forward_hook(lambda *_, number=number: calls.append(number))
    with torch.no_grad():
        layers()
    assert calls == [0, 1, 2]


@pytest.mark.parametrize("model", MODELS)
def test_every_arm_is_timed_beside_its_control(model, tmp_path):
    asked = settings(model, pairs=2, tolerance=1e9)
    record = measure(asked, out=tmp_path / "attention.json", say=lambda _: None)
    assert record["finished"]
    assert not record["left_out"]
    assert [row["role"] for row in record["rows"]] == ["control", "frozen", "free"]
    with free_backend():
        ordinary, frozen, free = (
            AttentionKind().work(asked, Point(LENGTH, 2), Arm("auto", *more))
            for more in ((), ("toeplitz", 0.5), (FREE, 0.5))
        )
    assert ordinary.flops > frozen.flops > free.flops


def test_work_is_that_of_the_attention_layers_alone():
    """Reckoned by hand: 3 layers of 4 heads over 2, one query head of each frozen, 24 channels in, 16 a head."""
    asked = settings("qwen3-4b", per_layer=(1, 1, 1), rates=())
    work = AttentionKind().work(asked, Point(LENGTH, 2), Arm("auto", "toeplitz", 0.25))
    entries = 3 * 24 * 16 * (3 + 2 + 2 + 4)
    causal = 2 * LENGTH * (LENGTH + 1) * 16
    assert work.flops == 2 * 2 * LENGTH * entries + 3 * causal * (2 * 3 + 1)


def test_compiled_layers_are_refused(tmp_path):
    with pytest.raises(InputError, match="a compiler would drop layers whose outputs nothing reads"):
        measure(settings("tiny", compile="on"), out=tmp_path / "attention.json", say=lambda _: None)
