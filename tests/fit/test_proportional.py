import numpy as np
import pytest
import torch

from saf.fit import fit_compact, fit_kl, fit_with_certificate, marginals


@pytest.mark.parametrize("memory", [0, 3])
def test_sweeps_with_and_without_extrapolation_reach_one_optimum(make_target, memory):
    target = make_target(6, length=150, scale=2.0)
    best = fit_compact(target.eta_abs, target.eta_rel, tolerance=1e-10, max_sweeps=5000, memory=0)
    pattern, certificate = fit_with_certificate(
        target.eta_abs, target.eta_rel, tolerance=1e-6, max_sweeps=2000, memory=memory
    )
    assert bool(certificate.converged.all())
    torch.testing.assert_close(pattern.dense(), best.dense(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("constant_after", [0, 8])
def test_constant_tail_is_the_optimum_of_the_constrained_fit(make_target, constant_after):
    target = make_target(3, length=64, scale=1.0, sequences=4)
    options = {"alpha_constant_after": constant_after}
    pattern, certificate = fit_with_certificate(target.eta_abs, target.eta_rel, tolerance=1e-7, **options)
    best = fit_compact(target.eta_abs, target.eta_rel, fitter="dense", **options)
    assert bool(certificate.converged.all())
    assert torch.equal(pattern.alpha[:, constant_after:], pattern.alpha[:, -1:].expand(-1, 64 - constant_after))
    torch.testing.assert_close(pattern.dense(), best.dense(), rtol=0, atol=1e-6)
    by_key, by_distance = marginals(pattern)
    torch.testing.assert_close(by_distance, target.eta_rel, rtol=1e-6, atol=0)
    torch.testing.assert_close(by_key[:, :constant_after], target.eta_abs[:, :constant_after], rtol=1e-6, atol=0)
    free = fit_compact(target.eta_abs, target.eta_rel)
    assert (target.kl(pattern.dense()) > target.kl(free.dense())).all()


def test_heads_of_a_trained_model_reach_their_reference(real_heads):
    """Low and high variance, and the two heads of the model that compact patterns fit worst."""
    target = [real_heads[name] for name in ("eta_abs", "eta_rel", "mean_row_entropy")]
    pattern, certificate = fit_with_certificate(*target[:2])
    assert (fit_kl(pattern, *target) - real_heads["reference_fit_kl"]).max() < 1e-5
    assert bool(certificate.converged.all())


def test_all_heads_of_a_trained_model_reach_their_reference(shared):
    """144 heads of a 124M RoPE decoder at 4,096 positions, some of them noisy, some with ripple."""
    with np.load(shared / "data" / "patterns" / "rope-124m-4k.npz", allow_pickle=False) as arrays:
        eta_abs, eta_rel, entropy, reference = (
            torch.from_numpy(arrays[name]) for name in ("eta_abs", "eta_rel", "mean_row_entropy", "reference_fit_kl")
        )
    pattern, certificate = fit_with_certificate(eta_abs, eta_rel)
    excess = fit_kl(pattern, eta_abs, eta_rel, entropy) - reference
    assert excess.max() < 1e-5
    assert bool(certificate.converged.all())
    assert certificate.sweeps.max() <= 25
    assert certificate.sweeps.double().mean() <= 12
    assert pattern.balanced().log_z.abs().max() < 30
