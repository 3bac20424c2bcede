"""What a frozen head's fixed pattern is made from: one pattern a file."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from saf.errors import InputError
from saf.heads import HeadSet
from saf.patterns.mean import mean
from saf.statistics import AttentionStatistics

__all__ = ["PATTERNS", "Target", "target"]


class Target(NamedTuple):
    """What a compact pattern is fitted to: marginals `[F, T]` and row-averaged entropy `[F]` (nats)."""

    eta_abs: Tensor
    eta_rel: Tensor
    row_entropy: Tensor


PATTERNS: dict[str, Callable[[AttentionStatistics, HeadSet], tuple[Tensor, Tensor, Tensor]]] = {"mean": mean}


def target(statistics: AttentionStatistics, heads: HeadSet, name: str = "mean") -> Target:
    """Return the marginals of a pattern for `heads`, in their order; raise InputError for an unknown name."""
    if name not in PATTERNS:
        raise InputError(f"unknown pattern {name!r}; expected one of {sorted(PATTERNS)}")
    return Target(*PATTERNS[name](statistics, heads))
