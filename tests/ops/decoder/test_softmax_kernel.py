"""The loss kernel against float64."""

import pytest

from tests.ops.decoder.softmax_cases import CASES


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(softmax_results, name):
    """Losses to float32's rounding, gradients to their dtype's; the interpreter truncates to bfloat16."""
    found = softmax_results[name]
    assert found["loss"] < 1e-5
    assert found["gradient"] < (6e-3 if CASES[name].dtype == "bfloat16" else 1e-6)
    assert found["ignored"]
    assert found["outside"]
