"""The kernels of single rows against dense patterns in float64."""

import pytest

from tests.ops.rows.row_cases import CASES, LIMITS


@pytest.mark.parametrize("name", CASES)
def test_rows_agree_with_float64_and_live_heads_stay(row_results, name):
    result = row_results[name]
    assert result["error"] <= LIMITS[CASES[name].dtype]
    assert result["live"]
    assert result["strides"]


@pytest.mark.parametrize("name", CASES)
def test_a_call_keeps_nothing(row_results, name):
    """A graph's memory is its own: what its capture made must be gone."""
    assert row_results[name]["kept"] == 0


def test_keys_are_cut_where_parts_are_many(row_results):
    assert row_results["a row"]["parts"] > 1
    assert row_results["one part"]["parts"] == 1
