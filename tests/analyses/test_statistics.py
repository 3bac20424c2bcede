"""Rank statistics against direct computations in float64."""

import math

import numpy as np
import pytest
import torch

from experiments.analyses.common import partial_spearman, spearman, stratified_spearman


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
    assert math.isnan(spearman(torch.tensor([1.0, torch.nan]), torch.ones(2)))


def test_stratified_is_the_mean_of_equal_strata_and_ignores_differences_between_them(generator):
    strata = [tuple(torch.randn(2, 5, generator=generator)) for _ in range(4)]
    mean = np.mean([spearman(*pair) for pair in strata])
    assert stratified_spearman(strata) == pytest.approx(mean)
    shifted = [(x + 100 * k, y - 50 * k) for k, (x, y) in enumerate(strata)]
    assert stratified_spearman(shifted) == pytest.approx(mean)


@pytest.mark.parametrize("covariates", [0, 1, 2])
def test_partial_spearman_is_the_correlation_of_residuals(rng, covariates):
    values = rng.normal(size=(2 + covariates, 5, 6))
    values[1] += values[0]
    values[0, 2, 3] = np.nan
    found = partial_spearman(*map(torch.tensor, values[:2]), covariates=[torch.tensor(v) for v in values[2:]])
    kept = ~np.isnan(values[0])
    ranked = [ranks(v[kept]) for v in values]
    at = np.repeat(np.arange(5), 6)[kept.flatten()]
    design = np.stack([*((at == layer).astype(float) for layer in range(5)), *ranked[2:]], axis=1)
    inverse = np.linalg.inv(design.T @ design)
    residuals = [r - design @ (inverse @ (design.T @ r)) for r in ranked[:2]]
    assert found == pytest.approx(pearson(*residuals), abs=1e-10)


def test_nothing_is_left_when_the_covariate_explains_all(rng):
    values = torch.tensor(rng.normal(size=(3, 4)))
    assert math.isnan(partial_spearman(values, values.flip(0), covariates=[values]))
