"""Rank statistics against direct computations in float64."""

import math

import numpy as np
import pytest
import torch

from saf.analysis.correlation import partial_spearman, spearman, stratified_spearman
from saf.analysis.stability import selection_stability
from saf.errors import InputError
from saf.heads import HeadSet


def ranks(values):
    values = np.asarray(values, dtype=float)
    return np.array([(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values])


def pearson(x, y):
    x, y = x - x.mean(), y - y.mean()
    return (x @ y) / math.sqrt((x @ x) * (y @ y))


def test_spearman_with_ties_and_missing_values():
    x = torch.tensor([[3.0, 1.0, 1.0], [torch.nan, 9.0, 2.0]])
    y = torch.tensor([[1.0, 4.0, 0.0], [5.0, 8.0, torch.nan]])
    assert spearman(x, y) == pytest.approx(pearson(ranks([3, 1, 1, 9]), ranks([1, 4, 0, 8])))
    assert math.isnan(spearman(torch.ones(4), torch.arange(4.0)))
    with pytest.raises(InputError, match="at least two"):
        spearman(torch.tensor([1.0, torch.nan]), torch.ones(2))
    with pytest.raises(InputError, match="one shape"):
        spearman(torch.ones(2), torch.ones(3))


def test_stratified_is_the_mean_of_equal_strata_and_ignores_what_differs_between_them(generator):
    strata = [tuple(torch.randn(2, 5, generator=generator)) for _ in range(4)]
    mean = np.mean([spearman(*pair) for pair in strata])
    assert stratified_spearman(strata) == pytest.approx(mean)
    shifted = [(x + 100 * k, y - 50 * k) for k, (x, y) in enumerate(strata)]
    assert stratified_spearman(shifted) == pytest.approx(mean)


@pytest.mark.parametrize("layers", [True, False])
@pytest.mark.parametrize("covariates", [0, 1, 2])
def test_partial_spearman_is_the_correlation_of_residuals(rng, layers, covariates):
    values = rng.normal(size=(2 + covariates, 5, 6))
    values[1] += values[0]
    values[0, 2, 3] = np.nan
    found = partial_spearman(
        *map(torch.tensor, values[:2]), layers=layers, covariates=[torch.tensor(v) for v in values[2:]]
    )
    kept = ~np.isnan(values[0])
    ranked = [ranks(v[kept]) for v in values]
    at = np.repeat(np.arange(5), 6)[kept.flatten()]
    columns = [np.ones(len(at))] + ([(at == layer).astype(float) for layer in range(1, 5)] if layers else [])
    design = np.stack(columns + ranked[2:], axis=1)
    inverse = np.linalg.inv(design.T @ design)
    residuals = [r - design @ (inverse @ (design.T @ r)) for r in ranked[:2]]
    assert found == pytest.approx(pearson(*residuals), abs=1e-10)


def test_nothing_is_left_when_the_covariate_explains_all():
    values = torch.arange(12.0).view(3, 4)
    assert math.isnan(partial_spearman(values, values.flip(0), layers=False, covariates=[values]))
    with pytest.raises(InputError, match="one shape"):
        partial_spearman(values, values, covariates=[torch.ones(3)])


def test_stability_against_random_sets(rng):
    first, second = HeadSet([(0, 0), (0, 1), (0, 2), (2, 5)]), HeadSet([(0, 1), (0, 2), (1, 0), (2, 4)])
    scores = tuple(torch.tensor(rng.normal(size=(2, 3, 6))))
    found = selection_stability(first, second, num_heads=6, scores=scores)
    assert (found.first, found.second, found.overlap) == (4, 4, 2)
    assert found.expected == pytest.approx(3 * 2 / 6 + 1 / 6)
    assert found.rank_correlation == pytest.approx(spearman(*scores))
    drawn = [
        sum(len({*rng.permutation(6)[:a]} & {*rng.permutation(6)[:b]}) for a, b in ((3, 2), (1, 1)))
        for _ in range(4000)
    ]
    assert np.mean(drawn) == pytest.approx(found.expected, abs=0.05)
    assert np.std(drawn) == pytest.approx(found.standard_deviation, abs=0.05)
    with pytest.raises(InputError, match="6 heads"):
        selection_stability(HeadSet([(0, 6)]), second, num_heads=6)
