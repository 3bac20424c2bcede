"""Ranking, budgets and nesting."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saf.errors import InputError, SelectionError
from saf.heads import HeadLayout, HeadSet
from saf.selection import budget, chooser, ranking, select

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


def test_given_lists_and_limits_by_layer():
    scores = torch.arange(12.0).view(3, 4)
    assert list(select(scores, count=3, only=[(2, 3), (0, 3), (1, 0), (2, 0)])) == [(0, 3), (1, 0), (2, 0)]
    assert list(select(scores, count=5, max_per_layer=2)) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert list(select(scores, count=4, max_per_layer={0: 1, 1: 0})) == [(0, 0), (2, 0), (2, 1), (2, 2)]
    with pytest.raises(SelectionError, match="4 heads asked for; 3 of 12 can be chosen under these conditions"):
        select(scores, count=4, max_per_layer=1)
    assert list(select(scores, count=6)) == [(layer, head) for layer in (0, 1) for head in range(4)][:6]
    for limits in (-1, {3: 1}, {0: -2}):
        with pytest.raises(InputError, match="max_per_layer gives 3 layers limits of 0 or more; got"):
            select(scores, count=1, max_per_layer=limits)
    with pytest.raises(InputError, match=r"3 layers of 4 heads; got \[\(0, 4\), \(3, 0\)\]"):
        select(scores, count=1, exclude=[(3, 0), (0, 4)])
    with pytest.raises(InputError, match="3 layers of 4 heads"):
        select(scores, count=1, only=[(0, -1)])


@given(seed=st.integers(0, 10**6), rate=st.floats(0, 1))
def test_a_matched_control_takes_as_many_heads_of_each_layer(seed, rate):
    generator = torch.Generator().manual_seed(seed)
    scores, control = torch.rand(2, 4, 6, generator=generator)
    chosen = select(scores, rate)
    drawn = select(control, match=chosen)
    for layer in range(4):
        heads = drawn.in_layer(layer)
        assert len(heads) == len(chosen.in_layer(layer))
        assert all(
            control[layer, head] <= min(control[layer, rest] for rest in set(range(6)) - set(heads))
            for head in heads
            if len(heads) < 6
        )
    with pytest.raises(InputError, match="match sets the number"):
        select(control, match=chosen, max_per_layer=2)


def test_a_matched_control_cannot_take_frozen_heads():
    scores = torch.tensor([[1.0, torch.nan], [2.0, 3.0]])
    assert list(select(scores, match=[(0, 1), (1, 1)])) == [(0, 0), (1, 0)]
    with pytest.raises(SelectionError, match="2 heads asked for; 1 of 4"):
        select(scores, match=[(0, 0), (0, 1)])


def test_whole_groups_come_by_their_mean_score():
    scores = torch.tensor([[1.0, 9.0, 4.0, 4.0], [3.0, 2.0, torch.nan, 3.0], [torch.nan, torch.nan, 6.0, 7.0]])
    order = [(1, 0), (1, 1)], [(1, 3)], [(0, 2), (0, 3)], [(0, 0), (0, 1)], [(2, 2), (2, 3)]
    taken: set = set()
    for unit in order:
        taken |= set(unit)
        assert set(select(scores, count=len(taken), group_size=2)) == taken
    assert len(select(scores, count=4, group_size=2)) == 3, "no half groups"
    assert set(select(scores, count=3, group_size=2, exclude=[(1, 1)])) == {(1, 3), (0, 2), (0, 3)}
    with pytest.raises(SelectionError, match="12 heads asked for; 9 of 12"):
        select(scores, 1.0, group_size=2)
    with pytest.raises(InputError, match="4 heads do not divide into KV groups of 3"):
        select(scores, 0.5, group_size=3)


@given(seed=st.integers(0, 10**6), total=st.integers(0, 16), size=st.sampled_from([1, 2, 3]))
def test_a_matched_control_of_whole_groups_has_the_same_numbers_or_is_refused(seed, total, size):
    generator = torch.Generator().manual_seed(seed)
    scores, control = torch.rand(2, 3, 6, generator=generator)
    frozen = torch.rand(3, 6, generator=generator) < 0.3
    scores, control = (values.masked_fill(frozen, torch.nan) for values in (scores, control))
    try:
        chosen = select(scores, count=total, group_size=size)
        drawn = select(control, match=chosen, group_size=size)
    except SelectionError:
        assert size > 1 or total > int((~frozen).sum())
        return
    assert [len(chosen.in_layer(layer)) for layer in range(3)] == [len(drawn.in_layer(layer)) for layer in range(3)]
    for layer, head in drawn:
        first = head - head % size
        assert all(frozen[layer, each] or (layer, each) in drawn for each in range(first, first + size))


@given(first=st.floats(0, 0.85), second=st.floats(0, 0.85), seed=st.integers(0, 99), cap=st.integers(3, 6))
def test_sets_are_nested_under_every_condition(first, second, seed, cap):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(4, 6, generator=generator)
    scores[2, 3] = scores[0, 0] = torch.nan
    small, large = sorted((first, second))
    for options in ({"max_per_layer": cap}, {"group_size": 2}, {"exclude": [(0, 1)]}):
        try:
            assert set(select(scores, small, **options)) <= set(select(scores, large, **options))
        except SelectionError:
            assert "max_per_layer" in options


@given(seed=st.integers(0, 10**6), total=st.integers(0, 12), cap=st.integers(0, 4))
def test_choosing_in_batches_is_choosing_one_by_one(seed, total, cap):
    generator = torch.Generator().manual_seed(seed)
    scores, fits = torch.rand(3, 4, generator=generator), torch.rand(3, 4, generator=generator) > 0.4
    one_by_one: list = []
    for head in ranking(scores):
        fitting = sum(layer == head[0] for layer, _ in one_by_one) < cap and fits[head]
        if len(one_by_one) < total and fitting:
            one_by_one.append(head)
    choose = chooser(scores, count=total, max_per_layer=cap)
    while proposed := choose.propose():
        for unit in proposed:
            if fits[unit[0]]:
                choose.accept(unit)
    assert set(choose) == set(one_by_one)


def test_bad_requests_are_refused():
    for rate in (-0.1, 1.5):
        with pytest.raises(InputError, match="from 0 to 1"):
            select(SCORES, rate)
    with pytest.raises(SelectionError, match="6 heads asked for; 5 of 6"):
        select(SCORES, 1.0)
    for given_twice in ({}, {"rate": 0.5, "count": 1}, {"count": 1, "match": [(0, 0)]}):
        with pytest.raises(InputError, match="either rate or count"):
            select(SCORES, **given_twice)
    with pytest.raises(SelectionError, match="count is a number of heads, 0 or more; got -1"):
        select(SCORES, count=-1)


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
