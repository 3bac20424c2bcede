"""Exponential patterns by their definition, and how far their fits are from compact ones."""

import math

import pytest
import torch

from saf.errors import InputError
from saf.exponential_fit import ExponentialFit, fit_exponential, fit_exponential_heads
from saf.fit import fit_compact, fit_kl, marginals
from saf.patterns import CompactPattern, ExponentialPattern
from tests.ops.exponential_patterns import exponential_patterns


def free_keys(fit: ExponentialFit) -> int:
    """Return how many keys have a logit of their own."""
    return fit.pattern.alpha.shape[-1]


def test_heads_of_a_real_model_lose_little(real_heads):
    """Two of the heads of lowest variance, 4,096 positions.

    An independent float64 fit of such heads, by other code, lost 0.0079 nats at most, with a cancellation of 3.1.
    """
    eta_abs, eta_rel, entropy = (real_heads[name][6:8] for name in ("eta_abs", "eta_rel", "mean_row_entropy"))
    compact = fit_compact(eta_abs, eta_rel)
    fits = fit_exponential_heads(compact, eta_abs, eta_rel)
    for head, fit in enumerate(fits):
        assert fit.pattern.damping.shape == (16,)
        assert fit.cancellation <= 4
        goal = fit.pattern.compact(), eta_abs[head], eta_rel[head], entropy[head]
        extra = fit_kl(*goal) - fit_kl(compact[head], *goal[1:])
        # What is reported is what the pattern costs as it is executed.
        assert fit.extra_kl == pytest.approx(extra.item(), abs=1e-9)
        assert -1e-6 <= fit.extra_kl <= 0.0079 + (0.005 if free_keys(fit) == 16 else 0)


@pytest.mark.parametrize("sinks", [None, 16])
def test_a_planted_pattern_is_found(sinks):
    """A band, two decays on the grid and free keys are in the family, so the fit loses nothing."""
    planted = exponential_patterns(2, 500, band=32, poles=2, sinks=sinks)
    damping = torch.tensor([0, 1 / 40]).double().expand(2, 2)
    planted = ExponentialPattern.from_state(planted.state() | {"damping": damping})
    targets = marginals(planted.to_compact())
    compact = fit_compact(*targets)
    fits = fit_exponential_heads(compact, *targets, band=32)
    assert all(fit.extra_kl <= (1e-5 if free_keys(fit) == 500 else 1e-3) for fit in fits)
    if sinks:
        assert [*map(free_keys, fits)] == [16, 16]
        assert isinstance(fits[0].pattern, ExponentialPattern)
        assert fits[0].pattern.to_compact(2000).length == 2000
        free = fit_exponential_heads(compact, *targets, band=32, max_short_kl=None)
        assert [*map(free_keys, free)] == [500, 500]


@pytest.mark.parametrize("length", [1, 16, 17, 129])
def test_short_and_batched_targets(length):
    """Leading dimensions stay; a length within the band loses nothing at all."""
    targets = marginals(exponential_patterns(6, length, band=8).to_compact())
    targets = targets[0].unflatten(0, (2, 3)), targets[1].unflatten(0, (2, 3))
    fitted = fit_exponential(*targets, band=16)
    assert fitted.shape == (2, 3)
    assert fitted.length == length
    error = (fitted.dense() - fit_compact(*targets).dense()).abs().max()
    assert error <= (1e-4 if length <= 16 else 0.05)


def test_a_short_form_beyond_the_limit_gives_way_to_the_full_one():
    """White noise in alpha costs the short form half its variance, and the full form nothing."""
    generator = torch.Generator().manual_seed(0)
    alpha = 0.1 * torch.randn(1, 300, dtype=torch.float64, generator=generator)
    compact = CompactPattern.from_parameters(alpha, -torch.arange(300.0, dtype=torch.float64)[None] / 40)
    targets = marginals(compact)
    (short,) = fit_exponential_heads(compact, *targets, band=32, max_short_kl=1.0)
    assert (free_keys(short), short.pattern.kind) == (16, "exponential")
    assert 0.002 < short.extra_kl < 0.01
    (full,) = fit_exponential_heads(compact, *targets, band=32, max_short_kl=1.0, max_extra_kl=0.002)
    assert (free_keys(full), full.pattern.kind) == (300, "exponential")
    assert full.extra_kl <= 0.002


def test_a_head_beyond_the_limits_stays_compact():
    """White noise in rho is no sum of 32 poles."""
    generator = torch.Generator().manual_seed(0)
    rho = torch.randn(1, 700, dtype=torch.float64, generator=generator)
    compact = CompactPattern.from_parameters(torch.zeros(1, 700, dtype=torch.float64), rho)
    (fit,) = fit_exponential_heads(compact, *marginals(compact), band=32)
    assert (fit.pattern.kind, fit.extra_kl > 0.02) == ("compact", True)
    torch.testing.assert_close(fit.pattern.dense(), compact[0].dense())


