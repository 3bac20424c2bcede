"""What holds for every fitter, and the choice of one."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saf.errors import InputError
from saf.fit import FITTERS, fit_compact, fit_kl, fit_with_certificate, marginals
from saf.patterns import CompactPattern

# How far each fitter may stay above the minimum (nats per row), and its marginals from the targets (L1 per row).
ACCURACY = {"proportional": (1e-6, 1e-4), "dense": (1e-10, 1e-9), "adam": (2e-3, 0.05)}


@pytest.mark.parametrize("fitter", list(FITTERS))
@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_every_fitter_finds_the_optimum_and_its_marginals(make_target, fitter, length, scale):
    target = make_target(3, length=length, scale=scale, sequences=4)
    best = fit_compact(target.eta_abs, target.eta_rel, fitter="dense")
    pattern = fit_compact(target.eta_abs, target.eta_rel, fitter=fitter)
    nats, l1 = ACCURACY[fitter]
    kl, least = target.kl(pattern.dense()), target.kl(best.dense())
    assert (kl - least).abs().max() <= nats
    for fitted, eta in zip(marginals(pattern), (target.eta_abs, target.eta_rel), strict=True):
        assert (fitted - eta).abs().sum(-1).max() / length <= l1
        if fitter != "adam":
            assert (fitted / eta - 1).abs().max() <= 1e-4


@pytest.mark.parametrize("fitter", ["proportional", "dense"])
@given(seed=st.integers(0, 2**31), length=st.integers(2, 48), scale=st.floats(0.1, 3))
def test_a_planted_pattern_is_recovered_up_to_its_gauge(fitter, seed, length, scale):
    generator = torch.Generator().manual_seed(seed)
    parameters = scale * torch.randn(2, length, dtype=torch.float64, generator=generator)
    planted = CompactPattern.from_parameters(*parameters)
    options = {"tolerance": 1e-9, "max_sweeps": 5000} if fitter == "proportional" else {}
    fitted = fit_compact(*marginals(planted), fitter=fitter, **options)
    torch.testing.assert_close(fitted.dense(), planted.dense(), rtol=0, atol=1e-5)
    dense = planted.dense()
    entropy = -torch.xlogy(dense, dense).sum(-1).mean(-1)
    assert abs(fit_kl(fitted, *marginals(planted), entropy)) < 1e-9


@pytest.mark.parametrize("length", [1, 7, 40, 129])
@pytest.mark.parametrize("kind", ["self", "first", "previous", "random"])
def test_one_hot_rows_on_the_floor_converge(make_one_hot, kind, length):
    target = make_one_hot(kind, length)
    pattern, certificate = fit_with_certificate(target.eta_abs, target.eta_rel)
    assert bool(certificate.converged)
    assert int(certificate.sweeps) <= 60
    kl = fit_kl(pattern, target.eta_abs, target.eta_rel, target.row_entropy)
    assert kl >= -1e-9
    if kind != "random":
        assert kl < 1e-4
    elif length <= 40:
        best = fit_compact(target.eta_abs, target.eta_rel, fitter="dense")
        assert kl - fit_kl(best, target.eta_abs, target.eta_rel, target.row_entropy) < 2e-5


def test_result_is_canonical_float64_in_the_shape_of_the_targets(make_target):
    target = make_target(2, 3, length=20)
    for fitter in FITTERS:
        pattern, certificate = fit_with_certificate(target.eta_abs.float(), target.eta_rel.float(), fitter=fitter)
        assert pattern.shape == certificate.sweeps.shape == certificate.gap.shape == (2, 3)
        assert pattern.alpha.dtype == pattern.rho.dtype == pattern.log_z.dtype == torch.float64
        torch.testing.assert_close(pattern.canonical().alpha, pattern.alpha, rtol=0, atol=1e-10)
        assert not pattern.alpha.requires_grad


@pytest.mark.parametrize("fitter", list(FITTERS))
def test_same_result_twice_in_any_batch_and_of_none(make_target, fitter):
    assert fit_compact(torch.ones(0, 5), torch.ones(0, 5), fitter=fitter).shape == (0,)
    target = make_target(5, length=50)
    etas = target.eta_abs, target.eta_rel
    before, options = [eta.clone() for eta in etas], {"steps": 30} if fitter == "adam" else {}
    pattern, again = (fit_compact(*etas, fitter=fitter, **options) for _ in range(2))
    assert all(map(torch.equal, etas, before))
    assert torch.equal(pattern.alpha, again.alpha)
    assert torch.equal(pattern.rho, again.rho)
    alone = fit_compact(target.eta_abs[3], target.eta_rel[3], fitter=fitter, **options)
    torch.testing.assert_close(alone.dense(), pattern[3].dense(), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fitter": "fft"}, "one of proportional, adam, dense, got 'fft'"),
        ({"steps": 5}, "takes tolerance, max_sweeps, memory, alpha_constant_after; got steps"),
        ({"fitter": "adam", "tolerance": 1.0}, "takes steps, learning_rate; got tolerance"),
        ({"fitter": "adam", "steps": 0}, "steps must be at least 1"),
        ({"alpha_constant_after": 5}, r"\[0, T/4\), T = 20; got 5"),
        ({"alpha_constant_after": -1}, r"\[0, T/4\)"),
    ],
)
def test_unknown_fitters_and_options_are_refused(make_target, options, message):
    target = make_target(length=20)
    with pytest.raises(InputError, match=message):
        fit_compact(target.eta_abs, target.eta_rel, **options)


def test_stopping_short_warns(make_target):
    target = make_target(2, length=40)
    with pytest.warns(UserWarning, match="2 of 2 fits stopped before"):
        fit_compact(target.eta_abs, target.eta_rel, max_sweeps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_compact(target.eta_abs, target.eta_rel)
        fit_compact(target.eta_abs, target.eta_rel, fitter="adam")
