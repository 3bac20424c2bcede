"""A two-dimensional view of attention profiles, measured and generated, by UMAP (optional: the extra `analysis`).

A profile is a row of attention by distance, in twelve bins: the query itself, the key before it, then powers of two.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saf.analysis.row_models import SCALE, Key, dirichlet_rows
from saf.errors import InputError, UnsupportedError

PROFILES = 512
"""Most points of each kind: enough to see a cloud's shape."""
BINS = 12
"""The last begins at distance 1,024 (paper, appendix)."""
EDGES = (0, *(2**power for power in range(BINS - 1)))
"""First distance of each bin: 0; 1; 2 to 3; 4 to 7; ...; the last takes all that is left."""


def distance_profile(rows: Tensor, position: int) -> Tensor:
    """Return the mass of rows `[..., W]` at query `position` (from 0) in each distance bin, `[..., 12]` float64.

    Keys after the query have no say. Raises InputError for rows that do not reach the query.
    """
    if not 0 <= position < rows.shape[-1]:
        raise InputError(f"rows of {rows.shape[-1]} keys have no query {position}")
    by_distance = rows[..., : position + 1].double().flip(-1)
    bins = torch.bucketize(
        torch.arange(position + 1, device=rows.device), torch.tensor(EDGES[1:]).to(rows.device), right=True
    )
    return by_distance.new_zeros(*rows.shape[:-1], BINS).index_add_(-1, bins, by_distance)


@dataclass(frozen=True, kw_only=True)
class ProfileSample:
    """Hold binned profiles of one head, pooled over query positions."""

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
