"""Every shape, dtype, head map, memory order and hard pattern of a layer on a CPU, against float64."""

import dataclasses

import pytest
import torch

from tests.ops.hard_patterns import NAMES
from tests.ops.layers import BUDGET, Case, run
from tests.ops.properties import Frozen, problems

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ALL = tuple(range(len(NAMES)))
SHAPES = [
    Case(length=1, dim=128, batch=8, frozen=(0, 1, 2, 3)),
    Case(length=63, dim=80, heads=8, group=2, frozen=(0, 2, 4, 6)),
    Case(length=64, dim=60, batch=1, frozen=(3,), memory="contiguous", extra=0),
    Case(length=64, dim=192, heads=8, group=4, frozen=(0, 1, 4)),
    Case(length=129, dim=96, memory="channels"),
    Case(length=70, dim=16, batch=1, group=4, frozen=()),
    Case(length=300, dim=16, heads=4, group=2, frozen=(2, 3)),
    Case(length=129, dim=16, dense=2),
    Case(length=300, dim=16, batch=1, heads=len(NAMES), frozen=ALL, patterns=NAMES),
]


@pytest.mark.parametrize("backend", ["toeplitz", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_and_gradients_keep_their_budgets(backend, dtype):
    cases = [dataclasses.replace(case, backend=backend, dtype=dtype) for case in SHAPES]
    assert {case.name: lines for case in cases if (lines := run(case, "cpu").problems())} == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("band", [64, 128])
def test_exponential_patterns_keep_their_budgets(dtype, band):
    cases = [dataclasses.replace(case, backend="linear", dtype=dtype, band=band) for case in SHAPES if case.frozen]
    cases += [dataclasses.replace(cases[4], backend=backend) for backend in ("toeplitz", "reference")]
    assert {case.name: lines for case in cases if (lines := run(case, "cpu").problems())} == {}


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("toeplitz", torch.bfloat16),
        ("toeplitz", torch.float16),
        ("toeplitz", torch.float32),
        ("reference", torch.float32),
        ("linear", torch.bfloat16),
        ("linear", torch.float32),
    ],
)
@pytest.mark.parametrize("length", [1, 63, 300])
def test_properties(backend, dtype, length):
    assert problems(Frozen(length, 16, dtype, backend, "cpu")) == []


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_no_worse_than_twice_pytorchs_own_attention(dtype):
    case = Case(length=300, dim=64, dtype=dtype, heads=3, frozen=(), memory="contiguous")
    theirs = run(case, "cpu")
    ours = run(dataclasses.replace(case, frozen=(0, 1, 2), patterns=("ripple",)), "cpu")
    for name in ("output", "value"):
        assert ours.relative(name) <= min(2 * theirs.relative(name), BUDGET[dtype]), (name, theirs.relative(name))
