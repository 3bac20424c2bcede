import torch

from saf.fit import fit_compact, fit_with_certificate
from saf.fit.objective import certify, fit_loss, meaningful


def loss(pattern, target):
    return fit_loss(pattern.alpha, pattern.rho, pattern.log_z, target.eta_abs, target.eta_rel)


def test_residuals_are_those_of_the_dense_pattern(make_target):
    target = make_target(3, length=50)
    pattern, certificate = fit_with_certificate(target.eta_abs, target.eta_rel, max_sweeps=3, tolerance=1e-9)
    dense = pattern.dense()
    by_distance = torch.stack([dense.diagonal(-d, -2, -1).sum(-1) for d in range(50)], -1)
    by_key = dense.sum(-2)
    close = {"rtol": 1e-6, "atol": 1e-12}
    expected = (by_key / target.eta_abs - 1).abs().amax(-1)
    torch.testing.assert_close(certificate.max_relative_abs, expected, **close)
    expected = (by_distance / target.eta_rel - 1).abs().amax(-1)
    torch.testing.assert_close(certificate.max_relative_rel, expected, **close)
    l1 = ((by_key - target.eta_abs).abs().sum(-1) + (by_distance - target.eta_rel).abs().sum(-1)) / 50
    torch.testing.assert_close(certificate.l1, l1, **close)
    assert certificate.sweeps.tolist() == [3, 3, 3]
    assert not certificate.converged.any()
    assert certificate.max_relative.max() > 1e-9


def test_gap_bounds_the_true_gap_at_the_true_distance(make_target):
    target = make_target(4, length=60, scale=2.0)
    best = fit_compact(target.eta_abs, target.eta_rel, fitter="dense")
    for sweeps in (1, 2, 4):
        pattern, _ = fit_with_certificate(target.eta_abs, target.eta_rel, max_sweeps=sweeps, memory=0)
        distance = torch.maximum((pattern.alpha - best.alpha).abs(), (pattern.rho - best.rho).abs()).max().item()
        certificate = certify(pattern, target.eta_abs, target.eta_rel, sweeps=torch.full((4,), sweeps), radius=distance)
        gap = loss(pattern, target) - loss(best, target)
        assert (gap > 0).all()
        assert (gap <= certificate.gap).all()


def test_only_entries_above_the_floor_count():
    eta = torch.tensor([1.0, 2.9e-7, 1.9e-7, 1.1e-7], dtype=torch.float64)
    assert meaningful(eta).tolist() == [True, False, False, True]
