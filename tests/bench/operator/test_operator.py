from functools import partial

import pytest
import torch

from saf.bench.harness.arms import Arm
from saf.bench.harness.baselines import free_backend
from saf.bench.harness.check import check_arm
from saf.bench.harness.settings import Point
from saf.bench.harness.synthetic import synthetic_patterns
from saf.bench.operator.case import OpCase, OpSettings, function_of, variants_of
from saf.bench.operator.operator import OpSubject
from saf.errors import AccuracyError, InputError, UnsupportedError
from saf.machine.cuda_graphs import GraphPool
from saf.ops import FrozenHeads, frozen_attention, live_attention

CPU = torch.device("cpu")


def case_of(part: str, rate: float = 0.5, **settings) -> OpCase:
    given = {"num_heads": 4, "head_dim": 16, "graphs": "off", "warmup": 0, "repeats": 1, **settings}
    return OpCase(settings=OpSettings(**given), point=Point(150, 2), part=part, rate=rate, device=CPU)


@pytest.mark.parametrize("part", ["frozen", "layer"])
@pytest.mark.parametrize("backend", [None, "toeplitz", "reference", "free"])
def test_every_arm_runs_and_is_right(part, backend):
    with free_backend():
        case, arm = case_of(part), Arm("auto", backend, 0.5 if backend else 0.0)
        subject = OpSubject(case, arm, GraphPool(), compiled=False)
        subject.warm_up()
        times = [subject.timed_block(variant) for variant in variants_of(case.settings, CPU)]
    assert len(times) == 2
    assert min(times) > 0


def test_free_heads_run_wherever_values_are():
    """They have no tables that could be elsewhere: "meta" stands for any device that is not the CPU."""
    with free_backend():
        frozen = FrozenHeads.from_patterns(synthetic_patterns(2, 8, torch.Generator(), CPU), backend="free")
        assert frozen_attention(torch.empty(1, 2, 8, 16, device="meta"), frozen).shape == (1, 2, 8, 16)


@pytest.mark.parametrize("rate", [0.25, 0.5, 1.0])
def test_grouped_queries(rate):
    case = case_of("layer", rate, num_heads=8, num_kv_heads=2)
    OpSubject(case, Arm("auto", "toeplitz", rate), GraphPool(), compiled=False).warm_up()
    assert case_of("frozen", num_heads=8, num_kv_heads=2).reason_against
    assert case_of("layer", num_heads=8, num_kv_heads=2).reason_against is None


