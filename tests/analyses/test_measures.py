"""Distances between patterns, attention profiles and rank statistics, against direct computations in float64."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from experiments.analyses.common import partial_spearman, spearman, stratified_spearman
from experiments.analyses.patterns import distance_and_cost, distances_from_mean, pattern_distances
from experiments.analyses.selections import PROFILES, attention_profiles, layer_matched
from saf.calibration import latter_half
from saf.heads import HeadSet
from saf.patterns import CompactPattern
from saf.surgery import install_
from tests.calibration.oracle import causal_patterns, queries_and_keys


def dense(generator, heads=2, length=7):
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    logits = 2 * torch.randn(heads, length, length, generator=generator, dtype=torch.float64)
    return logits.masked_fill(future, -torch.inf).softmax(-1)


def test_distances_entry_by_entry(generator):
    reference = dense(generator)
    pattern = CompactPattern.from_parameters(*torch.randn(2, 2, 7, generator=generator, dtype=torch.float64))
    found = pattern_distances(reference, pattern)
    for head in range(2):
        expected = dict.fromkeys(found, 0.0)
        for i, j in zip(*np.tril_indices(7), strict=True):
            p, q = reference[head, i, j].item(), pattern.dense()[head, i, j].item()
            expected["squared_error"] += (p - q) ** 2 / 49
            expected["kl"] += p * math.log(p / q) / 7
            expected["hellinger"] += (math.sqrt(p) - math.sqrt(q)) ** 2 / 14
            expected["total_variation"] += abs(p - q) / 14
        assert {name: values[head].item() for name, values in found.items()} == pytest.approx(expected, rel=1e-6)


def test_distance_and_cost_use_what_both_know():
    distances = {"0.25": {"mean": 0.0, "sharp": 2.0, "random": 3.0, "other": 1.0}, "0.5": {"mean": 0.0, "random": 1.0}}
    costs = {"0.25": {"mean": 0.6, "sharp": 0.5, "random": 9.0}, "0.5": {"mean": 1.0, "random": 2.0}}
    within, pooled = distance_and_cost(distances, costs)
    assert within == {"0.25": pytest.approx(0.5), "0.5": pytest.approx(1.0)}
    assert pooled == pytest.approx(np.corrcoef([-1.0, 0, 1, -0.5, 0.5], [0.0, -1, 1, -0.5, 0.5])[0, 1])


def test_distances_from_the_measured_mean(model, ids):
    """The sharp mean is written out from whole patterns."""
    heads = HeadSet([(0, 3), (1, 0), (2, 2)])
    found = distances_from_mean(model, [ids], heads, ["mean", "sharp_mean", "dirichlet"])
    assert all(values.abs().max() < 1e-6 for values in found["mean"].values())
    patterns = [causal_patterns(*layer) for layer in queries_and_keys(model, ids)]
    for number, (layer, head) in enumerate(heads):
        each = patterns[layer][:, head]
        # The logits' row constants cancel in the softmax of their mean.
        sharp = each.log().mean(0).softmax(-1)
        error = ((each.mean(0) - sharp) ** 2).sum().item() / 24**2
        assert found["sharp_mean"]["squared_error"][number].item() == pytest.approx(error, rel=1e-4)
    assert (found["dirichlet"]["kl"] > 0).all()


def test_profiles_are_those_of_the_patterns(model, ids):
    found = attention_profiles(model, ids.split(2), recent=5)
    patterns = [causal_patterns(*layer) for layer in queries_and_keys(model, ids)]
    rows = latter_half(24)
    for layer, pattern in enumerate(patterns):
        for head in range(4):
            expected = [0.0] * 4
            for matrix in pattern[:, head].tolist():
                for i in rows:
                    row = matrix[i][: i + 1]
                    expected[0] -= sum(p * math.log(p) for p in row if p > 0) / math.log(i + 1)
                    expected[1] += sum(row[max(0, i - 4) :])
                    expected[2] += max(row)
                    expected[3] += row[0]
            count = len(ids) * len(rows)
            for name, value in zip(PROFILES, expected, strict=True):
                assert found[name][layer, head].item() == pytest.approx(value / count, abs=1e-10), name


def test_frozen_heads_have_no_profile_and_live_ones_keep_their_place(model, ids):
    heads = HeadSet([(0, 1), (2, 0), (2, 3)])
    flat = torch.zeros(3, 24, dtype=torch.float64)
    install_(model, heads, CompactPattern.from_parameters(flat, flat), backend="reference")
    found = attention_profiles(model, [ids])["entropy"]
    assert HeadSet(map(tuple, found.isnan().nonzero().tolist())) == heads
    assert not found[1].isnan().any()
    assert not model.blocks[2].attention.live._forward_hooks


def test_unselected_heads_weigh_as_their_layers():
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, torch.nan], [7.0, 8.0, 9.0, 9.0]])
    chosen, others = layer_matched(values, HeadSet([(0, 0), (0, 1), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3)]))
    assert chosen == pytest.approx((1 + 2 + 30) / 3)
    assert others == pytest.approx((2 * 3.5 + 15) / 3)


def test_spearman_with_ties_and_missing_values():
    x = torch.tensor([[3.0, 1.0, 1.0], [torch.nan, 9.0, 2.0]])
    y = torch.tensor([[1.0, 4.0, 0.0], [5.0, 8.0, torch.nan]])
    assert spearman(x, y) == pytest.approx(stats.spearmanr([3, 1, 1, 9], [1, 4, 0, 8]).statistic)
    assert math.isnan(spearman(torch.ones(4), torch.arange(4.0)))


def test_stratified_is_the_mean_of_equal_strata_and_ignores_differences_between_them(generator):
    strata = [tuple(torch.randn(2, 5, generator=generator)) for _ in range(4)]
    mean = np.mean([spearman(*pair) for pair in strata])
    assert stratified_spearman(strata) == pytest.approx(mean)
    shifted = [(x + 100 * k, y - 50 * k) for k, (x, y) in enumerate(strata)]
    assert stratified_spearman(shifted) == pytest.approx(mean)


def test_partial_spearman_is_the_correlation_of_residuals(rng):
    values = rng.normal(size=(4, 5, 6))
    values[1] += values[0]
    values[0, 2, 3] = np.nan
    found = partial_spearman(*map(torch.tensor, values[:2]), covariates=[torch.tensor(v) for v in values[2:]])
    known = ~np.isnan(values[0])
    ranked = [stats.rankdata(v[known]) for v in values]
    at = np.repeat(np.arange(5), 6)[known.flatten()]
    design = np.stack([*((at == layer).astype(float) for layer in range(5)), *ranked[2:]], axis=1)
    inverse = np.linalg.inv(design.T @ design)
    residuals = [r - design @ (inverse @ (design.T @ r)) for r in ranked[:2]]
    assert found == pytest.approx(stats.pearsonr(*residuals).statistic, abs=1e-10)
