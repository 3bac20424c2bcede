"""Pattern distances against loops over entries, and their rank correlation with costs."""

import math

import pytest
import torch

from experiments.analyses.common import spearman
from experiments.analyses.geometry import distance_and_cost, distances_from_mean, pattern_distances
from saf.calibration import driver
from saf.heads import HeadSet
from saf.patterns import CompactPattern, DensePattern


def dense(generator, heads=2, length=7):
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    logits = 2 * torch.randn(heads, length, length, generator=generator, dtype=torch.float64)
    return logits.masked_fill(future, -torch.inf).softmax(-1)


def test_distances_entry_by_entry(generator):
    reference = dense(generator)
    pattern = CompactPattern.from_parameters(*torch.randn(2, 2, 7, generator=generator, dtype=torch.float64))
    found = pattern_distances(reference, pattern)
    for head in range(2):
        squared = kl = hellinger = variation = 0.0
        for i in range(7):
            for j in range(i + 1):
                p, q = reference[head, i, j].item(), pattern.dense()[head, i, j].item()
                squared += (p - q) ** 2 / 49
                kl += p * math.log(p / q) / 7
                hellinger += (math.sqrt(p) - math.sqrt(q)) ** 2 / 14
                variation += abs(p - q) / 14
        expected = {"squared_error": squared, "kl": kl, "hellinger": hellinger, "total_variation": variation}
        for name, value in expected.items():
            assert found[name][head].item() == pytest.approx(value, rel=1e-6), name


def test_a_pattern_is_at_no_distance_from_itself_and_zeros_stay_finite(generator):
    reference = dense(generator)
    same = pattern_distances(reference, DensePattern(reference))
    assert all(values.abs().max() < 1e-7 for values in same.values())
    first = torch.zeros(2, 7, 7, dtype=torch.float64)
    first[..., 0] = 1
    apart = pattern_distances(reference, DensePattern(first))
    assert all(values.isfinite().all() and (values > 0).all() for values in apart.values())


def test_distance_and_cost_use_what_both_know():
    distances = {"0.25": {"mean": 0.0, "sharp": 2.0, "random": 3.0, "other": 1.0}, "0.5": {"mean": 0.0, "random": 1.0}}
    costs = {"0.25": {"mean": 0.6, "sharp": 0.5, "random": 9.0}, "0.5": {"mean": 1.0, "random": 2.0}}
    within, pooled = distance_and_cost(distances, costs)
    assert within == {"0.25": pytest.approx(0.5), "0.5": pytest.approx(1.0)}
    centred = torch.tensor([-1.0, 0, 1, -0.5, 0.5]), torch.tensor([0.0, -1, 1, -0.5, 0.5])
    expected = (centred[0] @ centred[1] / (centred[0].norm() * centred[1].norm())).item()
    assert pooled == pytest.approx(expected)
    assert within["0.25"] == pytest.approx(spearman(torch.tensor([0.0, 2, 3]), torch.tensor([0.6, 0.5, 9])))


@pytest.mark.parametrize("limit", [1, 1 << 30])
def test_distances_from_the_measured_mean(model, ids, run_dense, monkeypatch, limit):
    """A few heads at a time or all at once: the sharp mean, written out from whole patterns."""
    monkeypatch.setattr(driver, "COLLECT_BYTES", limit)
    heads = HeadSet([(0, 3), (1, 0), (2, 2)])
    found = distances_from_mean(model, [ids], heads, ["mean", "sharp_mean", "dirichlet"])
    assert all(values.abs().max() < 1e-6 for values in found["mean"].values())
    patterns, _ = run_dense(model, torch.cat([ids, ids[:, :1]], 1))
    for number, (layer, head) in enumerate(heads):
        each = patterns[layer][:, head]
        # The logits' row constants cancel in the softmax of their mean.
        sharp = each.log().mean(0).softmax(-1)
        error = ((each.mean(0) - sharp) ** 2).sum().item() / 24**2
        assert found["sharp_mean"]["squared_error"][number].item() == pytest.approx(error, rel=1e-4)
    assert (found["dirichlet"]["kl"] > 0).all()
