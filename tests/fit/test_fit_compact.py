"""What holds for every fitter, Eq. (4) and the KL of Eq. (S.7) against dense sums, and the certificate of a fit."""

import warnings
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import one_hot

from saf.errors import InputError
from saf.fit import (
    FITTERS,
    check_targets,
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


@dataclass
class DenseTarget:
    """A dense pattern `[..., T, T]` with its marginals and row-averaged entropy, summed without any tile."""

    pattern: Tensor

    @property
    def eta_abs(self) -> Tensor:
        return self.pattern.sum(-2)

    @property
    def eta_rel(self) -> Tensor:
        length = self.pattern.shape[-1]
        return torch.stack([self.pattern.diagonal(-d, -2, -1).sum(-1) for d in range(length)], -1)

    @property
    def row_entropy(self) -> Tensor:
        return -torch.xlogy(self.pattern, self.pattern).sum(-1).mean(-1)

    def kl(self, dense: Tensor) -> Tensor:
        """Row-averaged KL(target || dense), nats, entry by entry."""
        terms = torch.xlogy(self.pattern, self.pattern) - torch.xlogy(self.pattern, dense)
        return terms.nan_to_num(0.0).sum((-2, -1)) / self.pattern.shape[-1]


def floored(weights: Tensor) -> Tensor:
    """Floor causal entries at 1e-9 and normalise the rows, as calibration does."""
    weights = weights.double().clamp(min=1e-9).tril()
    return weights / weights.sum(-1, keepdim=True)


def random_target(*heads: int, length: int, scale: float = 1.0, sequences: int = 1) -> DenseTarget:
    """The mean over sequences of softmax rows with a recency bias and normal logits of the given scale."""
    generator = torch.Generator().manual_seed(0)
    position = torch.arange(length)
    bias = -0.5 * (position[:, None] - position).clamp(min=0).double().log1p()
    logits = scale * torch.randn(sequences, *heads, length, length, dtype=torch.float64, generator=generator)
    causal = (logits + bias).masked_fill(position[:, None] < position, -torch.inf)
    return DenseTarget(floored(causal.softmax(-1).mean(0)))


@pytest.mark.parametrize("length", [1, 2, 150])
def test_marginals_and_kl_are_dense_sums_in_every_gauge(length):
    target = random_target(2, 3, length=length)
    alpha, rho = torch.randn(2, 2, 3, length, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pattern, tilt = CompactPattern.from_parameters(alpha, rho), 3 * torch.arange(length)
    dense = DenseTarget(pattern.dense())
    for actual, expected in zip(marginals(pattern), (dense.eta_abs, dense.eta_rel), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    etas, expected = (target.eta_abs, target.eta_rel), target.kl(dense.pattern)
    torch.testing.assert_close(fit_kl(pattern, *etas, target.row_entropy), expected, rtol=0, atol=1e-10)
    tilted = CompactPattern.from_parameters(alpha + tilt, rho + tilt)
    rounded = [fit_kl(each, *(eta.float() for eta in etas), target.row_entropy) for each in (pattern, tilted)]
    torch.testing.assert_close(*rounded, rtol=0, atol=1e-10)
    torch.testing.assert_close(rounded[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("fitter", "length", "scale"),
    [
        ("proportional", 1, 0.5),
        ("proportional", 70, 0.5),
        ("proportional", 70, 3.0),
        ("adam", 70, 3.0),
        ("dense", 70, 3.0),
    ],
)
def test_every_fitter_finds_the_optimum_and_its_marginals(fitter, length, scale):
    target = random_target(3, length=length, scale=scale, sequences=4)
    best = fit_compact(target.eta_abs, target.eta_rel, fitter="dense")
    pattern = fit_compact(target.eta_abs, target.eta_rel, fitter=fitter)
    nats, l1 = ACCURACY[fitter]
    assert (target.kl(pattern.dense()) - target.kl(best.dense())).abs().max() <= nats
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
    assert abs(fit_kl(fitted, *marginals(planted), DenseTarget(planted.dense()).row_entropy)) < 1e-9


@pytest.mark.parametrize("length", [1, 7, 129])
@pytest.mark.parametrize("kind", ["self", "first", "previous", "random"])
def test_one_hot_rows_on_the_floor_converge(kind, length):
    """Attention of a single sequence at its sharpest: all of each row's mass on one key, the rest on the floor."""
    row = torch.arange(length)
    drawn = (torch.rand(length, generator=torch.Generator().manual_seed(0)) * (row + 1)).long()
    key = {"self": row, "first": 0 * row, "previous": (row - 1).clamp(min=0), "random": drawn}[kind]
    target = DenseTarget(floored(one_hot(key, length)))
    pattern, certificate = fit_with_certificate(target.eta_abs, target.eta_rel)
    assert bool(certificate.converged)
    assert int(certificate.sweeps) <= 60
    kl = fit_kl(pattern, target.eta_abs, target.eta_rel, target.row_entropy)
    assert kl >= -1e-9
    assert kl < 1e-4 or kind == "random"


@pytest.mark.parametrize("fitter", list(FITTERS))
def test_results_are_canonical_float64_alike_in_every_batch_and_leave_targets_alone(fitter):
    assert fit_compact(torch.ones(0, 5), torch.ones(0, 5), fitter=fitter).shape == (0,)
    target = random_target(2, 3, length=50)
    etas = target.eta_abs.float(), target.eta_rel.float()
    before, options = [eta.clone() for eta in etas], {"steps": 30} if fitter == "adam" else {}
    (pattern, certificate), (again, _) = (fit_with_certificate(*etas, fitter=fitter, **options) for _ in range(2))
    assert pattern.shape == certificate.sweeps.shape == certificate.l1.shape == (2, 3)
    assert pattern.alpha.dtype == pattern.rho.dtype == pattern.log_z.dtype == torch.float64
    torch.testing.assert_close(pattern.canonical().alpha, pattern.alpha, rtol=0, atol=1e-10)
    assert not pattern.alpha.requires_grad
    assert all(map(torch.equal, (*etas, pattern.alpha, pattern.rho), (*before, again.alpha, again.rho)))
    alone = fit_compact(etas[0][1, 2], etas[1][1, 2], fitter=fitter, **options)
    torch.testing.assert_close(alone.dense(), pattern[1, 2].dense(), rtol=0, atol=1e-9)


def test_steps_of_adam_are_those_on_the_dense_loss_from_the_papers_start():
    """Ten steps of torch.optim.Adam on Eq. (4) written with T x T logits and automatic gradients."""
    target = random_target(2, length=30)
    position = torch.arange(30)
    distance = position[:, None] - position
    alpha, rho = (x.requires_grad_() for x in initial_parameters(target.eta_rel))
    assert not alpha.any()
    torch.testing.assert_close(rho[0, 7], (target.eta_rel[0, 7] / 23).log())
    assert initial_parameters(torch.tensor([1e-12]))[1] == torch.tensor(1e-9).log()
    optimizer = torch.optim.Adam([alpha, rho], lr=0.05)

    def logits():
        return alpha[:, None] + rho[:, distance.clamp(min=0)].masked_fill(distance < 0, -torch.inf)

    for _ in range(10):
        optimizer.zero_grad()
        fit_loss(alpha, rho, logits().logsumexp(-1), target.eta_abs, target.eta_rel).sum().backward()
        optimizer.step()
    pattern = fit_compact(target.eta_abs, target.eta_rel, fitter="adam", steps=10)
    torch.testing.assert_close(pattern.dense(), logits().softmax(-1).detach(), rtol=0, atol=1e-9)


def test_a_certificate_has_the_residuals_of_the_dense_pattern_and_stopping_short_warns():
    target = random_target(3, length=50)
    with pytest.warns(UserWarning, match="3 of 3 patterns were not yet fitted"):
        pattern, certificate = fit_with_certificate(target.eta_abs, target.eta_rel, max_sweeps=3, tolerance=1e-9)
    dense = DenseTarget(pattern.dense())
    close = {"rtol": 1e-6, "atol": 1e-12}
    errors = [(dense.eta_abs, target.eta_abs), (dense.eta_rel, target.eta_rel)]
    relative = [(fitted / eta - 1).abs().amax(-1) for fitted, eta in errors]
    torch.testing.assert_close(certificate.max_relative, torch.maximum(*relative), **close)
    l1 = sum((fitted - eta).abs().sum(-1) for fitted, eta in errors) / 50
    torch.testing.assert_close(certificate.l1, l1, **close)
    assert certificate.sweeps.tolist() == [3, 3, 3]
    assert not certificate.converged.any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_compact(target.eta_abs, target.eta_rel)
        fit_compact(target.eta_abs, target.eta_rel, fitter="adam", steps=5)


@pytest.mark.filterwarnings("ignore:.*not yet fitted")
def test_the_residual_times_the_distance_bounds_the_gap_of_the_loss():
    """Eq. (S.12)."""
    target = random_target(4, length=60, scale=2.0)
    best = fit_compact(target.eta_abs, target.eta_rel, fitter="dense")
    for sweeps in (1, 2, 4):
        pattern, certificate = fit_with_certificate(target.eta_abs, target.eta_rel, max_sweeps=sweeps)
        distance = torch.maximum((pattern.alpha - best.alpha).abs(), (pattern.rho - best.rho).abs()).max()
        gap = target.kl(pattern.dense()) - target.kl(best.dense())
        assert (gap > 0).all()
        assert (gap <= distance * certificate.l1).all()


def test_heads_of_a_trained_model_reach_their_reference(real_heads):
    """Low and high variance, and the two heads of the model that compact patterns fit worst."""
    target = [real_heads[name] for name in ("eta_abs", "eta_rel", "mean_row_entropy")]
    pattern, certificate = fit_with_certificate(*target[:2])
    assert (fit_kl(pattern, *target) - real_heads["reference_fit_kl"]).max() < 1e-5
    assert bool(certificate.converged.all())
    assert pattern.level().log_z.abs().max() < 30


def test_checked_targets_satisfy_all_three_relations_exactly():
    target = random_target(4, length=200)
    eta_abs, eta_rel = check_targets(target.eta_abs.float() * 1.0003, target.eta_rel.float())
    moments = ((eta_abs + eta_rel) * torch.arange(200)).sum(-1)
    for values, total in ((eta_abs.sum(-1), 200), (eta_rel.sum(-1), 200), (moments, 200 * 199 / 2)):
        torch.testing.assert_close(values, torch.full((4,), float(total)).double(), rtol=1e-13, atol=0)
    torch.testing.assert_close(eta_abs, target.eta_abs, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda a, r: (a[:, :-1], r), {}, "share one shape"),
        (lambda a, r: (a * torch.nan, r), {}, "eta_abs must be finite and positive"),
        (lambda a, r: (a, r * 0), {}, "eta_rel must be finite and positive"),
        (lambda a, r: (a * 1.01, r), {}, "eta_abs sums to T = 30; got 30.3"),
        (lambda a, r: (r, r), {}, r"T\(T-1\)/2 = 435; got"),
        (lambda a, r: (a, r), {"fitter": "fft"}, "one of proportional, adam, dense, got 'fft'"),
        (lambda a, r: (a, r), {"steps": 5}, "takes tolerance, max_sweeps; got steps"),
        (lambda a, r: (a, r), {"fitter": "adam", "tolerance": 1.0}, "takes steps; got tolerance"),
        (lambda a, r: (a, r), {"fitter": "adam", "steps": 0}, "steps must be at least 1"),
    ],
)
def test_marginals_that_no_pattern_has_and_unknown_options_are_refused(change, options, message):
    target = random_target(2, length=30)
    with pytest.raises(InputError, match=message):
        fit_compact(*change(target.eta_abs, target.eta_rel), **options)
    with pytest.raises(InputError, match=r"row entropy \[\.\.\.\]"):
        fit_kl(fit_compact(target.eta_abs, target.eta_rel), target.eta_abs, target.eta_rel, target.row_entropy[:1])
