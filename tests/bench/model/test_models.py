import pytest
import torch

from saf.bench.harness.arms import PRUNED, Arm
from saf.bench.harness.baselines import free_backend
from saf.bench.harness.settings import Point
from saf.bench.harness.synthetic import synthetic_patterns
from saf.bench.harness.timing import CALL, GRAPH
from saf.bench.model.models import ModelPlan, build_model
from saf.bench.model.placement import choose_heads, heads_per_layer
from saf.bench.model.prefill import LastToken
from saf.bench.model.update import UpdateKind, UpdateSettings
from saf.errors import InputError
from saf.machine.cuda_graphs import GraphPool
from saf.ops import BACKENDS, FrozenHeads, frozen_attention
from tests.train.test_graphs import Recorded

CPU = torch.device("cpu")


def plan_of(**settings) -> ModelPlan:
    return ModelPlan.of(UpdateSettings(model="tiny", **settings), 48)


def test_early_placement_is_the_measured_one_at_its_own_rate():
    per_layer = heads_per_layer(num_layers=12, num_heads=12, rate=0.25, placement="early")
    assert per_layer == [8, 7, 3, 5, 2, 4, 2, 2, 1, 2, 0, 0]


@pytest.mark.parametrize("placement", ["early", "even"])
@pytest.mark.parametrize(("num_layers", "num_heads"), [(12, 12), (36, 20), (4, 4), (1, 2)])
@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5, 0.75, 1.0])
def test_placements_add_up(num_layers, num_heads, rate, placement):
    per_layer = heads_per_layer(num_layers=num_layers, num_heads=num_heads, rate=rate, placement=placement)
    assert sum(per_layer) == round(rate * num_layers * num_heads)
    assert len(per_layer) == num_layers
    assert max(per_layer) <= num_heads
    if placement == "even":
        assert max(per_layer) - min(per_layer) <= 1


def test_the_right_heads_are_frozen():
    plan = plan_of(per_layer=(3, 0, 1, 2))
    toeplitz = build_model(plan, Arm("auto", "toeplitz", 0.375), device=CPU)
    with free_backend():
        free = build_model(plan, Arm("auto", "free", 0.375), device=CPU)
    expected = choose_heads((3, 0, 1, 2), 4, torch.Generator().manual_seed(0))
    for layer, (one, other) in enumerate(zip(toeplitz.attention_layers(), free.attention_layers(), strict=True)):
        assert list(one.layout.frozen) == expected.in_layer(layer)
        assert one.layout == other.layout
        assert one.q_proj.weight.shape[0] == 32 * one.layout.num_live
    with pytest.raises(InputError, match="needs 4 numbers"):
        plan_of(per_layer=(1, 2))
    with pytest.raises(InputError, match="asks for 5 heads"):
        build_model(plan_of(per_layer=(5, 0, 0, 0)), Arm("auto", "toeplitz", 0.3), device=CPU)


def test_pruned_arms_lack_the_heads_that_frozen_ones_have():
    plan = plan_of(per_layer=(3, 0, 1, 4))
    frozen, pruned = (Arm("auto", way, 0.5) for way in ("toeplitz", PRUNED))
    model = build_model(plan, pruned, device=CPU)
    for attention, layout, other in zip(
        model.attention_layers(), plan.layouts(pruned), plan.layouts(frozen), strict=True
    ):
        assert attention.layout == layout
        assert (layout.pruned, layout.num_live) == (other.frozen, other.num_live)
        assert attention.v_proj.weight.shape[0] == attention.o_proj.weight.shape[1] == 32 * layout.num_live
    tokens = torch.arange(48)[None]
    assert model(tokens).isfinite().all()
    point = Point(48, 1, 1)
    work = [UpdateKind().work(plan.settings, point, arm) for arm in (Arm("auto"), frozen, pruned)]
    assert work[0].flops > work[1].flops > work[2].flops


def test_arms_have_the_same_weights_and_a_pinned_kernel():
    models = [build_model(plan_of(), arm, device=CPU) for arm in (Arm("math"), Arm("math", control=True))]
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    assert {attention.live.kernel for attention in models[0].attention_layers()} == {"math"}
    tokens = torch.arange(48)[None]
    assert torch.isfinite(models[0](tokens)).all()
    assert models[0].rotary.cos.shape[0] == 48


def test_weights_are_drawn_without_touching_global_generators():
    before = torch.random.get_rng_state()
    build_model(plan_of(), Arm("auto", "toeplitz", 0.25), device=CPU)
    assert torch.equal(before, torch.random.get_rng_state())


