"""The distributions that sampled patterns are drawn from."""

import math

import pytest
import torch

from saf.targets import concentration, dense_pattern, dirichlet, exact_pattern, gaussian

DRAWS = 1000


def distance_from_normal(values: torch.Tensor) -> float:
    """Return the Kolmogorov-Smirnov distance of a sample from the standard normal distribution."""
    values = values.sort().values
    below = 0.5 * (1 + torch.erf(values / math.sqrt(2)))
    steps = torch.arange(len(values) + 1) / len(values)
    return torch.maximum((below - steps[:-1]).abs(), (steps[1:] - below).abs()).max().item()


def test_gaussian_logits_have_their_means_and_variances(make_logits, make_statistics, heads):
    found = make_statistics(make_logits(length=3))
    head = list(heads)[1]
    drawn = torch.stack([gaussian(found, [head], seed=seed)[0] for seed in range(DRAWS)])
    mean, variance = found.take("logit_mean", [head])[0], found.take("logit_variance", [head])[0]
    # Differences of log-probabilities within a row are differences of logits, each drawn by itself.
    for row, one, other in [(1, 0, 1), (2, 0, 1), (2, 1, 2)]:
        difference = drawn[:, row, one].log() - drawn[:, row, other].log()
        scale = (variance[row, one] + variance[row, other]).sqrt()
        # 1.95 / sqrt(n) is exceeded with probability 0.001.
        assert distance_from_normal((difference - (mean[row, one] - mean[row, other])) / scale) < 1.95 / DRAWS**0.5
    assert (drawn[:, 0, 0] == 1).all()


def test_dirichlet_rows_have_the_moments_of_eq_18(make_logits, make_statistics, heads):
    found = make_statistics(make_logits(count=8, length=5))
    head = list(heads)[2]
    mean, spread = found.take("mean", [head])[0], found.take("row_variance", [head])[0]
    strength = concentration(mean, spread)
    for scale in (1.0, 16.0):
        drawn = torch.stack([dirichlet(found, [head], seed=seed, scale=scale)[0] for seed in range(DRAWS)])
        for row in range(1, 5):
            rows, m, c = drawn[:, row, : row + 1], mean[row, : row + 1], scale * strength[row]
            covariance = (torch.diag(m) - torch.outer(m, m)) / (c + 1)
            error = 5 * (covariance.diag() / DRAWS).sqrt()
            assert ((rows.mean(0) - m).abs() < error).all()
            measured = rows.T.cov()
            assert ((measured - covariance).abs() < 0.2 * covariance.diag().max()).all()
    # The moment estimate matches the summed variance of the sequences.
    for row in range(1, 5):
        m = mean[row]
        assert ((m * (1 - m)).sum() / (strength[row] + 1)).item() == pytest.approx(spread[row].item(), rel=1e-10)


def test_a_larger_scale_stays_closer_to_the_mean(make_logits, make_statistics, heads):
    found = make_statistics(make_logits())
    mean = found.take("mean", heads)
    near, far = (
        (dense_pattern(found, heads, "dirichlet", dtype=torch.float64, scale=scale).weights - mean).square().sum()
        for scale in (64.0, 4.0)
    )
    assert near < far / 4
    default = dense_pattern(found, heads, "dirichlet", dtype=torch.float64).weights
    assert torch.equal(default, dense_pattern(found, heads, "dirichlet", dtype=torch.float64, scale=16.0).weights)


def test_concentrations_are_bounded(make_logits, make_statistics, heads):
    found = make_statistics(make_logits())
    mean = found.take("mean", heads)
    exact = dense_pattern(found, heads, "dirichlet", dtype=torch.float64, scale=1e30).weights
    assert 1e-5 < (exact - mean).abs().max() < 1e-2, "1e6 is the largest concentration"
    loose = dense_pattern(found, heads, "dirichlet", dtype=torch.float64, scale=1e-30).weights
    assert loose.isfinite().all()
    assert (loose.amax(-1) > 0.999).double().mean() > 0.9, "at 1e-2 nearly every row is one key"


def test_rows_that_are_nearly_deterministic_or_never_vary_are_their_mean(make_logits, make_statistics, heads):
    logits = make_logits(length=6)
    logits[:, :, 3, 1] = 16 + logits[:, :, 3].amax(-1)
    logits[:, :, 4] = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, -torch.inf])
    found = make_statistics(logits)
    drawn = dirichlet(found, heads)
    for row in (0, 3, 4):
        assert torch.equal(drawn[:, row], found.take("mean", heads)[:, row])
    assert not torch.equal(drawn[:, 5], found.take("mean", heads)[:, 5])


def test_structured_random_parameters_are_normal_and_a_prefix_for_shorter_inputs(make_logits, make_statistics, heads):
    long = exact_pattern(make_statistics(make_logits(length=40)), heads, "structured_random", seed=1)
    short = exact_pattern(make_statistics(make_logits(length=12)), heads, "structured_random", seed=1)
    assert torch.equal(long.alpha[:, :12], short.alpha)
    assert torch.equal(long.rho[:, :12], short.rho)
    patterns = [
        exact_pattern(make_statistics(make_logits(length=50)), heads, "structured_random", seed=s) for s in range(10)
    ]
    drawn = torch.cat([torch.stack([pattern.alpha, pattern.rho]).flatten() for pattern in patterns])
    assert len(drawn.unique()) == len(drawn) == 3000
    assert distance_from_normal(drawn) < 1.95 / 3000**0.5
