import torch

from saf.bench.harness.arms import Arm, arms_of, default_backends, default_kernels, default_others, plan
from saf.bench.harness.settings import Point
from saf.bench.model.models import ModelPlan, build_model
from saf.bench.model.prefill import PrefillSettings
from saf.bench.operator.case import OpCase, OpSettings
from saf.bench.operator.operator import OpSubject
from saf.machine.cuda_graphs import GraphPool
from saf.ops import BACKENDS, live_attention
from saf.ops.backends.reference import Reference


def test_every_kernel_has_a_control_and_the_first_is_what_others_are_compared_with():
    comparisons = plan(
        kernels=["cudnn", "flash"], others=["auto", "flash"], backends=["toeplitz"], rates=[0.25], free=True
    )
    arms = [(c.role, c.baseline.name, c.arm.name) for c in comparisons]
    assert arms == [
        ("control", "ordinary cudnn", "control cudnn"),
        ("control", "ordinary flash", "control flash"),
        ("kernel", "ordinary cudnn", "ordinary flash"),
        ("kernel", "ordinary cudnn", "ordinary auto"),
        ("frozen", "ordinary cudnn", "25% toeplitz cudnn"),
        ("free", "ordinary cudnn", "25% free cudnn"),
        ("frozen", "ordinary flash", "25% toeplitz flash"),
        ("free", "ordinary flash", "25% free flash"),
    ]
    assert len(arms_of(comparisons)) == 9
    also = plan(kernels=["cudnn"], others=[], backends=["toeplitz"], rates=[0.25], free=False, pruned=True)
    assert [(c.role, c.arm.name) for c in also[1:]] == [
        ("frozen", "25% toeplitz cudnn"),
        ("pruned", "25% pruned cudnn"),
    ]
    assert Arm(**comparisons[4].arm.to_dict()) == comparisons[4].arm


def test_cudnn_is_the_baseline_on_cuda():
    assert default_kernels((), "cuda") == ("cudnn",)
    assert default_kernels((), "cpu") == ("auto",)
    assert default_kernels(("flash",), "cuda") == ("flash",)


class Together(Reference):
    """A backend that computes live heads itself, as the fused one does on a GPU."""

    mixes_live = True

    def mixed(self, query, key, value, tables, scale):
        live = live_attention(query, key, value[:, : query.shape[1]], scale=scale)
        return torch.cat([live, self.forward(value[:, query.shape[1] :], tables, value.shape[-2])], 1)


def test_a_backend_that_computes_live_heads_is_measured_against_a_pinned_kernel(monkeypatch):
    monkeypatch.setitem(BACKENDS, "together", Together())
    assert Arm("math", "together", 0.25).live_kernel == "auto"
    assert Arm("math", "toeplitz", 0.25).live_kernel == Arm("math").live_kernel == "math"
    settings = PrefillSettings(
        model="tiny", pairs=1, rates=(0.25,), backends=("together",), device="cpu", kernels=("math",)
    )
    plan = ModelPlan.of(settings, 40)
    model = build_model(plan, Arm("math", "together", 0.25), device=torch.device("cpu"))
    other = build_model(plan, Arm("math", "reference", 0.25), device=torch.device("cpu"))
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(model(tokens), other(tokens))
    kernels = {layer.live.kernel for layer in model.attention_layers() if layer.frozen is None}
    assert kernels <= {"math"}
    own = OpSettings(num_heads=4, head_dim=16, graphs="off", warmup=0, repeats=1)
    case = OpCase(settings=own, point=Point(60, 1), part="layer", rate=0.5, device=torch.device("cpu"))
    OpSubject(case, Arm("math", "together", 0.5), GraphPool(), compiled=False).warm_up()


def test_every_baseline_and_the_paper_s_execution_are_measured_on_cuda_unless_left_out():
    assert default_backends((), "cuda") == ("toeplitz", "fused")
    assert default_backends((), "cpu") == ("toeplitz",)
    assert default_backends(("reference",), "cuda") == ("reference",)
    assert default_others(None, "cuda", compiled=True) == ("auto", "flash", "flex")
    assert default_others(None, "cuda", compiled=False) == ("auto", "flash")
    assert default_others(None, "cpu", compiled=True) == ()
    assert default_others((), "cuda", compiled=True) == ()
