"""The one launch of live and frozen heads' few rows against float64."""

import pytest
import torch

from saf.errors import InputError
from saf.ops import live_attention, mixed_attention
from tests.ops.split_cases import CASES, LIMITS


@pytest.mark.parametrize("name", CASES)
def test_heads_agree_with_float64_in_one_launch(split_results, name):
    result, case = split_results[name], CASES[name]
    assert len(result["parts"]) == 1
    assert result["error"].keys() == {"live", *(["frozen"] if case.frozen else [])}
    assert max(result["error"].values()) <= LIMITS[case.dtype]
    assert result["strides"]
    assert result["finite"]


def test_keys_are_cut_where_parts_are_many(split_results):
    assert split_results["a row"]["parts"][0] > 1
    assert split_results["one part"]["parts"] == [1]


def test_other_passes_take_the_usual_choice():
    query, key, value = (torch.randn(1, 2, 8, 16) for _ in range(3))
    usual = mixed_attention(query, key, value, None)
    assert torch.equal(mixed_attention(query, key, value, None, kernel="split"), usual)
    assert torch.equal(live_attention(query, key, value, kernel="split"), usual)
    with pytest.raises(InputError, match=r"unknown attention kernel 'splitt'.*did you mean 'split'"):
        live_attention(query, key, value, kernel="splitt")
