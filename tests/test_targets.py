"""Targets: causal rows that sum to one, one draw for a seed and a head, the paper's distributions and identities."""

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from experiments.analyses.patterns import pattern_distances
from saf.errors import InputError
from saf.fit import fit_compact, fit_kl
from saf.heads import Head, HeadSet
from saf.statistics import AttentionStatistics
from saf.targets import TARGETS, collect_for, concentration, dense_pattern, exact_pattern, target, target_of

HEADS = HeadSet([(0, 1), (2, 1), (2, 3)])
SAMPLED = ("gaussian", "dirichlet", "structured_random")
DRAWS = 1000


def make_logits(count: int = 6, length: int = 20, *, spread: float = 1.5, seed: int = 0) -> torch.Tensor:
    """Logits `[3, N, T, T]` that share a part over sequences, -inf above the diagonal."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(len(HEADS), 1, length, length, generator=generator, dtype=torch.float64)
    each = torch.randn(len(HEADS), count, length, length, generator=generator, dtype=torch.float64)
    return (shared + spread * each).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)


def make_statistics(logits: torch.Tensor) -> AttentionStatistics:
    """Statistics of the three heads, with all that a pattern may read."""
    count, length = logits.shape[1], logits.shape[-1]
    pattern, finite = logits.softmax(-1), logits.masked_fill(logits == -torch.inf, 0)
    whole = {}
    for name, values in target_of(pattern.mean(1))._asdict().items():
        whole[name] = torch.full((3, 4, *values.shape[1:]), torch.nan, dtype=torch.float64)
        whole[name][[layer for layer, _ in HEADS], [head for _, head in HEADS]] = values
    whole |= {"variance": whole["row_entropy"], "forward_kl": whole["row_entropy"]}
    variance, logit_variance = (values.var(1, correction=min(1, count - 1)) for values in (pattern, finite))
    collected = {
        "mean": pattern.mean(1),
        "row_variance": variance.sum(-1),
        "logit_mean": finite.mean(1),
        "logit_variance": logit_variance,
        **{f"sharp_{key}": each for key, each in target_of(logits.mean(1).softmax(-1))._asdict().items()},
    }
    options = {"length": length, "num_sequences": count, "sequences_hash": "", "collected_heads": HEADS}
    return AttentionStatistics(**whole, **options, collected=collected)


def pattern_of(actual: AttentionStatistics, heads: Iterable[Head], name: str, **options) -> torch.Tensor:
    """The entries of patterns in float64."""
    return dense_pattern(actual, heads, name, dtype=torch.float64, **options).weights


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    ("count", "length", "dtype"), [(6, 20, torch.float64), (1, 2, torch.float32), (6, 1, torch.bfloat16)]
)
def test_rows_are_causal_and_sum_to_one(name, count, length, dtype):
    weights = dense_pattern(make_statistics(make_logits(count, length)), HEADS, name, dtype=dtype).weights
    assert (weights.shape, weights.dtype) == ((3, length, length), dtype)
    assert not weights.triu(1).any()
    assert (weights >= 0).all()
    tolerance = 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps
    assert ((weights.double().sum(-1) - 1).abs() <= tolerance).all()


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("storage", ["dense", "compact"])
def test_collect_for_names_all_that_is_read_and_nothing_else(name, storage):
    actual = make_statistics(make_logits())
    names = collect_for(name, storage)
    make = dense_pattern if storage == "dense" else target
    make(replace(actual, collected={key: actual.collected[key] for key in names}), HEADS, name)
    for key in names:
        incomplete = {other: tensor for other, tensor in actual.collected.items() if other != key}
        with pytest.raises(InputError, match=rf"no '{key}' of heads .*collect=\('{key}',\)"):
            make(replace(actual, collected=incomplete), HEADS, name)


@pytest.mark.parametrize("name", SAMPLED)
def test_a_draw_depends_on_seed_layer_and_head_alone(name):
    actual, state = make_statistics(make_logits()), torch.get_rng_state()
    whole, other = (pattern_of(actual, HEADS, name, seed=seed) for seed in (5, 6))
    for number, head in enumerate(HEADS):
        assert torch.equal(pattern_of(actual, [head], name, seed=5)[0], whole[number])
    assert (other - whole).abs().amax((1, 2)).min() > 1e-3
    assert (whole[0] - whole[1]).abs().max() > 1e-3
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", TARGETS)
def test_the_compact_target_is_that_of_the_dense_pattern(name):
    actual = make_statistics(make_logits())
    dense = pattern_of(actual, HEADS, name, seed=2)
    if (exact := exact_pattern(actual, HEADS, name, seed=2)) is not None:
        torch.testing.assert_close(exact.dense(), dense, rtol=0, atol=1e-12)
        return
    compact = target(actual, HEADS, name, seed=2)
    for one, other in zip(compact, target_of(dense), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    fitted = fit_compact(compact.eta_abs, compact.eta_rel)
    entry = torch.xlogy(dense, dense) - torch.xlogy(dense, fitted.dense())
    torch.testing.assert_close(fit_kl(fitted, *compact), entry.sum((1, 2)) / 20, rtol=1e-4, atol=1e-6)


def test_zeros_are_floored_and_rows_normalised_before_marginals_are_taken():
    goal = target_of(torch.eye(6, dtype=torch.float64)[None])
    assert goal.eta_abs.sum().item() == pytest.approx(6, rel=1e-14)
    assert goal.eta_rel[0, 1:].tolist() == pytest.approx([5e-9, 4e-9, 3e-9, 2e-9, 1e-9], rel=1e-6)
    assert 0 < goal.row_entropy.item() < 1e-6


def test_wrong_requests_are_refused():
    actual = make_statistics(make_logits())
    for name, options, message in [
        ("median", {}, "pattern must be one of .*, got 'median'"),
        ("gaussian", {"scale": 2}, "'gaussian' takes seed; got scale"),
        ("mean", {"scale": 2}, "'mean' takes no options"),
        ("dirichlet", {"scale": 0}, "scale must be above 0"),
    ]:
        for make in (dense_pattern, target):
            with pytest.raises(InputError, match=message):
                make(actual, HEADS, name, **options)


# --- the distributions that sampled patterns are drawn from


def distance_from_normal(values: torch.Tensor) -> float:
    """Return the Kolmogorov-Smirnov distance of a sample from the standard normal distribution."""
    values = values.sort().values
    below = 0.5 * (1 + torch.erf(values / math.sqrt(2)))
    steps = torch.arange(len(values) + 1) / len(values)
    return torch.maximum((below - steps[:-1]).abs(), (steps[1:] - below).abs()).max().item()


def test_gaussian_logits_have_their_means_and_variances():
    actual = make_statistics(make_logits(length=3))
    head = list(HEADS)[1]
    drawn = torch.stack([pattern_of(actual, [head], "gaussian", seed=seed)[0] for seed in range(DRAWS)])
    mean, variance = actual.take("logit_mean", [head])[0], actual.take("logit_variance", [head])[0]
    # Differences of log-probabilities within a row are differences of logits, each drawn by itself.
    for row, one, other in [(1, 0, 1), (2, 0, 1), (2, 1, 2)]:
        difference = drawn[:, row, one].log() - drawn[:, row, other].log()
        scale = (variance[row, one] + variance[row, other]).sqrt()
        # 1.95 / sqrt(n) is exceeded with probability 0.001.
        assert distance_from_normal((difference - (mean[row, one] - mean[row, other])) / scale) < 1.95 / DRAWS**0.5
    assert (drawn[:, 0, 0] == 1).all()


def test_dirichlet_rows_have_the_moments_of_eq_18():
    actual = make_statistics(make_logits(count=8, length=5))
    head = list(HEADS)[2]
    mean, spread = actual.take("mean", [head])[0], actual.take("row_variance", [head])[0]
    strength = concentration(mean, spread)
    for scale in (1.0, 16.0):
        each = (pattern_of(actual, [head], "dirichlet", seed=seed, scale=scale)[0] for seed in range(DRAWS))
        drawn = torch.stack(list(each))
        for row in range(1, 5):
            rows, m, c = drawn[:, row, : row + 1], mean[row, : row + 1], scale * strength[row]
            covariance = (torch.diag(m) - torch.outer(m, m)) / (c + 1)
            error = 5 * (covariance.diag() / DRAWS).sqrt()
            assert ((rows.mean(0) - m).abs() < error).all()
            measured = rows.T.cov()
            assert ((measured - covariance).abs() < 0.2 * covariance.diag().max()).all()
    total = (mean * (1 - mean)).sum(-1) / (strength + 1)
    torch.testing.assert_close(total[1:], spread[1:], rtol=1e-10, atol=0)  # the summed variance of the sequences


def test_concentrations_stay_within_their_bounds_and_rows_that_hardly_vary_are_their_mean():
    actual = make_statistics(make_logits())
    sharp, loose = (pattern_of(actual, HEADS, "dirichlet", scale=scale) for scale in (1e30, 1e-30))
    assert 1e-5 < (sharp - actual.take("mean", HEADS)).abs().max() < 1e-2, "1e6 is the largest concentration"
    assert (loose.amax(-1) > 0.999).double().mean() > 0.9, "at 1e-2 nearly every row is one key"
    logits = make_logits(length=6)
    logits[:, :, 3, 1] = 16 + logits[:, :, 3].amax(-1)
    logits[:, :, 4] = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, -torch.inf])
    actual = make_statistics(logits)
    drawn, mean = pattern_of(actual, HEADS, "dirichlet"), actual.take("mean", HEADS)
    assert [torch.equal(drawn[:, row], mean[:, row]) for row in range(6)] == [True, False, False, True, True, False]


def test_structured_random_parameters_are_normal_and_a_prefix_for_shorter_inputs():
    def drawn(length, seed):
        statistics = make_statistics(make_logits(count=2, length=length))
        return torch.stack(exact_pattern(statistics, HEADS, "structured_random", seed=seed).logits())

    assert torch.equal(drawn(40, 1)[..., :12], drawn(12, 1))
    values = torch.cat([drawn(50, seed).flatten() for seed in range(10)])
    assert len(values.unique()) == len(values) == 3000
    assert distance_from_normal(values) < 1.95 / 3000**0.5


# --- identities of the paper's appendix B, Eqs. (13) to (16)


def kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return KL(first || second) of every row."""
    return (torch.xlogy(first, first) - torch.xlogy(first, second)).sum(-1)


