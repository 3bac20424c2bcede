"""Distance bins and the view of profiles in the plane."""

import importlib.util

import numpy as np
import pytest
import torch

from saf.analysis.projection import (
    BINS,
    EDGES,
    ProfileSample,
    distance_profile,
    project_profiles,
    sample_profiles,
    umap_reducer,
)
from saf.errors import InputError, UnsupportedError


def bin_of(distance: int) -> int:
    """0; 1; 2 to 3; 4 to 7; ...; the last takes the rest."""
    return distance if distance < 2 else min(distance.bit_length(), 11)


@pytest.mark.parametrize("position", [0, 1, 5, 1023, 2999])
def test_mass_by_distance(rng, position):
    rows = torch.from_numpy(rng.random((2, 3000)))
    found = distance_profile(rows, position)
    assert found.shape == (2, BINS)
    for row, bins in zip(rows.tolist(), found.tolist(), strict=True):
        expected = [0.0] * BINS
        for key in range(position + 1):
            expected[bin_of(position - key)] += row[key]
        assert bins == pytest.approx(expected)


def test_the_edges_are_powers_of_two():
    assert EDGES == (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    with pytest.raises(InputError, match="no query 3"):
        distance_profile(torch.zeros(3), 3)


@pytest.fixture
def rows(rng) -> torch.Tensor:
    """Six sequences, queries 10 and 15."""
    drawn = torch.from_numpy(rng.normal(size=(6, 2, 16)))
    future = torch.arange(16) > torch.tensor([10, 15])[:, None]
    return drawn.masked_fill(future, -torch.inf).softmax(-1)


def test_profiles_are_pooled_and_drawn_by_position(rows):
    found = sample_profiles(rows, (10, 15), count=9, seed=0, key=(0, 1))
    binned = torch.cat([distance_profile(rows[:, 0], 10), distance_profile(rows[:, 1], 15)])
    assert {tuple(row) for row in found.measured.tolist()} <= {tuple(row) for row in binned.tolist()}
    assert len(found.measured) == len(found.generated) == 9
    assert torch.allclose(found.mean, binned.mean(0))
    assert torch.allclose(found.generated.sum(1), torch.ones(9, dtype=torch.float64))
    many = sample_profiles(rows, (10, 15), count=4000, seed=0, key=(0, 1), scale=50.0)
    assert len(many.measured) == 12, "no more than were measured"
    assert ((many.generated.mean(0) - binned.mean(0)).abs() < 0.01).all()


class Recorder:
    """Takes the first two coordinates, and keeps what it was given."""

    def fit_transform(self, values):
        self.fitted = values
        return values[:, :2]

    def transform(self, values):
        return 10 + values[:, :2]


def test_the_map_is_fitted_to_standardised_roots_of_what_was_measured():
    measured = torch.tensor([[0.25, 0.75, 0.0], [0.49, 0.51, 0.0], [0.81, 0.19, 0.0]])
    sample = ProfileSample(measured=measured, generated=measured[:1], mean=measured.mean(0))
    reducer = Recorder()
    found = project_profiles(sample, seed=0, reducer=reducer)
    roots = np.sqrt(measured.double().numpy())
    width = roots.std(0, ddof=1)
    assert np.allclose(reducer.fitted[:, :2], ((roots - roots.mean(0)) / np.where(width > 0, width, 1))[:, :2])
    assert (reducer.fitted[:, 2] == 0).all()
    assert found["measured"].shape == (3, 2)
    assert np.allclose(found["generated"], 10 + found["measured"][:1])
    expected = (np.sqrt(measured.double().mean(0).numpy()) - roots.mean(0)) / np.where(width > 0, width, 1)
    assert np.allclose(found["mean"][0], 10 + expected[:2])


def test_without_umap_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="pip install umap-learn"):
        umap_reducer(0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_umap_keeps_two_kinds_of_profile_apart_and_repeats_itself(rng):
    pytest.importorskip("umap", reason="umap-learn is not installed: the extra `analysis`")
    near, far = (torch.from_numpy(rng.dirichlet(weights, size=40)) for weights in ([40] + [1] * 11, [1] * 11 + [40]))
    sample = ProfileSample(measured=torch.cat([near, far]), generated=near[:5], mean=near.mean(0))
    found, again = (project_profiles(sample, seed=0) for _ in range(2))
    assert all(np.array_equal(found[name], again[name]) for name in found)
    centres = [found["measured"][:40].mean(0), found["measured"][40:].mean(0)]
    for point in found["generated"]:
        assert np.linalg.norm(point - centres[0]) < np.linalg.norm(point - centres[1])