@pytest.mark.parametrize(("rate", "groups", "keys"), [(0.25, 1, 3), (0.5, 2, 2), (1.0, 4, 0)])
def test_whole_groups_take_their_keys_with_them(rate, groups, keys):
    case = case_of("layer", rate, num_heads=8, num_kv_heads=4, whole_groups=True)
    frozen = case.layout(rate).frozen
    assert len(frozen) == 2 * groups
    assert len({head // 2 for head in frozen}) == groups
    assert case.operands(Arm("auto", "toeplitz", rate)) == (8 - 2 * groups, keys, 4)
    assert case_of("layer", 0.25, num_heads=8, num_kv_heads=4).operands(Arm("auto", "toeplitz", 0.25))[1] == 4
    OpSubject(case, Arm("auto", "toeplitz", rate), GraphPool(), compiled=False).warm_up()


@pytest.mark.parametrize(
    ("name", "shape"),
    [("124m", (12, 12, 64)), ("774m", (20, 20, 64)), ("1b", (16, 16, 96)), ("qwen3-4b", (32, 8, 128))],
)
def test_layers_have_the_shapes_of_the_models(name, shape):
    """Query heads, KV heads and channels of the paper's models and of Qwen3-4B."""
    given = {"part": "layer", "rate": 0.5, "device": CPU, "point": Point(65536, 1)}
    assert OpCase(settings=OpSettings(shape=name), **given).shape == shape
    assert OpCase(settings=OpSettings(shape=name, num_heads=8), **given).shape == (8, 8, shape[2])
    assert OpCase(settings=OpSettings(shape=name, num_kv_heads=1, head_dim=16), **given).shape == (shape[0], 1, 16)


def test_a_rate_that_freezes_nothing():
    assert case_of("frozen", 0.01).reason_against == "a rate of 0.01 freezes none of 4 heads"
    with pytest.raises(InputError, match="freezes none"):
        OpSubject(case_of("layer"), Arm("auto", "toeplitz", 0.01), GraphPool(), compiled=False)


def test_a_wrong_operator_is_not_timed(monkeypatch):
    subject = OpSubject(case_of("frozen"), Arm("auto", "toeplitz", 0.5), GraphPool(), compiled=False)
    right = subject._functions["eager"]
    subject._functions["eager"] = lambda value: (right(value)[0] * 1.01,)
    with pytest.raises(AccuracyError, match="outputs are wrong"):
        subject.warm_up()


@pytest.mark.parametrize(
    ("part", "arm", "graph", "call"),
    [
        ("layer", Arm("cudnn", "toeplitz", 0.5), "compiled", "eager"),
        ("layer", Arm("cudnn", "free", 0.5), "compiled", "eager"),
        ("layer", Arm("cudnn"), "eager", "eager"),
        ("frozen", Arm("cudnn", "toeplitz", 0.5), "eager", "eager"),
        ("layer", Arm("flex"), "compiled", "compiled"),
    ],
)
def test_no_call_pays_for_guards_that_ordinary_attention_has_not(part, arm, graph, call):
    case = case_of(part)
    assert [case.runs(arm, f"both {way}", compiled=True) for way in ("graph", "call")] == [graph, call]
    assert {case.runs(arm, f"both {way}", compiled=False) for way in ("graph", "call")} == {"eager"}


@pytest.mark.parametrize("wrong", [None, "eager", "compiled"])
def test_each_function_that_is_timed_is_checked(monkeypatch, wrong):
    """Both take part where graphs are timed beside calls; without a device, a call stands for the replay."""
    monkeypatch.setattr("saf.bench.operator.operator.variants_of", lambda *_: ("forward graph", "forward call"))
    monkeypatch.setattr("saf.bench.operator.operator.GraphReplay", lambda call, **_: call)
    subject = OpSubject(case_of("layer"), Arm("auto", "toeplitz", 0.5), GraphPool(), compiled=True)
    right, ran = subject._functions["eager"], []

    def noting(name: str, *operands):
        ran.append(name)
        live, frozen = right(*operands)
        return live, frozen * (1.01 if wrong == name else 1.0)

    subject._functions = {name: partial(noting, name) for name in ("eager", "compiled")}
    if wrong:
        with pytest.raises(AccuracyError, match="outputs are wrong"):
            subject.warm_up()
        return
    subject.warm_up()
    for variant, name in (("forward graph", "compiled"), ("forward call", "eager")):
        ran.clear()
        subject.timed_block(variant)
        assert set(ran) == {name}


def test_wrong_gradients_and_nan_are_found(generator):
    pattern = synthetic_patterns(2, 40, generator)
    value, gradient = torch.randn(2, 1, 2, 40, 8, generator=generator)
    dense = pattern.dense().float()
    right = {"value": value, "output": dense @ value, "output_gradient": gradient}
    check_arm(pattern, **right, value_gradient=dense.mT @ gradient)
    with pytest.raises(AccuracyError, match="gradients are wrong"):
        check_arm(pattern, **right, value_gradient=dense @ gradient)
    with pytest.raises(AccuracyError, match="outputs are wrong: relative error nan"):
        check_arm(pattern, **{**right, "output": right["output"] * torch.nan}, value_gradient=None)


def test_work_of_the_arms():
    case = case_of("layer", 0.5)
    live, frozen, free = (
        case.work(arm, "both call") for arm in (Arm("auto"), Arm("auto", "toeplitz", 0.5), Arm("auto", "free", 0.5))
    )
    # Two of four heads frozen: 2/7 of their arithmetic stays.
    assert frozen.flops / live.flops == pytest.approx((2 * 7 + 2 * 2) / 28)
    assert free.flops / live.flops == pytest.approx(0.5)
    alone = case_of("frozen", 0.5)
    ratio = alone.work(Arm("auto", "toeplitz", 0.5), "both call").flops / alone.work(Arm("auto"), "both call").flops
    assert ratio == pytest.approx(2 / 7)


def test_graphs_need_cuda():
    with pytest.raises(UnsupportedError, match="need a CUDA device"):
        variants_of(OpSettings(graphs="on"), CPU)
    assert variants_of(OpSettings(graphs="both"), CPU) == ("forward call", "both call")
    cuda = torch.device("cuda")
    assert variants_of(OpSettings(), cuda) == ("forward graph", "forward call", "both graph", "both call")


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("length", [1, 128, 300])
def test_flex_blocks_are_causal(generator, length):
    query, key, value = torch.randn(3, 1, 2, length, 16, generator=generator)
    with torch.no_grad():
        case = OpCase(settings=OpSettings(num_heads=2), point=Point(length, 1), part="layer", rate=0.0, device=CPU)
        flex, _ = function_of(case, Arm("flex"))
        (mixed,) = flex(query, key, value)
    torch.testing.assert_close(mixed, live_attention(query, key, value))


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["frozen", "layer"])
def test_graphs_replay_on_cuda(part):
    case = OpCase(
        settings=OpSettings(num_heads=4), point=Point(512, 2), part=part, rate=0.5, device=torch.device("cuda")
    )
    pool = GraphPool()
    for arm in (Arm("cudnn"), Arm("cudnn", "toeplitz", 0.5)):
        subject = OpSubject(case, arm, pool, compiled=True)
        subject.warm_up()
        assert all(subject.timed_block(variant) > 0 for variant in variants_of(case.settings, case.device))
