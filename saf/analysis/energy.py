"""Energy distance between two samples of attention rows, and what it is between two samples of one distribution."""

import torch
from torch import Tensor

from saf.errors import InputError


def distances(one: Tensor, other: Tensor) -> Tensor:
    """Return the Euclidean distances `[n, m]` of the square roots of rows `[n, W]` and `[m, W]`, float64.

    The square root makes them sqrt(2) times Hellinger distances.
    """
    x, y = one.double().sqrt(), other.double().sqrt()
    squared = x.square().sum(1)[:, None] + y.square().sum(1) - 2 * x @ y.T
    return squared.clamp(min=0).sqrt()


def energy_distance(between: Tensor, within_one: Tensor, within_other: Tensor) -> float:
    """Return 2 E|X - Y| - E|X - X'| - E|Y - Y'| from matrices of distances `[n, m]`, `[n, n]` and `[m, m]`.

    Expectations are means over all pairs, a row's with itself included, so the result is never negative and zero only
    for equal samples (Eq. S.28 of docs/method.md).
    """
    return float(2 * between.mean() - within_one.mean() - within_other.mean())


def split_quartile(apart: Tensor, *, rows: int, splits: int, generator: torch.Generator) -> float:
    """Return the upper quartile, over random splits, of the energy distance between two disjoint parts of one sample.

    `apart [N, N]` are the sample's own distances; each part has `rows` rows. Raises InputError when N < 2 rows.
    """
    if rows < 1 or splits < 1 or 2 * rows > len(apart):
        raise InputError(f"{len(apart)} rows hold no two parts of {rows}, {splits} times; measure more sequences")
    found = []
    for _ in range(splits):
        order = torch.randperm(len(apart), generator=generator)
        one, other = order[:rows], order[rows : 2 * rows]
        found.append(energy_distance(apart[one][:, other], apart[one][:, one], apart[other][:, other]))
    return float(torch.tensor(found, dtype=torch.float64).quantile(0.75))
