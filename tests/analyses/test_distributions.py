"""Models of the variation of attention over sequences: their draws, and the distances from measured rows."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch

from experiments.analyses.distributions import (
    compare_entry,
    dirichlet_rows,
    distance_profile,
    distances,
    energy_distance,
    gaussian_rows,
    project_profiles,
    row_distances,
)
from saf.heads import HeadSet
from saf.statistics import AttentionStatistics

HEADS = HeadSet([(0, 1), (1, 0)])


def statistics_of(rows: torch.Tensor, logits: torch.Tensor, positions: tuple[int, ...]) -> AttentionStatistics:
    """Statistics that hold rows `[F, N, R, T]` of two heads, and nothing else of use."""
    length = rows.shape[-1]
    blank = {name: torch.full((2, 2), torch.nan).double() for name in ("variance", "forward_kl", "row_entropy")}
    blank |= {name: torch.full((2, 2, length), torch.nan).double() for name in ("eta_abs", "eta_rel")}
    return AttentionStatistics(
        **blank,
        length=length,
        num_sequences=rows.shape[1],
        sequences_hash="",
        collected={"rows": rows, "logit_rows": logits},
        collected_heads=HEADS,
        positions=positions,
    )


def draw_dirichlet(generator: np.random.Generator, count: int, width: int = 6, strength: float = 8.0) -> torch.Tensor:
    mean = np.arange(1.0, width + 1)
    return torch.from_numpy(generator.dirichlet(strength * mean / mean.sum(), size=count))


def test_energy_distance_in_one_dimension_is_the_square_of_scipys(rng):
    one, other = rng.random(7), rng.random(11) + 0.3
    x, y = (torch.from_numpy(values**2)[:, None] for values in (one, other))
    found = energy_distance(distances(x, y), distances(x, x), distances(y, y))
    assert found == pytest.approx(scipy.stats.energy_distance(one, other) ** 2, rel=1e-9)
    assert energy_distance(distances(x, x), distances(x, x), distances(x, x)) == 0


def test_gaussian_rows_have_the_logits_moments_and_no_correlation(rng):
    logits = torch.from_numpy(rng.normal(size=(9, 4)) * [0.5, 1, 2, 0.1] + [0, 1, -1, 3])
    drawn = gaussian_rows(logits, 4000, seed=3, key=(0, 0, 3)).log()
    # A row's normaliser cancels in the differences to its last key.
    found, variance = drawn[:, :3] - drawn[:, 3:], logits.var(0)
    expected = torch.diag(variance[:3]) + variance[3]
    error = (found.mean(0) - (logits.mean(0)[:3] - logits.mean(0)[3])).abs()
    assert (error < 5 * (expected.diag() / 4000).sqrt()).all()
    assert ((found.T.cov() - expected).abs() < 0.1 * expected.diag().max()).all()


def test_dirichlet_rows_have_the_moments_of_eq_18(rng):
    rows, scale = draw_dirichlet(rng, 12, width=5), 4.0
    drawn = dirichlet_rows(rows, 4000, seed=1, key=(1, 2, 3), scale=scale)
    mean, spread = rows.mean(0), rows.var(0).sum()
    strength = scale * ((1 - mean.square().sum()) / spread - 1)
    covariance = (torch.diag(mean) - torch.outer(mean, mean)) / (strength + 1)
    assert ((drawn.mean(0) - mean).abs() < 5 * (covariance.diag() / 4000).sqrt()).all()
    assert ((drawn.T.cov() - covariance).abs() < 0.1 * covariance.diag().max()).all()
    assert torch.allclose(drawn.sum(1), torch.ones(4000, dtype=torch.float64))
    same = rows[:1].expand(4, -1)
    assert torch.allclose(dirichlet_rows(same, 3, seed=0, key=(0, 0)), same[:3], atol=1e-12)


def test_an_entry_against_its_models(rng):
    logits = torch.from_numpy(rng.normal(size=(50, 5)) + np.arange(5))
    rows = logits.softmax(-1)
    samples, normal, found = compare_entry(rows, logits, 3, 30, scale=4.0, seed=0, key=(0, 0, 4))
    assert normal == pytest.approx((logits[:30, 3].mean().item(), logits[:30, 3].std().item()))
    assert np.allclose(samples["measured"], rows[30:, 3])
    measured = samples["measured"]
    cumulative = scipy.stats.norm(*normal).cdf(np.sort(samples["logits"]))
    steps = [max(abs(c - k / 20), abs(c - (k + 1) / 20)) for k, c in enumerate(cumulative)]
    assert found["logit"] == pytest.approx(max(steps))
    for name in ("gaussian", "dirichlet"):
        values = np.concatenate([measured, samples[name]])[:, None]
        expected = abs((measured <= values).mean(1) - (samples[name] <= values).mean(1)).max()
        assert found[name] == pytest.approx(expected)


def test_each_family_is_at_home_in_its_own_distribution(rng):
    """Rows of a Dirichlet distribution for one head, of independent normal logits for the other."""
    count, width = 240, 12
    spread = np.concatenate([np.full(width - 1, 0.3), [2.5]])
    normal = torch.from_numpy(rng.normal(size=(count, width)) * spread)
    other = draw_dirichlet(rng, count, width=width, strength=6.0)
    rows = torch.stack([other, normal.softmax(-1)])[:, :, None]
    logits = torch.stack([other.log(), normal])[:, :, None]
    found = row_distances(statistics_of(rows, logits, (width - 1,)), list(HEADS), fitted=140, scale=1.0)
    by_family = {name: values[:, 0].tolist() for name, values in found["normalised"].items()}
    assert found["rows"] == 70
    assert max(by_family["resampled"]) < 1.6
    assert by_family["dirichlet"][0] < 1.6 < by_family["dirichlet"][1]
    assert by_family["gaussian"][1] < 1.6
    assert found["medians"]["resampled"] == pytest.approx(np.median(by_family["resampled"]))


@pytest.mark.parametrize("position", [5, 2999])
def test_mass_by_distance(rng, position):
    """Bins are 0; 1; 2 to 3; 4 to 7; ...; the last takes the rest."""
    row, expected = rng.random(3000), [0.0] * 12
    for key in range(position + 1):
        expected[min((position - key).bit_length(), 11)] += row[key]
    assert distance_profile(torch.from_numpy(row), position).tolist() == pytest.approx(expected)


def test_the_map_is_fitted_to_standardised_roots_of_measured_profiles():
    reducer = SimpleNamespace(fit_transform=lambda values: values[:, :2], transform=lambda values: 10 + values[:, :2])
    measured = torch.tensor([[0.25, 0.75, 0.0], [0.49, 0.51, 0.0], [0.81, 0.19, 0.0]])
    found = project_profiles({"measured": measured, "generated": measured[:1], "mean": measured[:1]}, reducer)
    scaled = scipy.stats.zscore(np.sqrt(measured.double().numpy()[:, :2]), ddof=1)
    assert np.allclose(found["measured"], scaled)
    assert np.allclose(found["generated"], 10 + scaled[:1])
