"""How attention varies over sequences, against the models that sampled patterns draw from (paper, appendix)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saf.analysis.energy import distances, energy_distance, split_quartile
from saf.analysis.entry_cdfs import EntryCDFs, entry_cdfs
from saf.analysis.row_models import FAMILIES, SCALE, dirichlet_rows, gaussian_rows, resampled_rows
from saf.errors import InputError
from saf.heads import Head
from saf.statistics import AttentionStatistics

ROWS = 96
SPLITS = 16
SETS = 4
QUERIES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
"""Shares of the length at which the paper looks."""


@dataclass(frozen=True, kw_only=True)
class RowDistances:
    """Energy distances of generated rows from measured ones at F heads and R queries, float64."""

    normalised: dict[str, Tensor]
    """By family, `[F, R]`: mean over generated sets, divided by `quartile`; NaN where no row differs from another."""
    quartile: Tensor
    """`[F, R]`: upper quartile of the energy distance between two parts of the sequences that models are fitted to."""
    rows: int
    """Rows in one estimate, of each side."""

    @property
    def medians(self) -> dict[str, float]:
        """Median over heads and queries, by family."""
        return {name: float(values.nanquantile(0.5)) for name, values in self.normalised.items()}


def query_positions(length: int) -> tuple[int, ...]:
    """Return the paper's query positions for sequences of `length` tokens, from 0: its T/16, ..., 3T/4 and T."""
    return tuple(sorted({max(1, round(share * length) - 1) for share in QUERIES}))


def row_distances(
    statistics: AttentionStatistics,
    heads: Iterable[Head],
    *,
    fitted: int,
    rows: int = ROWS,
    splits: int = SPLITS,
    sets: int = SETS,
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
        sets: Generated sets to average over.
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
            for run in range(sets):
                chosen = others[torch.randperm(held, generator=generator)[:size]]
                within = distances(chosen, chosen)
                key = (*head, position, run)
                for name, drawn in _generate(own, before, size, scale, seed, key).items():
                    apart = energy_distance(distances(drawn, chosen), distances(drawn, drawn), within)
                    found[name][number, at] += apart / sets
        if progress is not None:
            progress(number + 1)
    unit = torch.where(quartile > 0, quartile, torch.nan)
    normalised = {name: values / unit for name, values in found.items()}
    return RowDistances(normalised=normalised, quartile=quartile, rows=size)


def head_entry(
    statistics: AttentionStatistics,
    head: Head,
    position: int,
    *,
    fitted: int,
    distance: int = 1,
    count: int = 500,
    scale: float = SCALE,
    seed: int = 0,
) -> EntryCDFs:
    """Return `entry_cdfs` of a head at query `position` (from 0) and the key `distance` before it.

    The models are fitted to the first `fitted` sequences and held against the others; the remaining arguments are those
    of `row_distances`. Raises InputError as it does, and for positions that were not collected.
    """
    check_split(statistics.num_sequences, fitted)
    if position not in statistics.positions or not 0 <= distance <= position:
        raise InputError(
            f"expected a query of {statistics.positions} and a distance up to it; got {position}, {distance}"
        )
    at = statistics.positions.index(position)
    rows, logits = (
        (values[:fitted], values[fitted:])
        for values in (statistics.take(name, [head])[0][:, at, : position + 1] for name in ("rows", "logit_rows"))
    )
    key = (*head, position)
    return entry_cdfs(rows, logits, position - distance, count=count, scale=scale, seed=seed, key=key)


def _generate(
    rows: Tensor, logits: Tensor, count: int, scale: float, seed: int, key: Sequence[int]
) -> dict[str, Tensor]:
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
