"""Energy distance between generated and measured attention rows, beside that of two parts of one sample."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saf.analysis.row_models import FAMILIES, SCALE, dirichlet_rows, gaussian_rows, resampled_rows
from saf.errors import InputError
from saf.heads import Head
from saf.statistics import AttentionStatistics

ROWS = 96
"""Most rows of each side in one estimate; a matrix of distances grows with its square (docs/method.md, S.28)."""
SPLITS = 16
"""Random splits of the fitted sequences, whose upper quartile is the unit."""
SETS = 4
"""Generated sets that an estimate is averaged over."""


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


@dataclass(frozen=True, kw_only=True)
class RowDistances:
    """Hold energy distances of generated rows from measured ones at F heads and R queries, float64."""

    normalised: dict[str, Tensor]
    """By family, `[F, R]`: mean over generated sets, divided by `quartile`; NaN where no row differs from another."""
    quartile: Tensor
    """`[F, R]`: upper quartile of the energy distance between two parts of the sequences that models are fitted to."""
    rows: int
    """Rows in one estimate, of each side."""

    @property
    def medians(self) -> dict[str, float]:
        """Return the medians over heads and queries, by family."""
        return {name: float(values.nanquantile(0.5)) for name, values in self.normalised.items()}


def row_distances(
    statistics: AttentionStatistics,
    heads: Iterable[Head],
    *,
    fitted: int,
    rows: int = ROWS,
    splits: int = SPLITS,
    scale: float = SCALE,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> RowDistances:
    """Compare whole rows of the sequences after the first `fitted` with rows that models of those generate.

    Rows are compared by the energy distance of their square roots, in units of what it is between two halves of the
    fitted sequences (docs/method.md). `resampled` rows are measured ones of the fitted sequences.

    Args:
        statistics: Of `calibrate(..., collect=("rows", "logit_rows"), positions=...)`.
        heads: Heads that were collected.
        fitted: How many sequences the models are fitted to; the others are held out.
        rows: Most rows of each side in one estimate; fewer where there are fewer sequences.
        splits: Random splits of the fitted sequences.
        scale: Of Dirichlet concentrations.
        seed: Of generated rows and splits.
        progress: Called after each head with how many are done.

    Raises:
        InputError: Statistics without these rows, or too few sequences on one side.
    """
    order = list(heads)
    held = check_split(statistics.num_sequences, fitted)
    size = min(rows, fitted // 2, held)
    shape = (len(order), len(statistics.positions))
    quartile = torch.zeros(shape, dtype=torch.float64)
    found = {name: torch.zeros(shape, dtype=torch.float64) for name in FAMILIES}
    for number, head in enumerate(order):
        measured, logits = (statistics.take(name, [head])[0] for name in ("rows", "logit_rows"))
        for at, position in enumerate(statistics.positions):
            own, before = (values[:fitted, at, : position + 1] for values in (measured, logits))
            others = measured[fitted:, at, : position + 1]
            generator = torch.Generator().manual_seed(seed)
            quartile[number, at] = split_quartile(distances(own, own), rows=size, splits=splits, generator=generator)
            for run in range(SETS):
                chosen = others[torch.randperm(held, generator=generator)[:size]]
                within = distances(chosen, chosen)
                key = (*head, position, run)
                for name, drawn in _generate(own, before, size, scale, seed, key).items():
                    apart = energy_distance(distances(drawn, chosen), distances(drawn, drawn), within)
                    found[name][number, at] += apart / SETS
        if progress is not None:
            progress(number + 1)
    unit = torch.where(quartile > 0, quartile, torch.nan)
    normalised = {name: values / unit for name, values in found.items()}
    return RowDistances(normalised=normalised, quartile=quartile, rows=size)


def _generate(
    rows: Tensor, logits: Tensor, count: int, scale: float, seed: int, key: Sequence[int]
) -> dict[str, Tensor]:
    """Return `count` rows from each of the three generators, drawn from the stream that `key` names."""
    stream = tuple(key)
    return {
        "resampled": resampled_rows(rows, count, seed=seed, key=stream),
        "gaussian": gaussian_rows(logits, count, seed=seed, key=stream),
        "dirichlet": dirichlet_rows(rows, count, seed=seed, key=stream, scale=scale),
    }


def check_split(sequences: int, fitted: int) -> int:
    """Return how many sequences are held out; raise InputError for too few of them, or to be fitted to."""
    held = sequences - fitted
    if fitted < 4 or held < 2:
        raise InputError(f"models need four sequences to be fitted to and two others; got {fitted} of {sequences}")
    return held
