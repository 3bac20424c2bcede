"""Sums in the log domain equal dense ones, for any range of values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saf.log_sums import log_causal_convolution, log_column_sums, log_diagonal_sums, log_row_sums
from tests.patterns.test_patterns import normal


def all_terms(log_row, alpha, rho):
    """Return every `log_row_i + alpha_j + rho_{i-j}` as `[..., T, T]`, -inf above the diagonal."""
    position = torch.arange(alpha.shape[-1])
    distance = position[:, None] - position
    terms = log_row[..., :, None] + alpha[..., None, :] + rho[..., distance.clamp(min=0)]
    return terms.masked_fill(distance < 0, -torch.inf)


@pytest.mark.parametrize("length", [1, 63, 129, 300])
def test_row_column_and_diagonal_sums_equal_dense_sums(length):
    log_row, alpha, rho = (normal(2, 3, length, scale=3.0, seed=seed) for seed in range(3))
    terms = all_terms(log_row, alpha, rho)
    by_distance = torch.stack([terms.diagonal(-d, -2, -1).logsumexp(-1) for d in range(length)], -1)
    rows = log_row_sums(alpha, rho) + log_row
    columns = log_column_sums(log_row, rho) + alpha
    diagonals = log_diagonal_sums(log_row, alpha) + rho
    for sums, exact in ((rows, terms.logsumexp(-1)), (columns, terms.logsumexp(-2)), (diagonals, by_distance)):
        torch.testing.assert_close(sums, exact, rtol=0, atol=1e-12)


POSITION = torch.arange(4096, dtype=torch.float64)
NOISE = normal(4096, scale=0.1)
EXTREMES = {
    "sink +25": (25 * (POSITION == 0), NOISE),
    "sink -25": (-25 * (POSITION == 0), NOISE),
    "small early Z": (-20 * (POSITION < 100), NOISE),
    "local": (0 * POSITION, -POSITION / 4),
    "rising": (0 * POSITION, POSITION / 4),
    "steep": (5 * POSITION, -3 * POSITION),
}
"""`alpha` and `rho` that span up to 1,000 nats."""


@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_patterns_keep_every_row(name):
    alpha, rho = (x.double() for x in EXTREMES[name])
    log_z = log_row_sums(alpha, rho)
    for row in [0, 1, 99, 100, 127, 128, 1000, 2048, 4095]:
        expected = (alpha[: row + 1] + rho[: row + 1].flip(0)).logsumexp(0)
        assert abs(log_z[row] - expected) <= 1e-12 * max(1, abs(log_z[row]))
    # Each row's probabilities sum to one over keys and over distances, so both marginals sum to T.
    for marginal in (log_column_sums(-log_z, rho) + alpha, log_diagonal_sums(-log_z, alpha) + rho):
        assert abs(marginal.exp().sum() / 4096 - 1) < 1e-9


@given(length=st.integers(1, 40), block=st.integers(1, 50), scale=st.floats(0, 2000), seed=st.integers(0, 2**31))
def test_convolutions_are_exact_for_any_range_and_block(length, block, scale, seed):
    left, right = (normal(2, length, scale=scale, seed=seed + k) for k in range(2))
    sums = log_causal_convolution(left, right, block=block)
    exact = all_terms(torch.zeros_like(left), left, right).logsumexp(-1)
    torch.testing.assert_close(sums, exact, rtol=1e-13, atol=1e-12)
