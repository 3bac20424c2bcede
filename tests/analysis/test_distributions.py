"""Models of how attention varies over sequences: their draws, and the distances that judge them."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from saf.analysis.distributions import query_positions
from saf.analysis.energy_distance import distances, energy_distance, row_distances, split_quartile
from saf.analysis.entry_distribution import entry_distribution, head_entry
from saf.analysis.row_models import dirichlet_rows, gaussian_rows, resampled_rows
from saf.calibration import calibrate
from saf.errors import InputError
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
    assert energy_distance(distances(x, x), distances(x, x), distances(x, x)) == pytest.approx(0, abs=1e-15)


def test_distances_of_rows_are_those_of_their_roots(rng):
    x, y = draw_dirichlet(rng, 4), draw_dirichlet(rng, 3)
    found = distances(x.float(), y)
    for i, one in enumerate(x.tolist()):
        for j, other in enumerate(y.tolist()):
            expected = math.sqrt(sum((math.sqrt(a) - math.sqrt(b)) ** 2 for a, b in zip(one, other, strict=True)))
            assert found[i, j].item() == pytest.approx(expected, abs=1e-6)


def test_the_unit_is_the_upper_quartile_between_disjoint_parts(rng):
    apart = distances(*[draw_dirichlet(rng, 10)] * 2)
    found = split_quartile(apart, rows=3, splits=5, generator=torch.Generator().manual_seed(4))
    generator, values = torch.Generator().manual_seed(4), []
    for _ in range(5):
        order = torch.randperm(10, generator=generator).tolist()
        a, b = order[:3], order[3:6]
        assert not set(a) & set(b)
        mean = [np.mean([apart[i, j].item() for i in left for j in right]) for left, right in ((a, b), (a, a), (b, b))]
        values.append(2 * mean[0] - mean[1] - mean[2])
    assert found == pytest.approx(np.quantile(values, 0.75))
    with pytest.raises(InputError, match="no two parts of 6"):
        split_quartile(apart, rows=6, splits=5, generator=generator)


def test_resampled_rows_are_measured_ones(rng):
    rows = draw_dirichlet(rng, 5)
    drawn = resampled_rows(rows, 40, seed=0, key=(0, 1, 2))
    assert {tuple(row) for row in drawn.tolist()} == {tuple(row) for row in rows.tolist()}


def test_gaussian_rows_have_the_logits_moments_and_no_correlation(rng):
    logits = torch.from_numpy(rng.normal(size=(9, 4)) * [0.5, 1, 2, 0.1] + [0, 1, -1, 3])
    drawn = gaussian_rows(logits, 4000, seed=3, key=(0, 0, 3)).log()
    # A row's normaliser cancels in the differences to its last key.
    found = drawn[:, :3] - drawn[:, 3:]
    variance = logits.var(0)
    expected = torch.diag(variance[:3]) + variance[3]
    assert (
        (found.mean(0) - (logits.mean(0)[:3] - logits.mean(0)[3])).abs() < 5 * (expected.diag() / 4000).sqrt()
    ).all()
    assert ((found.T.cov() - expected).abs() < 0.1 * expected.diag().max()).all()


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_dirichlet_rows_have_the_moments_of_eq_18(rng, scale):
    rows = draw_dirichlet(rng, 12, width=5)
    drawn = dirichlet_rows(rows, 4000, seed=1, key=(1, 2, 3), scale=scale)
    mean, spread = rows.mean(0), rows.var(0).sum()
    strength = scale * ((1 - mean.square().sum()) / spread - 1)
    covariance = (torch.diag(mean) - torch.outer(mean, mean)) / (strength + 1)
    assert ((drawn.mean(0) - mean).abs() < 5 * (covariance.diag() / 4000).sqrt()).all()
    assert ((drawn.T.cov() - covariance).abs() < 0.1 * covariance.diag().max()).all()
    assert torch.allclose(drawn.sum(1), torch.ones(4000, dtype=torch.float64))


def test_rows_that_never_vary_are_their_mean_and_bad_ones_are_refused(rng):
    row = draw_dirichlet(rng, 1)
    same = row.expand(4, -1)
    assert torch.allclose(dirichlet_rows(same, 3, seed=0, key=(0, 0)), row.expand(3, -1), atol=1e-12)
    with pytest.raises(InputError, match="positive"):
        dirichlet_rows(same, 3, seed=0, key=(0, 0), scale=0)
    with pytest.raises(InputError, match="two sequences"):
        gaussian_rows(row, 3, seed=0, key=(0, 0))
    with pytest.raises(InputError, match="finite"):
        gaussian_rows(torch.full((3, 2), -torch.inf), 3, seed=0, key=(0, 0))


def largest_step(one: np.ndarray, other: np.ndarray) -> float:
    """The Kolmogorov-Smirnov distance, by looking at every value."""
    values = np.concatenate([one, other])
    return max(abs((one <= value).mean() - (other <= value).mean()) for value in values)


def test_an_entry_against_its_models(rng):
    logits = torch.from_numpy(rng.normal(size=(50, 5)) + np.arange(5))
    rows = logits.softmax(-1)
    pair, before = (rows[:30], rows[30:]), (logits[:30], logits[30:])
    found = entry_distribution(pair, before, 3, count=200, seed=0, key=(0, 0, 4))
    assert found.normal == pytest.approx((logits[:30, 3].mean().item(), logits[:30, 3].std().item()))
    assert np.allclose(found.probabilities["measured"], np.sort(rows[30:, 3].numpy()))
    cumulative = [0.5 * (1 + math.erf((x - found.normal[0]) / found.normal[1] / math.sqrt(2))) for x in found.logits]
    steps = [max(abs(c - k / 20), abs(c - (k + 1) / 20)) for k, c in enumerate(cumulative)]
    assert found.distances["logit"] == pytest.approx(max(steps))
    for name in ("gaussian", "dirichlet"):
        expected = largest_step(found.probabilities["measured"], found.probabilities[name])
        assert found.distances[name] == pytest.approx(expected)
    curves = found.curves(3)
    assert curves["logits"] == pytest.approx([found.logits[0], np.median(found.logits), found.logits[-1]])
    assert len(curves["dirichlet"]) == 3


def test_each_family_is_at_home_in_its_own_distribution(rng):
    """Rows of a Dirichlet distribution for one head, of independent normal logits for the other."""
    count, width = 240, 12
    spread = np.concatenate([np.full(width - 1, 0.3), [2.5]])
    normal = torch.from_numpy(rng.normal(size=(count, width)) * spread)
    other = draw_dirichlet(rng, count, width=width, strength=6.0)
    rows = torch.stack([other, normal.softmax(-1)])[:, :, None]
    logits = torch.stack([other.log(), normal])[:, :, None]
    found = row_distances(statistics_of(rows, logits, (width - 1,)), HEADS, fitted=140, rows=64, scale=1.0)
    by_family = {name: values[:, 0].tolist() for name, values in found.normalised.items()}
    assert found.rows == 64
    assert max(by_family["resampled"]) < 1.6
    assert by_family["dirichlet"][0] < 1.6 < by_family["dirichlet"][1]
    assert by_family["gaussian"][1] < 1.6
    assert found.medians["resampled"] == pytest.approx(np.median(by_family["resampled"]))


def test_rows_that_never_vary_have_no_unit():
    rows = torch.full((2, 8, 1, 2), 0.5)
    found = row_distances(statistics_of(rows, rows, (1,)), HEADS, fitted=5)
    assert all(values.isnan().all() for values in found.normalised.values())


def test_rows_measured_by_calibration(model, ids, run_dense):
    """The diagnostics read what `calibrate` collects: causal keys only, the first sequences fitted, the others held."""
    positions = query_positions(24)
    statistics = calibrate(
        model, [torch.cat([ids, ids.flip(1)])], collect=("rows", "logit_rows"), heads=[(1, 2)], positions=positions
    )
    found = row_distances(statistics, [(1, 2)], fitted=6, splits=4)
    assert found.quartile.shape == (1, len(positions))
    assert found.rows == 3
    assert all(bool((values > 0).all()) for values in found.normalised.values())
    entry = head_entry(statistics, (1, 2), 23, fitted=5, distance=2, count=10)
    flipped, _ = run_dense(model, torch.cat([ids.flip(1), ids[:, :1]], 1))
    assert np.allclose(entry.probabilities["measured"], np.sort(flipped[1][:, 2, 23, 21].numpy()), atol=1e-6)
    with pytest.raises(InputError, match="four sequences"):
        row_distances(statistics, [(1, 2)], fitted=9)
    with pytest.raises(InputError, match="expected a query of"):
        head_entry(statistics, (1, 2), 7, fitted=5)
    with pytest.raises(InputError, match="hold no 'rows'"):
        row_distances(calibrate(model, [ids, ids]), [(1, 2)], fitted=4)


def test_query_positions_are_the_papers():
    assert query_positions(1024) == (63, 127, 255, 511, 767, 1023)
    assert query_positions(8) == (1, 3, 5, 7)
