"""A two-dimensional view of attention profiles, measured and generated, by UMAP (optional: the extra `analysis`)."""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saf.analysis.distance_bins import distance_profile
from saf.analysis.row_models import SCALE, Key, dirichlet_rows
from saf.errors import UnsupportedError

PROFILES = 512


@dataclass(frozen=True, kw_only=True)
class ProfileSample:
    """Binned profiles of one head, pooled over query positions."""

    measured: Tensor
    """`[n, 12]`."""
    generated: Tensor
    """`[m, 12]`, by a Dirichlet distribution of the bins at each position."""
    mean: Tensor
    """`[12]`, of all that was measured."""


def sample_profiles(
    rows: Tensor, positions: tuple[int, ...], *, count: int = PROFILES, scale: float = SCALE, seed: int, key: Key
) -> ProfileSample:
    """Return at most `count` measured and `count` generated profiles of a head's `rows [N, R, T]` at R positions.

    At each position a Dirichlet distribution with concentration scale `scale` is fitted to the N binned vectors, and
    draws its share of the generated ones (paper, appendix).
    """
    binned = torch.stack([distance_profile(rows[:, at], row) for at, row in enumerate(positions)], 1)
    each = -(-count // len(positions))
    drawn = [
        dirichlet_rows(binned[:, at], each, seed=seed, key=(*key, row), scale=scale) for at, row in enumerate(positions)
    ]
    generator = torch.Generator().manual_seed(seed)
    measured, generated = binned.flatten(0, 1), torch.cat(drawn)
    return ProfileSample(
        measured=measured[torch.randperm(len(measured), generator=generator)[:count]],
        generated=generated[torch.randperm(len(generated), generator=generator)[:count]],
        mean=binned.mean((0, 1)),
    )


def project_profiles(sample: ProfileSample, *, seed: int, reducer: Any = None) -> dict[str, np.ndarray]:
    """Return points in the plane: `measured [n, 2]`, `generated [m, 2]` and `mean [1, 2]`.

    Square roots are taken, each coordinate is standardised by the measured profiles, the map is fitted to them alone,
    and the others are projected with it. Distances in the plane are no test (paper, appendix).

    Args:
        sample: What `sample_profiles` returns.
        seed: Of the map.
        reducer: What fits the map, with `fit_transform` and `transform`; `umap_reducer(seed)` if not given.
    """
    reducer = umap_reducer(seed) if reducer is None else reducer
    roots = {
        "measured": sample.measured.double().sqrt(),
        "generated": sample.generated.double().sqrt(),
        "mean": sample.mean.double().sqrt()[None],
    }
    center, width = roots["measured"].mean(0), roots["measured"].std(0)
    # A bin that no measured profile fills, or all alike, tells nothing apart.
    width = torch.where(width > 0, width, 1.0)
    scaled = {name: ((values - center) / width).numpy() for name, values in roots.items()}
    points = {"measured": reducer.fit_transform(scaled["measured"])}
    return points | {name: reducer.transform(scaled[name]) for name in ("generated", "mean")}


def umap_reducer(seed: int) -> Any:
    """Return a UMAP with its own defaults; raise UnsupportedError, with what to install, when it is not there."""
    if importlib.util.find_spec("umap") is None:
        raise UnsupportedError(
            "the projection of profiles needs umap-learn, which is not installed: pip install umap-learn, or this "
            "package with its extra: pip install 'saf[analysis]'"
        )
    return importlib.import_module("umap").UMAP(random_state=seed, n_jobs=1)
