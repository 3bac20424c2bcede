"""Selection: budgets, ties, nested sets, limits, matched controls, whole groups; sets of heads and their layout."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saf.errors import InputError, SelectionError
from saf.heads import HeadLayout, HeadSet
from saf.selection import Chooser, heads_at_rate, ranking, select

SCORES = torch.tensor([[3.0, 1.0, torch.nan], [1.0, 0.5, 9.0]])
ROWS = torch.arange(12.0).view(3, 4)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def test_lowest_scores_first_ties_by_layer_and_head_halves_to_even():
    assert [heads_at_rate(rate, 10) for rate in (0.05, 0.15, 0.25, 0.35)] == [0, 2, 2, 4]
    assert ranking(SCORES) == [(1, 1), (0, 1), (1, 0), (0, 0), (1, 2)]
    assert list(select(SCORES, 0.5)) == [(0, 1), (1, 0), (1, 1)]
    assert list(select(SCORES, count=2, exclude=[(1, 1)])) == [(0, 1), (1, 0)]
    assert list(select(ROWS, count=3, only=[(2, 3), (0, 3), (1, 0), (2, 0)])) == [(0, 3), (1, 0), (2, 0)]
    assert list(select(ROWS, count=5, max_per_layer=2)) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


@given(first=st.floats(0, 0.85), second=st.floats(0, 0.85), seed=st.integers(0, 99), cap=st.integers(3, 6))
def test_sets_of_growing_rates_are_nested_under_every_condition(first, second, seed, cap):
    scores = drawn(seed, 4, 6)
    small, large = sorted((first, second))
    assert len(select(scores, small)) == round(small * 24)
    scores[2, 3] = scores[0, 0] = torch.nan
    for options in ({}, {"max_per_layer": cap}, {"group_size": 2}, {"exclude": [(0, 1)]}):
        try:
            assert set(select(scores, small, **options)) <= set(select(scores, large, **options))
        except SelectionError:
            assert "max_per_layer" in options


@given(seed=st.integers(0, 10**6), total=st.integers(0, 16), size=st.sampled_from([1, 2, 3]))
def test_a_matched_control_takes_the_lowest_of_each_layer_in_the_same_numbers_or_is_refused(seed, total, size):
    frozen = drawn(seed, 3, 6) < 0.3
    scores, control = (values.masked_fill(frozen, torch.nan) for values in drawn(seed + 1, 2, 3, 6))
    try:
        chosen = select(scores, count=total, group_size=size)
        matched = select(control, match=chosen, group_size=size)
    except SelectionError:
        assert size > 1 or total > int((~frozen).sum())
        return
    for layer in range(3):
        heads = matched.in_layer(layer)
        assert len(heads) == len(chosen.in_layer(layer))
        if size == 1:
            lowest = [head for at, head in ranking(control) if at == layer]
            assert heads == sorted(lowest[: len(heads)])
    for layer, head in matched:
        first = head - head % size
        assert all(frozen[layer, each] or (layer, each) in matched for each in range(first, first + size))


def test_whole_groups_come_by_their_mean_score():
    scores = torch.tensor([[1.0, 9.0, 4.0, 4.0], [3.0, 2.0, torch.nan, 3.0], [torch.nan, torch.nan, 6.0, 7.0]])
    order = [(1, 0), (1, 1), (1, 3), (0, 2), (0, 3), (0, 0), (0, 1), (2, 2), (2, 3)]
    for count in (2, 3, 5, 7, 9):
        assert set(select(scores, count=count, group_size=2)) == set(order[:count])
    assert len(select(scores, count=4, group_size=2)) == 3, "no half groups"
    assert set(select(scores, count=3, group_size=2, exclude=[(1, 1)])) == {(1, 3), (0, 2), (0, 3)}


@given(seed=st.integers(0, 10**6), total=st.integers(0, 12), cap=st.integers(0, 4))
def test_choosing_in_batches_is_choosing_one_by_one(seed, total, cap):
    scores, fits = drawn(seed, 3, 4), drawn(seed + 1, 3, 4) > 0.4
    one_by_one: list = []
    for head in ranking(scores):
        fitting = sum(layer == head[0] for layer, _ in one_by_one) < cap and fits[head]
        if len(one_by_one) < total and fitting:
            one_by_one.append(head)
    choose = Chooser(scores, count=total, max_per_layer=cap)
    while proposed := choose.propose():
        for unit in proposed:
            if fits[unit[0]]:
                choose.accept(unit)
    assert set(choose.accepted) == set(one_by_one)


@pytest.mark.parametrize(
    ("scores", "options", "error", "message"),
    [
        (SCORES, {"rate": -0.1}, InputError, "from 0 to 1"),
        (SCORES, {"rate": 1.0}, SelectionError, "6 heads must be chosen, and 5 of 6"),
        (SCORES, {}, InputError, "either rate or count"),
        (SCORES, {"count": -1}, InputError, "count must be at least 0, got -1"),
        (SCORES, {"match": [(0, 0)], "max_per_layer": 2}, InputError, "match sets the number"),
        (SCORES, {"match": [(0, 0), (0, 1), (0, 2)]}, SelectionError, "2 of 6"),
        (SCORES[0], {"count": 1}, InputError, "must be"),
        (ROWS, {"count": 4, "max_per_layer": 1}, SelectionError, "3 of 12"),
        (ROWS, {"count": 1, "exclude": [(3, 0), (0, 4)]}, InputError, "3 layers of 4 heads"),
        (ROWS, {"count": 1, "only": [(0, -1)]}, InputError, "count from 0"),
        (ROWS, {"rate": 0.5, "group_size": 3}, InputError, "KV groups of 3"),
    ],
)
def test_bad_requests_are_refused(scores, options, error, message):
    with pytest.raises(error, match=message):
        select(scores, **options)


def test_head_sets_and_layouts():
    heads = HeadSet([(1, 0), (0, 2)])
    assert heads.to_list() == [[0, 2], [1, 0]]
    assert HeadSet(heads.to_list()) == heads
    assert heads - HeadSet([(1, 0)]) | HeadSet([(3, 3)]) == HeadSet([(0, 2), (3, 3)])
    with pytest.raises(InputError, match="names each head once"):
        HeadSet([(0, 0), (0, 0)])
    layout = HeadLayout(6, 3, frozen=(1, 4))
    assert layout.slots == (0, 2, 3, 5, 1, 4)
    assert layout.kv_head == (0, 1, 1, 2, 0, 2)
    assert HeadLayout(4, 4, frozen=(0,)).kv_head == (0, 1, 2, 3)
    for wrong in ((2, 1), (4,)):
        with pytest.raises(InputError, match=r"must ascend within \[0, 4\)"):
            HeadLayout(4, 4, frozen=wrong)
