"""Layers with exponential patterns: which backend executes them, beside what else, and what is refused."""

import pytest
import torch

from saf.errors import InputError, UnsupportedError
from saf.ops import FrozenHeads, frozen_attention
from saf.ops.linear import exact_tables, linear_product, linear_tables
from saf.patterns import DensePattern, ExponentialPattern, TrainablePattern
from tests.ops.exponential_patterns import exponential_patterns
from tests.ops.hard_patterns import hard_patterns
from tests.ops.kernels.recurrent import CASES, run

HALF_BUDGET = 4.5e-3


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_exponential_patterns_run_in_linear_time_unless_another_backend_is_named():
    pattern = exponential_patterns(2, 150, band=16)
    assert FrozenHeads.from_patterns(pattern).backend == "linear"
    assert FrozenHeads.from_patterns(pattern, dtype=torch.float16).backend == "toeplitz"
    with pytest.raises(UnsupportedError, match="backend 'linear' cannot run: values must be one of"):
        FrozenHeads.from_patterns(pattern, dtype=torch.float16, backend="linear")
    value, answers = draw(2, 2, 150, 16), {}
    for backend in ("linear", "toeplitz", "reference"):
        heads = FrozenHeads.from_patterns(pattern, dtype=torch.float64, backend=backend)
        answers[backend] = frozen_attention(value, heads)
    for backend in ("toeplitz", "reference"):
        torch.testing.assert_close(answers["linear"], answers[backend], rtol=1e-11, atol=1e-13)


def test_memory_does_not_grow_with_the_square_of_the_length():
    sizes = [
        FrozenHeads.from_patterns(exponential_patterns(1, length, band=64, sinks=8)).allocated
        for length in (1000, 2000)
    ]
    assert sizes[1] - sizes[0] == 1000 * 3 * 4  # exp(alpha), 1/Z, and g for single rows


@pytest.mark.parametrize("start", [None, [0, 70]])
@pytest.mark.parametrize("rows", [None, 1, 5])
def test_kinds_mix_in_one_layer_with_padding_and_few_rows(start, rows):
    """Slots in any order; padded rows are the patterns' first rows, moved."""
    fast, compact = exponential_patterns(2, 180, band=16), hard_patterns(["decay", "ripple"], 180)
    mixed = [fast[0], compact[0], DensePattern(compact[1].dense()), fast[1]]
    heads = FrozenHeads.from_patterns(mixed, dtype=torch.float64, kv_head=[0, 2, 1, 1, 0])
    assert heads.backend == "linear"
    value = draw(2, 3, 180, 8)
    actual = frozen_attention(value, heads, rows=rows, left_pad=None if start is None else torch.tensor(start))
    weights = torch.stack([one.dense() for one in mixed])
    expected = torch.zeros(2, 4, 180, 8, dtype=torch.float64)
    for row, first in enumerate(start or [0, 0]):
        used = value[row, [2, 1, 1, 0], first:]
        expected[row, :, first:] = weights[:, : 180 - first, : 180 - first] @ used
    torch.testing.assert_close(actual, expected[:, :, -(rows or 180) :], rtol=1e-10, atol=1e-12)


def test_gradients_pass_gradcheck():
    exact = exact_tables(exponential_patterns(2, 28, band=9).singles(), torch.device("cpu"), chunk=8)
    tables, before, after = linear_tables(exact, torch.float64)
    value = draw(1, 2, 28, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: linear_product(x, tables, before, after, None, False), value)


@pytest.mark.parametrize("sink", [-20.0, 20.0])
def test_sinks_of_any_height(sink):
    pattern = exponential_patterns(1, 300, band=32)
    alpha = pattern.alpha.clone()
    alpha[:, :3] += sink
    pattern = ExponentialPattern.from_state(pattern.state() | {"alpha": alpha})
    value = draw(2, 1, 300, 16)
    for dtype, budget in ((torch.float32, 1e-6), (torch.bfloat16, HALF_BUDGET)):
        rounded = value.to(dtype)
        expected = pattern.dense() @ rounded.double()
        actual = frozen_attention(rounded, FrozenHeads.from_patterns(pattern, dtype=dtype))
        assert (actual - expected).norm() <= budget * expected.norm()


def test_poles_that_cancel_are_refused_in_low_precision_and_run_in_high():
    """Two poles of nearly one damping, 300 times as large as their difference."""
    one = torch.ones(1, dtype=torch.float64)
    poles = torch.tensor([1e-3, 1.01e-3, 0.0]).double(), torch.zeros(3).double()
    amplitudes = torch.tensor([300, -300, 0.1]).double()
    pattern = ExponentialPattern(0 * torch.ones(400).double(), one, *poles, amplitudes, 0 * amplitudes, 400)
    value = draw(1, 1, 400, 8)
    exact = frozen_attention(value, FrozenHeads.from_patterns(pattern, dtype=torch.float64))
    torch.testing.assert_close(exact[0], pattern.dense() @ value[0])
    with pytest.raises(UnsupportedError, match="cannot hold the sums of an exponential pattern"):
        FrozenHeads.from_patterns(pattern, dtype=torch.bfloat16)


def test_lengths_and_training_beyond_what_was_fitted():
    pattern = exponential_patterns(2, 100, band=16, sinks=4)
    heads = FrozenHeads.from_patterns(pattern)
    with pytest.raises(InputError, match="the frozen heads' patterns cover 100"):
        frozen_attention(torch.zeros(1, 2, 101, 16), heads)
    longer = FrozenHeads.from_patterns(pattern.extended(200), dtype=torch.float64)
    value = draw(1, 2, 200, 4)
    torch.testing.assert_close(frozen_attention(value, longer), pattern.dense(200) @ value)
    trained = TrainablePattern.of(pattern[0].compact())
    assert FrozenHeads.from_patterns([pattern[1], trained]).backend == "toeplitz"


@pytest.mark.parametrize("name", CASES)
def test_steps_in_plain_pytorch_keep_the_limits_of_the_kernels(name):
    assert run(CASES[name], "cpu", plain=True) == []