def test_free_heads_return_their_values(generator):
    value = torch.randn(2, 3, 40, 8, generator=generator)
    with free_backend():
        frozen = FrozenHeads.from_patterns(synthetic_patterns(3, 40, generator), backend="free")
        mixed = frozen_attention(value, frozen)
        assert mixed.data_ptr() == value.data_ptr()
        assert torch.equal(mixed, value)
    assert "free" not in BACKENDS


def test_the_free_arm_runs_no_mixing():
    names = {}
    for backend in ("toeplitz", "free"):
        settings = UpdateSettings(model="tiny", warmup=0)
        with free_backend():
            subject = UpdateKind().build(settings, Point(32, 1, 1), Arm("auto", backend, 0.5), GraphPool())
            names[backend] = {kernel["name"] for kernel in subject.kernels()}
    assert any("toeplitz" in name for name in names["toeplitz"])
    assert not any("toeplitz" in name for name in names["free"])


def test_updates_are_the_trainers_own_and_change_weights():
    settings, arm = UpdateSettings(model="tiny", repeats=2), Arm("auto", "toeplitz", 0.25)
    subject = UpdateKind().build(settings, Point(32, 1, 3), arm, GraphPool())
    before = subject.updater.model.blocks[0].mlp.up.weight.detach().clone()
    taken = []
    take = subject.updater.batches.take
    subject.updater.batches.take = lambda: taken.append(1) or take()
    assert subject.timed_block("update") > 0
    assert subject.updater.done == 2
    assert len(taken) == 6
    assert not torch.equal(before, subject.updater.model.blocks[0].mlp.up.weight)
    assert all(parameter.grad is None for parameter in subject.updater.model.parameters())


def test_the_prefill_model_gives_the_last_tokens_logits():
    model = build_model(plan_of(), Arm("auto"), device=CPU)
    tokens = torch.arange(80).view(2, 40)
    with torch.no_grad():
        torch.testing.assert_close(LastToken(model)(tokens), model(tokens)[:, -1:])


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("frozen", [(), ("toeplitz", 0.25)])
def test_flex_is_ordinary_attention(frozen):
    tokens = torch.arange(48)[None]
    logits = [build_model(plan_of(), Arm(kernel, *frozen), device=CPU) for kernel in ("flex", "math")]
    with torch.no_grad():
        torch.testing.assert_close(logits[0](tokens), logits[1](tokens))


def test_updates_are_timed_called_and_replayed_of_one_model(monkeypatch):
    """With a stand-in that calls again what a graph would replay."""
    monkeypatch.setattr("saf.train.graphs.GraphReplay", Recorded)
    monkeypatch.setattr("saf.train.updater.check_graphs", lambda *_, **__: None)
    monkeypatch.setattr("saf.bench.model.update.ways_of", lambda graphs, _: {"both": (CALL, GRAPH)}[graphs])
    settings = UpdateSettings(model="tiny", graphs="both", warmup=1, repeats=1)
    assert UpdateKind().variants(settings, CPU) == ("update", "update graph")
    subject = UpdateKind().build(settings, Point(32, 1, 1), Arm("auto", "toeplitz", 0.25), GraphPool())
    subject.warm_up()
    assert subject.updaters[GRAPH].micro_batch.shapes == [(1, 32)], "captured before anything is timed"
    done = {way: updater.done for way, updater in subject.updaters.items()}
    assert subject.timed_block("update graph") > 0
    assert {way: updater.done - done[way] for way, updater in subject.updaters.items()} == {CALL: 0, GRAPH: 1}
    assert subject.timed_block("update") > 0
    assert {way: updater.done - done[way] for way, updater in subject.updaters.items()} == {CALL: 1, GRAPH: 1}


def test_graphs_of_updates_are_refused_beside_what_they_know_nothing_of():
    for changes in ({"activation_checkpointing": True}, {"memory": True}, {"parallel": "ddp"}):
        with pytest.raises(InputError, match="with CUDA graphs"):
            UpdateSettings(model="tiny", graphs="on", **changes)
    row = {"model": "124m", "point": {"length": 4096, "batch_size": 8}, "rate": 0.25, "backend": "toeplitz"}
    assert UpdateKind().quoted({**row, "variant": "update"}) is not None
    assert UpdateKind().quoted({**row, "variant": "update graph"}) is None
