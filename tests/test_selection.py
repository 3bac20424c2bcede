"""Ranking, budgets and nesting."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saf.errors import InputError, SelectionError
from saf.heads import HeadLayout, HeadSet
from saf.selection import budget, ranking, select

SCORES = torch.tensor([[3.0, 1.0, torch.nan], [1.0, 0.5, 9.0]])


def test_lowest_scores_first_ties_by_layer_and_head():
    assert ranking(SCORES) == [(1, 1), (0, 1), (1, 0), (0, 0), (1, 2)]
    assert list(select(SCORES, 0.5)) == [(0, 1), (1, 0), (1, 1)]
    assert list(select(SCORES, count=2, exclude=[(1, 1)])) == [(0, 1), (1, 0)]


def test_the_budget_rounds_halves_to_even():
    assert [budget(rate, 10) for rate in (0.05, 0.15, 0.25, 0.35)] == [0, 2, 2, 4]
    assert budget(0.25, 144) == 36


@given(first=st.floats(0, 1), second=st.floats(0, 1), seed=st.integers(0, 99))
def test_sets_of_growing_rates_are_nested(first, second, seed):
    scores = torch.rand(4, 6, generator=torch.Generator().manual_seed(seed))
    small, large = (select(scores, rate) for rate in sorted((first, second)))
    assert set(small) <= set(large)
    assert len(small) == round(min(first, second) * 24)


def test_bad_requests_are_refused():
    for rate in (-0.1, 1.5, float("nan")):
        with pytest.raises(InputError, match="from 0 to 1"):
            select(SCORES, rate)
    with pytest.raises(SelectionError, match="6 heads asked for; 5 of 6"):
        select(SCORES, 1.0)
    with pytest.raises(InputError, match="either rate or count"):
        select(SCORES)


def test_head_sets_and_layouts():
    heads = HeadSet([(1, 0), (0, 2)])
    assert heads.to_list() == [[0, 2], [1, 0]]
    assert HeadSet.from_list(heads.to_list()) == heads
    assert heads - HeadSet([(1, 0)]) | HeadSet([(3, 3)]) == HeadSet([(0, 2), (3, 3)])
    with pytest.raises(InputError, match="names each head once"):
        HeadSet([(0, 0), (0, 0)])
    layout = HeadLayout(6, 3, frozen=(1, 4))
    assert layout.slots == (0, 2, 3, 5, 1, 4)
    assert layout.kv_head == (0, 1, 1, 2, 0, 2)
    assert HeadLayout(4, 4, frozen=(0,)).kv_head == (0, 1, 2, 3)
    with pytest.raises(InputError, match="must ascend"):
        HeadLayout(4, 4, frozen=(2, 1))
    with pytest.raises(InputError, match=r"must lie in \[0, 4\)"):
        HeadLayout(4, 4, frozen=(4,))
