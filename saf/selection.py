"""Which heads to freeze: global ranking by score, budgets, exclusions."""

from collections.abc import Iterable

from torch import Tensor

from saf.errors import InputError, SelectionError
from saf.heads import Head, HeadSet


def budget(rate: float, num_heads: int) -> int:
    """Return k = round(rate * heads), halves to even; raise InputError for a rate outside [0, 1]."""
    if not 0 <= rate <= 1:
        raise InputError(f"rate is a share of all heads, from 0 to 1; got {rate}")
    return round(rate * num_heads)


def ranking(scores: Tensor, exclude: Iterable[Head] = ()) -> list[Head]:
    """Return `(layer, head)` by ascending score, ties by layer and head; NaN scores and `exclude` are left out."""
    left_out = set(exclude)
    heads = [
        (value, layer, head)
        for layer, row in enumerate(scores.tolist())
        for head, value in enumerate(row)
        if value == value and (layer, head) not in left_out
    ]
    return [(layer, head) for _, layer, head in sorted(heads)]


def select(
    scores: Tensor, rate: float | None = None, *, count: int | None = None, exclude: Iterable[Head] = ()
) -> HeadSet:
    """Return the heads with the lowest scores: `round(rate * L * H)` of them, or `count`.

    `scores [L, H]` are NaN for heads that cannot be chosen. Sets of growing rates are nested. Raises InputError
    unless exactly one of rate and count is given, SelectionError when too few heads can be chosen.
    """
    if (rate is None) == (count is None):
        raise InputError("give either rate or count")
    wanted = budget(rate, scores.numel()) if rate is not None else count
    order = ranking(scores, exclude)
    if wanted is None or not 0 <= wanted <= len(order):
        raise SelectionError(f"{wanted} heads asked for; {len(order)} of {scores.numel()} can be chosen")
    return HeadSet(order[:wanted])
