"""Eq. (4), its gradient and the KL of Eq. (S.7), against dense sums."""

import pytest
import torch

from saf.errors import InputError
from saf.fit import check_targets, fit_kl, fit_loss, marginals
from saf.fit.fitters import initial_parameters
from saf.patterns import CompactPattern
from tests.fit.dense_target import DenseTarget, random_target


def random_compact(*shape):
    parameters = torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return CompactPattern.from_parameters(*parameters)


@pytest.mark.parametrize("length", [1, 2, 150])
def test_marginals_and_kl_are_dense_sums_in_every_gauge(length):
    target, pattern = random_target(2, 3, length=length), random_compact(2, 3, length)
    dense = DenseTarget(pattern.dense())
    for actual, expected in zip(marginals(pattern), (dense.eta_abs, dense.eta_rel), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    etas = target.eta_abs, target.eta_rel
    expected = target.kl(dense.pattern)
    torch.testing.assert_close(fit_kl(pattern, *etas, target.row_entropy), expected, rtol=0, atol=1e-10)
    tilt = 3 * torch.arange(length)
    tilted = CompactPattern.from_parameters(pattern.alpha + tilt, pattern.rho + tilt)
    rounded = [fit_kl(each, *(eta.float() for eta in etas), target.row_entropy) for each in (pattern, tilted)]
    torch.testing.assert_close(*rounded, rtol=0, atol=1e-10)
    torch.testing.assert_close(rounded[0], expected, rtol=0, atol=1e-6)


def test_gradient_of_the_loss_is_the_marginal_residual():
    """Eq. (20)."""
    target = random_target(length=20)
    alpha, rho = (torch.randn(20, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    alpha.requires_grad_()
    rho.requires_grad_()
    position = torch.arange(20)
    distance = position[:, None] - position
    logits = (alpha + rho[distance.clamp(min=0)]).masked_fill(distance < 0, -torch.inf)
    fit_loss(alpha, rho, logits.logsumexp(-1), target.eta_abs, target.eta_rel).backward()
    fitted = marginals(CompactPattern.from_parameters(alpha.detach(), rho.detach()))
    torch.testing.assert_close(alpha.grad, (fitted[0] - target.eta_abs) / 20)
    torch.testing.assert_close(rho.grad, (fitted[1] - target.eta_rel) / 20)


def test_fits_start_where_the_paper_says():
    alpha, rho = initial_parameters(torch.tensor([2.0, 0.9, 1e-12], dtype=torch.float64))
    assert alpha.tolist() == [0, 0, 0]
    torch.testing.assert_close(rho, torch.tensor([2 / 3, 0.45, 1e-9], dtype=torch.float64).log())


def test_checked_targets_satisfy_all_three_relations_exactly():
    target = random_target(4, length=200)
    eta_abs, eta_rel = check_targets(target.eta_abs.float() * 1.0003, target.eta_rel.float())
    for eta in (eta_abs, eta_rel):
        torch.testing.assert_close(eta.sum(-1), torch.full((4,), 200.0).double(), rtol=1e-13, atol=0)
    moments = ((eta_abs + eta_rel) * torch.arange(200)).sum(-1)
    torch.testing.assert_close(moments, torch.full((4,), 200 * 199 / 2).double(), rtol=1e-13, atol=0)
    torch.testing.assert_close(eta_abs, target.eta_abs, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, r: (a[:, :-1], r), "share one shape"),
        (lambda a, r: (a * torch.nan, r), "eta_abs must be finite and positive"),
        (lambda a, r: (a, r * 0), "eta_rel must be finite and positive"),
        (lambda a, r: (a * 1.01, r), "eta_abs sums to T = 30; got 30.3"),
        (lambda a, r: (r, r), r"T\(T-1\)/2 = 435; got"),
    ],
)
def test_marginals_that_no_pattern_has_are_refused(change, message):
    target = random_target(2, length=30)
    with pytest.raises(InputError, match=message):
        check_targets(*change(target.eta_abs, target.eta_rel))
    with pytest.raises(InputError, match=r"row entropy \[\.\.\.\]"):
        fit_kl(random_compact(2, 30), target.eta_abs, target.eta_rel, target.row_entropy[:1])
