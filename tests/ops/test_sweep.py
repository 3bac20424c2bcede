"""Every shape, dtype, head map, layout and hard pattern of the seam on a CPU, against float64."""

import dataclasses

import pytest
import torch

from tests.ops.hard_patterns import NAMES, real_patterns
from tests.ops.layer_case import Case
from tests.ops.layer_outcome import BUDGET, Outcome, run
from tests.ops.properties import Frozen, problems

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ALL = tuple(range(len(NAMES)))
SHAPES = [
    Case(length=1, dim=16, batch=1, frozen=(0,)),
    Case(length=1, dim=128, batch=8, frozen=(0, 1, 2, 3)),
    Case(length=63, dim=80, heads=8, group=2, frozen=(0, 2, 4, 6)),
    Case(length=64, dim=60, batch=1, frozen=(3,), layout="contiguous", extra=0),
    Case(length=64, dim=192, heads=8, group=4, frozen=(0, 1, 4)),
    Case(length=129, dim=96, layout="channels"),
    Case(length=129, dim=16, frozen=()),
    Case(length=70, dim=256, batch=1, heads=4, group=4, frozen=()),
    Case(length=512, dim=16, heads=4, group=2, frozen=(2, 3)),
    Case(length=129, dim=16, dense=True),
    Case(length=600, dim=16, batch=1, heads=len(NAMES), frozen=ALL, patterns=NAMES),
]


@pytest.mark.parametrize("backend", ["toeplitz", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_and_gradients_keep_their_budgets(backend, dtype):
    cases = [dataclasses.replace(case, backend=backend, dtype=dtype) for case in SHAPES]
    found = {case.name: problems for case in cases if (problems := run(case, "cpu").problems())}
    assert found == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("band", [64, 128])
def test_exponential_patterns_keep_their_budgets(dtype, band):
    cases = [dataclasses.replace(case, backend="linear", dtype=dtype, band=band) for case in SHAPES if case.frozen]
    cases += [dataclasses.replace(cases[5], backend=backend) for backend in ("toeplitz", "reference")]
    found = {case.name: problems for case in cases if (problems := run(case, "cpu").problems())}
    assert found == {}


def test_patterns_of_a_trained_model(real_heads):
    """The first 600 positions of patterns of 4,096."""
    case, pattern = (
        Case(length=600, dim=16, heads=4, frozen=(0, 1, 2, 3), extra=3496),
        real_patterns(real_heads, 4, 4096),
    )
    found = {dtype: run(dataclasses.replace(case, dtype=dtype), "cpu", pattern).problems() for dtype in DTYPES}
    assert not any(found.values()), found


@pytest.mark.parametrize("backend", ["toeplitz", "reference"])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("length", [1, 63, 300])
def test_properties(backend, dtype, length):
    assert problems(Frozen(length, 16, dtype, backend, "cpu")) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("length", [1, 63, 300])
def test_properties_of_exponential_patterns(dtype, length):
    assert problems(Frozen(length, 16, dtype, "linear", "cpu")) == []


@pytest.mark.parametrize("backend", ["toeplitz", "reference"])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_no_worse_than_twice_pytorchs_own_attention(backend, dtype):
    case = Case(length=300, dim=64, dtype=dtype, heads=3, frozen=(), layout="contiguous", backend=backend)
    theirs = run(case, "cpu")
    ours = run(dataclasses.replace(case, frozen=(0, 1, 2), patterns=("ripple",)), "cpu")
    for name in ("output", "value"):
        assert ours.relative(name) <= min(2 * theirs.relative(name), BUDGET[dtype]), (name, theirs.relative(name))


def test_a_wrong_result_is_noticed():
    """A row off by one in a hundred, a head shifted by a row, a gradient missing or of the wrong sign, one NaN."""
    outcome = run(Case(length=129, dtype=torch.float32), "cpu")
    assert outcome.problems() == []
    for spoil in (
        lambda o: o.output[:, 2, 50].mul_(1.01),
        lambda o: o.output[:, 3].copy_(o.output[:, 3].roll(1, 1)),
        lambda o: o.gradients["value"][:, 3].zero_(),
        lambda o: o.gradients["key"][:, 0].mul_(-1),
        lambda o: o.output[0, 2, 5].fill_(torch.nan),
    ):
        spoilt = Outcome(**{**vars(outcome), "output": outcome.output.clone()})
        spoilt.gradients = {name: x.clone() for name, x in outcome.gradients.items()}
        spoil(spoilt)
        assert spoilt.problems()


@pytest.mark.parametrize("name", ["output", "query", "key", "value"])
def test_an_error_of_our_own_live_heads_is_noticed(name):
    """Twice what PyTorch's attention is off, and one rounding: far less than 8e-6 in float32."""
    theirs = run(Case(length=129, dtype=torch.float32, backend="reference"), "cpu")
    ours = dataclasses.replace(theirs, case=dataclasses.replace(theirs.case, backend="fused"), sdpa=theirs)
    assert ours.problems() == []
    noise = torch.randn(theirs.expected[name].shape, generator=torch.Generator().manual_seed(0))
    size = 1e-6 * theirs.expected[name].norm() / noise.norm()
    spoilt = (ours.output if name == "output" else ours.gradients[name]) + (size * noise).float()
    ours = dataclasses.replace(
        ours,
        output=spoilt if name == "output" else ours.output,
        gradients=ours.gradients | ({} if name == "output" else {name: spoilt}),
    )
    assert any(line.startswith(f"{name} of slice") for line in ours.problems())