def test_a_head_too_sharp_for_an_fft_stays_compact_beside_one_that_is_fitted():
    alpha, rho = torch.zeros(2, 300, dtype=torch.float64), -torch.arange(300, dtype=torch.float64).expand(2, -1) / 40
    alpha[0, :150] = -60
    compact = CompactPattern.from_parameters(alpha, rho)
    targets = marginals(compact)
    sharp, smooth = fit_exponential_heads(compact, *targets, band=32)
    assert (sharp.pattern.kind, sharp.extra_kl, smooth.pattern.kind) == ("compact", 0.0, "exponential")
    torch.testing.assert_close(sharp.pattern.dense(), compact[0].dense())
    noise = torch.randn(1, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    keys = CompactPattern.from_parameters(25 * noise, torch.zeros_like(noise))
    with pytest.raises(InputError, match="got a sharp one"):
        fit_exponential(*marginals(keys), band=32)


def test_wrong_settings_are_refused():
    eta = torch.tensor([1.5, 0.5])
    for options in ({"band": 0}, {"pairs": 1}):
        with pytest.raises(InputError, match="at least"):
            fit_exponential(eta, eta, **options)


# --- patterns by their definition


def written_out(pattern: ExponentialPattern) -> torch.Tensor:
    """P of a single pattern by its definition, Eq. (S.31), row by row."""
    size, width, keys = pattern.length, pattern.band.shape[-1], pattern.alpha.shape[-1]
    d, later = torch.arange(size - width).double(), torch.arange(size - keys).double()
    turned = pattern.frequency * d[:, None]
    waves = pattern.cosine * turned.cos() + pattern.sine * turned.sin()
    g = torch.cat([pattern.band.exp(), ((-pattern.damping * d[:, None]).exp() * waves).sum(1)])
    trend = (pattern.trend * (-pattern.trend_damping * later[:, None]).exp()).sum(1)
    weights = torch.cat([pattern.alpha, trend]).exp()
    entries = torch.zeros(size, size, dtype=torch.float64)
    for i in range(size):
        row = weights[: i + 1] * g[: i + 1].flip(0)
        entries[i, : i + 1] = row / row.sum()
    return entries


@pytest.mark.parametrize(("length", "width"), [(1, 1), (7, 7), (20, 1), (40, 16)])
@pytest.mark.parametrize("sinks", [None, 4])
def test_dense_is_the_definition(length, width, sinks):
    pattern = exponential_patterns(1, length, band=width, sinks=sinks and min(sinks, length))[0]
    torch.testing.assert_close(pattern.dense(), written_out(pattern), rtol=1e-12, atol=1e-15)


def test_prefixes_and_longer_forms_are_the_same_pattern():
    pattern = exponential_patterns(3, 60, band=8, sinks=4)
    for length in (1, 5, 59):
        torch.testing.assert_close(pattern.prefix(length).dense(), pattern.dense()[:, :length, :length])
        torch.testing.assert_close(pattern.extended(130).dense()[:, :60, :60], pattern.dense())
    with pytest.raises(InputError, match="a logit of its own, so the pattern ends at 60; got 61"):
        exponential_patterns(1, 60, band=8).to_compact(61)


def test_weights_must_stay_positive_where_they_are_used():
    one = torch.ones(1, dtype=torch.float64)
    none = one[:0]
    # 1 + 1.1 cos(d pi / 100) is below 0 around distance 100.
    two = ExponentialPattern(none, one, 0 * torch.ones(2).double(), torch.tensor([0, math.pi / 100]).double(),
                             torch.tensor([1, 1.1]).double(), torch.zeros(2).double(), 70)  # fmt: skip
    assert two.to_compact().length == 70
    with pytest.raises(InputError, match="positive over 200 positions"):
        two.extended(200)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"damping": -1e-3}, "damping must be at least 0"),
        ({"band": math.inf}, "must be finite"),
        ({"length": 8}, "alpha must have at most 8 keys"),
    ],
)
def test_patterns_that_grow_or_do_not_fit_together_are_refused(change, words):
    pattern = exponential_patterns(1, 60, band=16)[0]
    values = pattern.state()
    for name, value in change.items():
        values[name].view(-1)[0] = value
    with pytest.raises(InputError, match=words):
        ExponentialPattern.from_state(values)


def test_poles_keep_their_precision():
    pattern = exponential_patterns(1, 40, band=8).to(dtype=torch.bfloat16)
    assert pattern.cosine.dtype == pattern.alpha.dtype == torch.bfloat16
    assert pattern.frequency.dtype == torch.float64
