"""How alike two selections of one model are, for example a quarter and half through its training."""

from dataclasses import dataclass

from torch import Tensor

from saf.analysis.correlation import spearman
from saf.errors import InputError
from saf.heads import HeadSet


@dataclass(frozen=True, kw_only=True)
class Stability:
    """Overlap of two head sets, beside that of independent sets with the same number of heads in each layer."""

    first: int
    second: int
    overlap: int
    expected: float
    """Mean of the overlap if each layer's heads were drawn at random."""
    standard_deviation: float
    """Of that overlap."""
    rank_correlation: float | None
    """Spearman's, of the two scores; None without scores."""


def selection_stability(
    first: HeadSet, second: HeadSet, *, num_heads: int, scores: tuple[Tensor, Tensor] | None = None
) -> Stability:
    """Compare two head sets of a model with `num_heads` heads a layer, and the scores `[L, H]` that chose them.

    Within a layer the overlap of random sets is hypergeometric; layers are independent. Raises InputError for heads
    that do not exist.
    """
    if any(head >= num_heads for _, head in first | second):
        raise InputError(f"layers have {num_heads} heads; got {(first | second).to_list()}")
    expected = variance = 0.0
    for layer in {layer for layer, _ in first}:
        a, b = len(first.in_layer(layer)), len(second.in_layer(layer))
        expected += a * b / num_heads
        if num_heads > 1:
            variance += a * b * (num_heads - a) * (num_heads - b) / (num_heads**2 * (num_heads - 1))
    return Stability(
        first=len(first),
        second=len(second),
        overlap=len(first & second),
        expected=expected,
        standard_deviation=variance**0.5,
        rank_correlation=None if scores is None else spearman(*scores),
    )
