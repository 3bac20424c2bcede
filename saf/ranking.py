"""The order in which heads may be frozen: by ascending score over the whole model, one by one or by KV groups."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from saf.errors import InputError
from saf.heads import Head

Unit = tuple[Head, ...]
"""Heads that are chosen together: one, or the live heads of a KV group."""


def ranking(scores: Tensor, exclude: Iterable[Head] = (), *, only: Iterable[Head] | None = None) -> list[Head]:
    """Return `(layer, head)` by ascending score, ties by layer and head.

    NaN scores and `exclude` are left out; `only` names the heads that may be chosen, all if not given. Raises
    InputError for heads that do not exist.
    """
    left_out = existing(scores, exclude)
    allowed = None if only is None else existing(scores, only)
    heads = [
        (value, layer, head)
        for layer, row in enumerate(scores.tolist())
        for head, value in enumerate(row)
        if value == value and (layer, head) not in left_out and (allowed is None or (layer, head) in allowed)
    ]
    return [(layer, head) for _, layer, head in sorted(heads)]


def units(scores: Tensor, order: Sequence[Head], group_size: int = 1) -> list[Unit]:
    """Return the ranked heads one by one, or as whole KV groups of `group_size` consecutive heads of a layer.

    A group's live heads come together, by ascending mean of their scores, ties by layer and head; a group with a live
    head that is missing from `order` is left out.
    """
    if group_size < 1 or scores.shape[1] % group_size:
        raise InputError(f"{scores.shape[1]} heads do not divide into KV groups of {group_size}")
    if group_size == 1:
        return [(head,) for head in order]
    eligible = set(order)
    found = []
    for layer in range(scores.shape[0]):
        for first in range(0, scores.shape[1], group_size):
            unit = [(layer, head) for head in range(first, first + group_size) if not scores[layer, head].isnan()]
            if unit and eligible.issuperset(unit):
                found.append((sum(float(scores[head]) for head in unit) / len(unit), tuple(unit)))
    return [unit for _, unit in sorted(found)]


def existing(scores: Tensor, heads: Iterable[Head]) -> set[Head]:
    """Return the heads as a set; raise InputError for one that `scores [L, H]` has no place for."""
    named = {(int(layer), int(head)) for layer, head in heads}
    layers, width = scores.shape
    if strange := sorted(pair for pair in named if not (0 <= pair[0] < layers and 0 <= pair[1] < width)):
        raise InputError(f"the model has {layers} layers of {width} heads; got {strange}")
    return named
