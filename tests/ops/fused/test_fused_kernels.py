"""The fused kernels against float64: mixes of heads, grouped queries, awkward shapes, every gradient."""

import pytest

from saf.errors import InputError
from tests.ops.fused.fused_cases import CASES, COMPACT, LIVE

FROZEN = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 4.5e-3}
"""Largest relative error where no head is live."""
LOG_SUMS = 1e-6
"""Largest relative error of log-sum-exps, float32 in every dtype of operands."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tensor", ["out", "lse", "dq", "dk", "dv"])
def test_agrees_with_float64(fused_results, name, tensor):
    """At most twice what SDPA beside dense patterns is off, and one rounding, with NaN around every operand."""
    result = fused_results[name]
    if "skip" in result:
        pytest.skip(result["skip"])
    case = CASES[name]
    limit = 2 * result["sdpa"][tensor] + result["rounding"][tensor]
    if LIVE not in case.states:
        limit = FROZEN[case.dtype]
    elif tensor == "lse":
        limit = LOG_SUMS
    elif case.length == 1 and tensor in ("dq", "dk"):  # zero: the difference of two equal sums over channels
        limit += case.dim * 2**-24
    assert result[tensor] <= limit


@pytest.mark.parametrize("name", CASES)
def test_backward_repeats_to_the_bit(fused_results, name):
    """Two backward passes give equal bits."""
    result = fused_results[name]
    if "repeats" not in result:
        pytest.skip("programs run one after another here; needs a GPU")
    assert result["repeats"]


def test_maps_number_slots_in_head_order():
    """Slots count each kind in head order; groups list the heads of every value head."""
    pytest.importorskip("triton")
    from saf.ops.fused.tables import HeadMaps

    states = [COMPACT, LIVE, LIVE, COMPACT]
    maps = HeadMaps.build(states, key=[0, 0, 1, 1], value=[0, 0, 1, 1], num_value_heads=3, device="cpu")
    assert maps.counts == (2, 2, 0)
    assert maps.query.tolist() == [0, 0, 1, 0]
    assert maps.pattern.tolist() == [0, 0, 1, 1]
    assert maps.live.tolist() == [1, 2]
    assert maps.group_start.tolist() == [0, 2, 4, 4]
    with pytest.raises(InputError, match="value slots below 1"):
        HeadMaps.build([LIVE], key=[0], value=[1], num_value_heads=1, device="cpu")


def test_refuses_operands_that_do_not_fit():
    """A query slot is needed for each live head, and a pattern for each frozen one."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from saf.ops.fused.launch import fused_forward
    from saf.ops.fused.tables import FusedPatterns, HeadMaps

    maps = HeadMaps.build([LIVE, COMPACT], key=[0, 0], value=[0, 1], num_value_heads=2, device="cpu")
    one, none = torch.zeros(1, 40), torch.zeros(0, 40, 40)
    patterns = FusedPatterns.build(one, one, one, none)
    value = torch.randn(1, 2, 40, 16)
    with pytest.raises(InputError, match="one slot a live head"):
        fused_forward(value, value[:, :1], value, maps, patterns)
    short = FusedPatterns.build(one[:, :20], one[:, :20], one[:, :20], none)
    with pytest.raises(InputError, match="1 compact heads of 40 positions"):
        fused_forward(value[:, :1], value[:, :1], value, maps, short)
