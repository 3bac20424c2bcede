"""How heads are ranked for freezing: one score a file, lowest frozen first."""

from collections.abc import Callable

from torch import Tensor

from saf.errors import InputError
from saf.scores.forward_kl import forward_kl
from saf.scores.variance import variance
from saf.statistics import AttentionStatistics

SCORES: dict[str, Callable[[AttentionStatistics], Tensor]] = {"variance": variance, "forward_kl": forward_kl}

__all__ = ["SCORES", "score"]


def score(statistics: AttentionStatistics, name: str = "variance") -> Tensor:
    """Return the score `[L, H]` by which heads are frozen in ascending order; NaN for heads already frozen.

    Raises InputError for an unknown name.
    """
    if name not in SCORES:
        raise InputError(f"unknown score {name!r}; expected one of {sorted(SCORES)}")
    return SCORES[name](statistics)
