import pytest
import torch

from saf.errors import InputError
from saf.fit.objective import check_targets, fit_kl, fit_loss, initial_parameters, marginals
from saf.patterns import CompactPattern


def random_compact(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    parameters = torch.randn(2, *shape, dtype=torch.float64, generator=generator)
    return CompactPattern.from_parameters(*parameters)


@pytest.mark.parametrize("length", [1, 2, 150])
def test_kl_from_marginals_is_the_dense_kl(make_target, length):
    target, pattern = make_target(2, 3, length=length), random_compact(2, 3, length)
    kl = fit_kl(pattern, target.eta_abs, target.eta_rel, target.row_entropy)
    torch.testing.assert_close(kl, target.kl(pattern.dense()), rtol=0, atol=1e-10)


@pytest.mark.parametrize("length", [1, 2, 150])
def test_marginals_are_dense_sums(length):
    pattern = random_compact(3, length)
    by_key, by_distance = marginals(pattern)
    dense = pattern.dense()
    diagonals = torch.stack([dense.diagonal(-d, -2, -1).sum(-1) for d in range(length)], -1)
    torch.testing.assert_close(by_key, dense.sum(-2), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(by_distance, diagonals, rtol=1e-12, atol=1e-12)


def test_kl_does_not_depend_on_the_gauge_even_for_rounded_marginals(make_target):
    target, pattern = make_target(length=100), random_compact(100)
    position = torch.arange(100)
    tilted = CompactPattern.from_parameters(pattern.alpha + 3 * position, pattern.rho + 3 * position)
    etas = target.eta_abs.float(), target.eta_rel.float()
    kl = [fit_kl(each, *etas, target.row_entropy) for each in (pattern, tilted)]
    assert abs(kl[0] - kl[1]) < 1e-10
    assert abs(kl[0] - fit_kl(pattern, target.eta_abs, target.eta_rel, target.row_entropy)) < 1e-6


def test_gradient_of_the_loss_is_the_marginal_residual(make_target):
    target = make_target(length=20)
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


def test_start_is_the_papers():
    alpha, rho = initial_parameters(torch.tensor([2.0, 0.9, 1e-12], dtype=torch.float64))
    assert alpha.tolist() == [0, 0, 0]
    expected = torch.tensor([2 / 3, 0.45, 1e-9], dtype=torch.float64).log()
    torch.testing.assert_close(rho, expected)


def test_checked_targets_satisfy_all_three_relations_exactly(make_target):
    target = make_target(4, length=200)
    position = torch.arange(200)
    eta_abs, eta_rel = check_targets(target.eta_abs.float() * 1.0003, target.eta_rel.float())
    assert eta_abs.dtype == torch.float64
    for eta in (eta_abs, eta_rel):
        torch.testing.assert_close(eta.sum(-1), torch.full((4,), 200.0).double(), rtol=1e-13, atol=0)
    moments = ((eta_abs + eta_rel) * position).sum(-1)
    torch.testing.assert_close(moments, torch.full((4,), 200 * 199 / 2).double(), rtol=1e-13, atol=0)
    torch.testing.assert_close(eta_abs, target.eta_abs, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, r: (a[:, :-1], r), "share one shape"),
        (lambda a, r: (a * torch.nan, r), "eta_abs must be finite and positive"),
        (lambda a, r: (a, r * 0), "eta_rel must be finite and positive"),
        (lambda a, r: (a * 1.01, r), "eta_abs sums to T = 30; got 30.3"),
        (lambda a, r: (a, r / 30), "eta_rel sums to T = 30; got 1"),
        (lambda a, r: (r, r), r"T\(T-1\)/2 = 435; got"),
    ],
)
def test_marginals_that_no_pattern_has_are_refused(make_target, change, message):
    target = make_target(2, length=30)
    with pytest.raises(InputError, match=message):
        check_targets(*change(target.eta_abs, target.eta_rel))


def test_kl_refuses_shapes_that_do_not_belong_together(make_target):
    target, pattern = make_target(2, length=30), random_compact(2, 30)
    with pytest.raises(InputError, match=r"row entropy \[\.\.\.\]"):
        fit_kl(pattern, target.eta_abs, target.eta_rel, target.row_entropy[:1])
    with pytest.raises(InputError, match=r"row entropy \[\.\.\.\]"):
        fit_kl(pattern[0], target.eta_abs, target.eta_rel, target.row_entropy)
