"""The causal convolution kernel against float64."""

import pytest

from tests.ops.toeplitz.convolution_cases import CASES


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(convolution_results, name):
    """Some hundred terms, added in blocks: a few roundings of the sum of their sizes."""
    limit = {"float64": 2.0**-50, "float32": 2.0**-21}[CASES[name].dtype]
    assert convolution_results[name]["error"] <= limit
