"""What holds for every fitter, Eq. (4) and the KL of Eq. (S.7) against dense sums, and the certificate of a fit."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import one_hot

from saf.errors import InputError
from saf.fit import (
    FITTERS,
    consistent_targets,
    fit_compact,
    fit_kl,
    fit_loss,
    fit_with_certificate,
    initial_parameters,
    marginals,
)
from saf.patterns import CompactPattern

# How far each fitter may stay above the minimum (nats per row), and its marginals from the targets (L1 per row).
ACCURACY = {"proportional": (1e-6, 1e-4), "adam": (2e-3, 0.05), "dense": (1e-10, 1e-9)}


def dense_marginals(pattern: Tensor) -> tuple[Tensor, Tensor]:
    """Column and diagonal sums of a dense pattern `[..., T, T]`."""
    diagonals = [pattern.diagonal(-d, -2, -1).sum(-1) for d in range(pattern.shape[-1])]
    return pattern.sum(-2), torch.stack(diagonals, -1)


def entropy(pattern: Tensor) -> Tensor:
    return -torch.xlogy(pattern, pattern).sum(-1).mean(-1)


def kl(target: Tensor, pattern: Tensor) -> Tensor:
    """Row-averaged KL(target || pattern) of dense patterns, nats, entry by entry."""
    return -torch.xlogy(target, pattern).nan_to_num(0.0).sum((-2, -1)) / target.shape[-1] - entropy(target)


def floored(weights: Tensor) -> Tensor:
    """Floor causal entries at 1e-9 and normalise the rows, as calibration does."""
    weights = weights.double().clamp(min=1e-9).tril()
    return weights / weights.sum(-1, keepdim=True)


def random_target(*heads: int, length: int, scale: float = 1.0, sequences: int = 1) -> Tensor:
    """The mean over sequences of softmax rows with a recency bias and normal logits of the given scale."""
    generator = torch.Generator().manual_seed(0)
    position = torch.arange(length)
    bias = -0.5 * (position[:, None] - position).clamp(min=0).double().log1p()
    logits = scale * torch.randn(sequences, *heads, length, length, dtype=torch.float64, generator=generator)
    return floored((logits + bias).masked_fill(position[:, None] < position, -torch.inf).softmax(-1).mean(0))


@pytest.mark.parametrize("length", [1, 2, 150])
def test_marginals_and_kl_are_dense_sums_in_every_gauge(length):
    target = random_target(2, 3, length=length)
    alpha, rho = torch.randn(2, 2, 3, length, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pattern, tilt = CompactPattern.from_parameters(alpha, rho), 3 * torch.arange(length)
    for actual, expected in zip(marginals(pattern), dense_marginals(pattern.dense()), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    etas, expected = dense_marginals(target), kl(target, pattern.dense())
    torch.testing.assert_close(fit_kl(pattern, *etas, entropy(target)), expected, rtol=0, atol=1e-10)
    tilted = CompactPattern.from_parameters(alpha + tilt, rho + tilt)
    rounded = [fit_kl(each, *(eta.float() for eta in etas), entropy(target)) for each in (pattern, tilted)]
    torch.testing.assert_close(*rounded, rtol=0, atol=1e-10)
    torch.testing.assert_close(rounded[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("length", "scale"), [(1, 0.5), (70, 0.5), (70, 3.0)])
def test_every_fitter_finds_the_optimum_and_its_marginals(length, scale):
    target = random_target(3, length=length, scale=scale, sequences=4)
    etas = dense_marginals(target)
    patterns = {fitter: fit_compact(*etas, fitter=fitter) for fitter in FITTERS}
    for fitter, pattern in patterns.items():
        nats, l1 = ACCURACY[fitter]
        assert (kl(target, pattern.dense()) - kl(target, patterns["dense"].dense())).abs().max() <= nats
        for fitted, eta in zip(marginals(pattern), etas, strict=True):
            assert (fitted - eta).abs().sum(-1).max() / length <= l1
            assert fitter == "adam" or (fitted / eta - 1).abs().max() <= 1e-4


@pytest.mark.parametrize("fitter", ["proportional", "dense"])
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), length=st.integers(2, 48), scale=st.floats(0.1, 3))
def test_a_planted_pattern_is_recovered_up_to_its_gauge(fitter, seed, length, scale):
    generator = torch.Generator().manual_seed(seed)
    planted = CompactPattern.from_parameters(*scale * torch.randn(2, length, dtype=torch.float64, generator=generator))
    options = {"tolerance": 1e-9, "max_sweeps": 5000} if fitter == "proportional" else {}
    fitted = fit_compact(*marginals(planted), fitter=fitter, **options)
    torch.testing.assert_close(fitted.dense(), planted.dense(), rtol=0, atol=1e-5)
    assert abs(fit_kl(fitted, *marginals(planted), entropy(planted.dense()))) < 1e-9


@pytest.mark.parametrize("length", [1, 7, 129])
@pytest.mark.parametrize("kind", ["self", "first", "previous", "random"])
def test_one_hot_rows_on_the_floor_converge(kind, length):
    """Attention of a single sequence at its sharpest: all of each row's mass on one key, the rest on the floor."""
    row = torch.arange(length)
    drawn = (torch.rand(length, generator=torch.Generator().manual_seed(0)) * (row + 1)).long()
    key = {"self": row, "first": 0 * row, "previous": (row - 1).clamp(min=0), "random": drawn}[kind]
    target = floored(one_hot(key, length))
    pattern, certificate = fit_with_certificate(*dense_marginals(target))
    assert bool(certificate.converged)
    assert int(certificate.sweeps) <= 60
    assert -1e-9 <= fit_kl(pattern, *dense_marginals(target), entropy(target)) < (5 if kind == "random" else 1e-4)


