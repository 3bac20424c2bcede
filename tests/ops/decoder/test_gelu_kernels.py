"""The GELU kernels against float64."""

import pytest

from tests.ops.decoder.gelu_cases import CASES


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(gelu_results, name):
    """Errors are those of rounding the exact result once; the interpreter truncates to bfloat16."""
    found, truncates = gelu_results[name], CASES[name].dtype == "bfloat16"
    for what in ("value", "gradient"):
        assert found[what] < (6e-3 if truncates else 1.1 * found[f"rounded {what}"] + 1e-5)
    assert found["same"]
