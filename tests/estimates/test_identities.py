"""Why the means are the patterns to take: the identities of the paper's appendix B, Eqs. (13) to (16)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.analyses.geometry import pattern_distances
from saf.calibration.layer import measure_layer
from saf.targets import TARGETS, dense_pattern


def logits_of(seed: int, count: int, length: int) -> torch.Tensor:
    drawn = torch.randn(count, length, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (2 * drawn).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)


def kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return KL(first || second) of every row."""
    return (torch.xlogy(first, first) - torch.xlogy(first, second)).sum(-1)


def risk(patterns: torch.Tensor, fixed: torch.Tensor) -> torch.Tensor:
    """Eq. (13) over the patterns as the whole population."""
    return (patterns - fixed).square().sum((1, 2)).mean() / fixed.shape[-1] ** 2


@given(seed=st.integers(0, 10**6), count=st.integers(1, 7), length=st.integers(1, 12))
def test_bias_and_variance_add_up(seed, count, length):
    patterns = logits_of(seed, count, length).softmax(-1)
    fixed = logits_of(seed + 1, 1, length)[0].softmax(-1)
    mean = patterns.mean(0)
    expected = risk(patterns, mean) + (fixed - mean).square().sum() / length**2
    torch.testing.assert_close(risk(patterns, fixed), expected, rtol=1e-10, atol=1e-14)
    assert risk(patterns, mean) <= risk(patterns, fixed) + 1e-15


@given(seed=st.integers(0, 10**6), count=st.integers(2, 6), length=st.integers(2, 12))
def test_the_variance_score_estimates_what_the_mean_leaves(seed, count, length):
    generator = torch.Generator().manual_seed(seed)
    query, key = 2 * torch.randn(2, count, 1, length, 4, generator=generator, dtype=torch.float64)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    patterns = (query @ key.mT / 2).masked_fill(future, -torch.inf).softmax(-1)[:, 0]
    found = measure_layer(query, key, kv_head=[0])
    unbiased = count / (count - 1) * risk(patterns, patterns.mean(0)).item()
    assert found.variance.item() == pytest.approx(unbiased, rel=1e-10)
    assert found.forward_kl.item() == pytest.approx(kl(patterns, patterns.mean(0)).mean().item(), rel=1e-9, abs=1e-15)


@given(seed=st.integers(0, 10**6), count=st.integers(1, 7), length=st.integers(1, 12))
def test_the_mean_is_the_forward_kl_barycentre(seed, count, length):
    patterns = logits_of(seed, count, length).softmax(-1)
    fixed = logits_of(seed + 1, 1, length)[0].softmax(-1)
    mean = patterns.mean(0)
    excess = kl(patterns, fixed).mean(0) - kl(patterns, mean).mean(0)
    torch.testing.assert_close(excess, kl(mean, fixed), rtol=1e-9, atol=1e-12)


@given(seed=st.integers(0, 10**6), count=st.integers(1, 7), length=st.integers(1, 12))
def test_the_sharp_mean_is_the_reverse_kl_barycentre(seed, count, length):
    logits = logits_of(seed, count, length)
    patterns = logits.softmax(-1)
    fixed = logits_of(seed + 1, 1, length)[0].softmax(-1)
    sharp = logits.mean(0).softmax(-1)
    geometric = patterns.log().mean(0).exp()
    torch.testing.assert_close(sharp, geometric / geometric.sum(-1, keepdim=True), rtol=1e-10, atol=1e-15)
    excess = kl(fixed, patterns).mean(0) - kl(sharp, patterns).mean(0)
    torch.testing.assert_close(excess, kl(fixed, sharp), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", TARGETS)
def test_the_identities_hold_for_every_pattern(make_logits, make_statistics, heads, name):
    """What a pattern costs beyond the best fixed one is its distance from that one: Eqs. (14), (15) and (16)."""
    logits = make_logits()
    found, patterns = make_statistics(logits), logits.softmax(-1)
    fixed = dense_pattern(found, heads, name, dtype=torch.float64)
    mean, sharp = (dense_pattern(found, heads, each, dtype=torch.float64).weights for each in ("mean", "sharp_mean"))
    squared = pattern_distances(mean, fixed)["squared_error"]
    for number, matrix in enumerate(fixed.weights):
        each = patterns[number]
        excess = risk(each, matrix) - risk(each, mean[number])
        assert excess.item() == pytest.approx(squared[number].item(), rel=1e-9, abs=1e-15)
        forward = kl(each, matrix).mean(0) - kl(each, mean[number]).mean(0)
        torch.testing.assert_close(forward, kl(mean[number], matrix), rtol=1e-8, atol=1e-11)
        reverse = kl(matrix, each).mean(0) - kl(sharp[number], each).mean(0)
        torch.testing.assert_close(reverse, kl(matrix, sharp[number]), rtol=1e-8, atol=1e-11)