@pytest.mark.parametrize("fitter", list(FITTERS))
def test_results_are_canonical_float64_alike_in_every_batch_and_leave_targets_alone(fitter):
    assert fit_compact(torch.ones(0, 5), torch.ones(0, 5), fitter=fitter).shape == (0,)
    etas = [eta.float() for eta in dense_marginals(random_target(2, 3, length=50))]
    before, options = [eta.clone() for eta in etas], {"steps": 30} if fitter == "adam" else {}
    (pattern, certificate), (again, _) = (fit_with_certificate(*etas, fitter=fitter, **options) for _ in range(2))
    assert pattern.shape == certificate.sweeps.shape == certificate.l1.shape == (2, 3)
    assert pattern.alpha.dtype == pattern.rho.dtype == pattern.log_z.dtype == torch.float64
    torch.testing.assert_close(pattern.canonical().alpha, pattern.alpha, rtol=0, atol=1e-10)
    assert all(map(torch.equal, (*etas, pattern.alpha, pattern.rho), (*before, again.alpha, again.rho)))
    alone = fit_compact(etas[0][1, 2], etas[1][1, 2], fitter=fitter, **options)
    torch.testing.assert_close(alone.dense(), pattern[1, 2].dense(), rtol=0, atol=1e-9)


def test_steps_of_adam_are_those_on_the_dense_loss_from_the_papers_start():
    """Ten steps of torch.optim.Adam on Eq. (4) written with T x T logits and automatic gradients."""
    etas = dense_marginals(random_target(2, length=30))
    position = torch.arange(30)
    distance = position[:, None] - position
    alpha, rho = (x.requires_grad_() for x in initial_parameters(etas[1]))
    assert not alpha.any()
    torch.testing.assert_close(rho[0, 7], (etas[1][0, 7] / 23).log())
    assert initial_parameters(torch.tensor([1e-12]))[1] == torch.tensor(1e-9).log()
    optimizer = torch.optim.Adam([alpha, rho], lr=0.05)

    def logits():
        return alpha[:, None] + rho[:, distance.clamp(min=0)].masked_fill(distance < 0, -torch.inf)

    for _ in range(10):
        optimizer.zero_grad()
        fit_loss(alpha, rho, logits().logsumexp(-1), *etas).sum().backward()
        optimizer.step()
    pattern = fit_compact(*etas, fitter="adam", steps=10)
    torch.testing.assert_close(pattern.dense(), logits().softmax(-1).detach(), rtol=0, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*not yet fitted")
def test_a_certificate_has_the_residuals_of_the_dense_pattern_and_bounds_the_gap_of_the_loss():
    """Eq. (S.12)."""
    target = random_target(4, length=60, scale=2.0)
    etas = dense_marginals(target)
    best = fit_compact(*etas, fitter="dense")
    for sweeps in (1, 2, 4):
        pattern, certificate = fit_with_certificate(*etas, max_sweeps=sweeps, tolerance=1e-9)
        pairs = list(zip(dense_marginals(pattern.dense()), etas, strict=True))
        relative = torch.maximum(*((fitted / eta - 1).abs().amax(-1) for fitted, eta in pairs))
        l1 = sum((fitted - eta).abs().sum(-1) for fitted, eta in pairs) / 60
        torch.testing.assert_close(certificate.max_relative, relative, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(certificate.l1, l1, rtol=1e-6, atol=1e-12)
        assert certificate.sweeps.tolist() == [sweeps] * 4
        assert not certificate.converged.any()
        distance = torch.maximum((pattern.alpha - best.alpha).abs(), (pattern.rho - best.rho).abs()).max()
        gap = kl(target, pattern.dense()) - kl(target, best.dense())
        assert ((gap > 0) & (gap <= distance * certificate.l1)).all()


def test_stopping_short_warns():
    etas = dense_marginals(random_target(3, length=50))
    with pytest.warns(UserWarning, match="3 of 3 patterns were not yet fitted"):
        fit_compact(*etas, max_sweeps=3, tolerance=1e-9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_compact(*etas)
        fit_compact(*etas, fitter="adam", steps=5)


def test_heads_of_a_trained_model_reach_their_reference(real_heads):
    """Low and high variance, and the two heads of the model that compact patterns fit worst."""
    target = [real_heads[name] for name in ("eta_abs", "eta_rel", "mean_row_entropy")]
    pattern, certificate = fit_with_certificate(*target[:2])
    assert (fit_kl(pattern, *target) - real_heads["reference_fit_kl"]).max() < 1e-5
    assert bool(certificate.converged.all())
    assert pattern.level().log_z.abs().max() < 30


def test_checked_targets_satisfy_all_three_relations_exactly():
    exact = dense_marginals(random_target(4, length=200))
    eta_abs, eta_rel = consistent_targets(exact[0].float() * 1.0003, exact[1].float())
    moments = ((eta_abs + eta_rel) * torch.arange(200)).sum(-1)
    for values, total in ((eta_abs.sum(-1), 200), (eta_rel.sum(-1), 200), (moments, 200 * 199 / 2)):
        torch.testing.assert_close(values, torch.full((4,), float(total)).double(), rtol=1e-13, atol=0)
    torch.testing.assert_close(eta_abs, exact[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda a, r: (a[:, :-1], r), {}, "share one shape"),
        (lambda a, r: (a * torch.nan, r), {}, "eta_abs must be finite and positive"),
        (lambda a, r: (a, r * 0), {}, "eta_rel must be finite and positive"),
        (lambda a, r: (a * 1.01, r), {}, "eta_abs sums to T = 30; got 30.3"),
        (lambda a, r: (r, r), {}, r"T\(T-1\)/2 = 435; got"),
        (lambda a, r: (a, r), {"steps": 5}, "takes tolerance, max_sweeps; got steps"),
        (lambda a, r: (a, r), {"fitter": "adam", "tolerance": 1.0}, "takes steps; got tolerance"),
        (lambda a, r: (a, r), {"fitter": "adam", "steps": 0}, "steps must be at least 1"),
    ],
)
def test_marginals_that_no_pattern_has_and_unknown_options_are_refused(change, options, message):
    etas = dense_marginals(random_target(2, length=30))
    with pytest.raises(InputError, match=message):
        fit_compact(*change(*etas), **options)
    with pytest.raises(InputError, match="expected a pattern"):  # shapes that would broadcast
        fit_kl(CompactPattern.from_parameters(*etas), *etas, torch.ones(1))