def risk(patterns: torch.Tensor, fixed: torch.Tensor) -> torch.Tensor:
    """Eq. (13) over the patterns as the whole population."""
    return (patterns - fixed).square().sum((1, 2)).mean() / fixed.shape[-1] ** 2


@pytest.mark.parametrize(("count", "length", "seed"), [(6, 20, 0), (1, 7, 1)])
@pytest.mark.parametrize("name", TARGETS)
def test_the_identities_hold_for_every_pattern(name, count, length, seed):
    """What a pattern costs beyond the best fixed one is its distance from that one: Eqs. (14), (15) and (16)."""
    logits = make_logits(count, length, seed=seed)
    actual, patterns = make_statistics(logits), logits.softmax(-1)
    fixed = dense_pattern(actual, HEADS, name, dtype=torch.float64)
    mean, sharp = (pattern_of(actual, HEADS, each) for each in ("mean", "sharp_mean"))
    squared = pattern_distances(mean, fixed)["squared_error"]
    for number, matrix in enumerate(fixed.weights):
        each = patterns[number]
        excess = risk(each, matrix) - risk(each, mean[number])
        assert excess.item() == pytest.approx(squared[number].item(), rel=1e-9, abs=1e-15)
        forward = kl(each, matrix).mean(0) - kl(each, mean[number]).mean(0)
        torch.testing.assert_close(forward, kl(mean[number], matrix), rtol=1e-8, atol=1e-11)
        reverse = kl(matrix, each).mean(0) - kl(sharp[number], each).mean(0)
        torch.testing.assert_close(reverse, kl(matrix, sharp[number]), rtol=1e-8, atol=1e-11)
