"""One entry of a head's attention over sequences, before and after the softmax, against models of how it varies."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats
from torch import Tensor

from saf.analysis.energy_distance import check_split
from saf.analysis.row_models import SCALE, Key, dirichlet_rows, gaussian_rows
from saf.errors import InputError
from saf.heads import Head
from saf.statistics import AttentionStatistics

POINTS = 101
"""Of a curve in a picture: a percent of the distribution between two."""
MODELS = ("gaussian", "dirichlet")
"""What the entry's probabilities are drawn from, beside the measured ones."""


@dataclass(frozen=True, kw_only=True)
class EntryDistribution:
    """Hold the values of one entry (query, key) on sequences that no model was fitted to, and generated ones."""

    logits: np.ndarray
    """`[M]`, ascending."""
    normal: tuple[float, float]
    """Mean and standard deviation of the normal distribution fitted to the logits of other sequences."""
    probabilities: dict[str, np.ndarray]
    """`measured [M]`, `gaussian` and `dirichlet` `[count]`, ascending."""

    @property
    def distances(self) -> dict[str, float]:
        """Return Kolmogorov-Smirnov distances from what was measured: the largest difference of distribution functions.

        `logit` to the fitted normal distribution (1 where it has no width), `gaussian` and `dirichlet` to the
        generated probabilities.
        """
        measured = self.probabilities["measured"]
        found = {"logit": _from_normal(self.logits, *self.normal)}
        for name in MODELS:
            # The statistic alone is wanted; an exact p-value would take longer than all the rest.
            found[name] = float(np.asarray(stats.ks_2samp(measured, self.probabilities[name], method="asymp"))[0])
        return found

    def curves(self, points: int = POINTS) -> dict[str, Any]:
        """Return each sample at `points` evenly spaced shares of its distribution, for pictures."""
        shares = np.linspace(0, 1, points)
        probabilities = {name: np.quantile(values, shares).tolist() for name, values in self.probabilities.items()}
        return {"logits": np.quantile(self.logits, shares).tolist(), "normal": self.normal, **probabilities}


def entry_distribution(
    rows: tuple[Tensor, Tensor],
    logits: tuple[Tensor, Tensor],
    entry: int,
    *,
    count: int = 500,
    scale: float = SCALE,
    seed: int,
    key: Key,
) -> EntryDistribution:
    """Hold key `entry` of one head's rows at one query against the Gaussian and the Dirichlet model of the row.

    `rows` and `logits` are pairs `[N, W]` of the sequences that models are fitted to and `[M, W]` of the others, all W
    keys causal. Each model generates `count` whole rows, of which the entry is taken (paper, appendix).
    """
    generated = {
        "gaussian": gaussian_rows(logits[0], count, seed=seed, key=key),
        "dirichlet": dirichlet_rows(rows[0], count, seed=seed, key=key, scale=scale),
    }
    fitted = logits[0][:, entry].double()
    return EntryDistribution(
        logits=_ascending(logits[1][:, entry]),
        normal=(float(fitted.mean()), float(fitted.std())),
        probabilities={
            "measured": _ascending(rows[1][:, entry]),
            **{name: _ascending(values[:, entry]) for name, values in generated.items()},
        },
    )


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
) -> EntryDistribution:
    """Return `entry_distribution` of a head at query `position` (from 0) and the key `distance` before it.

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
    return entry_distribution(rows, logits, position - distance, count=count, scale=scale, seed=seed, key=key)


def _from_normal(values: np.ndarray, center: float, width: float) -> float:
    return float(np.asarray(stats.ks_1samp(values, stats.norm(center, width).cdf))[0]) if width > 0 else 1.0


def _ascending(values: Tensor) -> np.ndarray:
    return values.double().sort().values.numpy()
