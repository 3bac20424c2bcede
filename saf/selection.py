"""`select` takes the heads with the lowest scores over the whole model, one by one or by KV groups."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from saf.errors import InputError, SelectionError, shown
from saf.heads import Head, HeadSet

Unit = tuple[Head, ...]  # heads that are chosen together: one, or the live heads of a KV group


def select(scores: Tensor, rate: float | None = None, **conditions: Any) -> HeadSet:
    """Choose the heads with the lowest scores, ties by layer and head. Sets of growing rates are nested.

    Takes the arguments of `Chooser`. Raises SelectionError where too few heads can be chosen under its conditions.
    """
    choose = Chooser(scores, rate, **conditions)
    # Here every proposal is accepted, so one call proposes them all; an event fits them in between.
    for unit in choose.propose():
        choose.accept(unit)
    if not choose.attained(len(choose.accepted)):
        possible = f"{len(choose.accepted)} of {scores.numel()} can be under these conditions"
        raise SelectionError(f"{choose.total} heads must be chosen, and {possible}: lower the rate or count")
    return HeadSet(choose.accepted)


class Chooser:
    """Propose units in order while a total and limits by layer allow; a rejected one makes room for the next.

    Proposing many single heads at a time chooses the same ones as one by one: limits on disjoint layers and a total
    form a matroid, where leaving an element out never displaces an earlier choice.

    Args:
        scores: `[L, H]`, NaN for heads that cannot be chosen.
        rate: Share of all heads: `round(rate * L * H)` of them, halves to even.
        count: Number of heads, instead of a rate.
        exclude: Heads that stay live.
        only: The heads that may be chosen; all by default.
        max_per_layer: Most heads in a layer.
        match: Take as many from each layer as this set has, instead of a rate: the random control.
        group_size: Query heads that share a KV head: choose whole groups, so that keys can go too, by the mean of their
            scores; as many groups as stay within the total.

    Raises InputError unless one of rate, count and match is set, and for heads that do not exist.
    """

    def __init__(
        self,
        scores: Tensor,
        rate: float | None = None,
        *,
        count: int | None = None,
        exclude: Iterable[Head] = (),
        only: Iterable[Head] | None = None,
        max_per_layer: int | None = None,
        match: Iterable[Head] | None = None,
        group_size: int = 1,
    ):
        if sum(each is not None for each in (rate, count, match)) != 1:
            raise InputError("pass either rate or count, or a set of heads to match by layer")
        if count is not None and count < 0:
            raise InputError(f"count must be at least 0, got {count}")
        # Infinite scores would sort, but the mean of a group of them may be NaN, which has no order.
        if scores.dim() != 2 or not scores.is_floating_point() or scores.isinf().any():
            raise InputError(f"scores must be [L, H], finite or NaN, floating point; got {shown(scores)}")
        if match is not None and max_per_layer is not None:
            raise InputError("match sets the number of heads of each layer; leave max_per_layer out")
        layers, width = scores.shape
        self._limits = [width if max_per_layer is None else max_per_layer] * layers
        if match is not None:
            matched = HeadSet(existing(scores, match))
            self._limits, count = [len(matched.in_layer(layer)) for layer in range(layers)], len(matched)
        self.total = heads_at_rate(rate or 0.0, scores.numel()) if count is None else count
        # Whole groups may miss the total by fewer heads than a group has; a matched set must be attained exactly.
        self._group_size = group_size if match is None else 1
        self._waiting = _units(scores, ranking(scores, exclude, only=only), group_size)
        self.accepted: list[Head] = []

    def propose(self) -> list[Unit]:
        """Return the next units, all of which fit within the total and the limits, and remove them from the queue."""
        taken, proposed, skipped = list(self.accepted), [], []
        for unit in self._waiting:
            layer = unit[0][0]
            if sum(at == layer for at, _ in taken) + len(unit) > self._limits[layer]:
                skipped.append(unit)
                continue
            # Groups stop at the first that is too large, so that sets of growing totals are nested.
            if len(taken) + len(unit) > self.total:
                break
            taken += unit
            proposed.append(unit)
        # Skipped units wait: where a proposed head of their layer is rejected, they fit within its limit again.
        self._waiting = skipped + self._waiting[len(skipped) + len(proposed) :]
        return proposed

    def accept(self, unit: Unit) -> None:
        """Choose a proposed unit; units that are not accepted are rejected."""
        self.accepted += unit

    def attained(self, count: int) -> bool:
        """Return whether `count` heads exhaust the total: no further group would stay within it."""
        return count > self.total - self._group_size


def heads_at_rate(rate: float, num_heads: int) -> int:
    """Return k, the number of heads at a rate, halves to even, as Python rounds; the paper says only round(r L H)."""
    if not 0 <= rate <= 1:
        raise InputError(f"rate is a share of all heads, from 0 to 1; got {rate}")
    return round(rate * num_heads)  # Eq. (S.5)


def ranking(scores: Tensor, exclude: Iterable[Head] = (), *, only: Iterable[Head] | None = None) -> list[Head]:
    """List `(layer, head)` by ascending score, ties by layer and head, without NaN scores and `exclude`."""
    excluded, allowed = existing(scores, exclude), None if only is None else existing(scores, only)
    heads = [
        (value, layer, head)
        for layer, row in enumerate(scores.tolist())
        for head, value in enumerate(row)
        # NaN, a frozen head, is the one value that is not equal to itself.
        if value == value and (layer, head) not in excluded and (allowed is None or (layer, head) in allowed)
    ]
    return [(layer, head) for _, layer, head in sorted(heads)]


def existing(scores: Tensor, heads: Iterable[Head]) -> set[Head]:
    """Return the heads as a set; raise InputError for one outside of `scores [L, H]`."""
    pairs, (layers, width) = set(HeadSet(heads)), scores.shape
    if strange := sorted(pair for pair in pairs if not (pair[0] < layers and pair[1] < width)):
        raise InputError(f"heads must exist, in {layers} layers of {width} heads; got {strange}")
    return pairs


def _units(scores: Tensor, order: list[Head], group_size: int) -> list[Unit]:
    """Return ranked heads one by one, or as whole KV groups of `group_size` consecutive heads of a layer.

    Groups come by ascending mean of their live heads' scores, ties by layer and head. A group with a live head that is
    missing from `order` is left out.
    """
    layers, width = scores.shape
    if group_size < 1 or width % group_size:
        raise InputError(f"{width} heads do not divide into KV groups of {group_size} (group_size)")
    if group_size == 1:
        return [(head,) for head in order]
    eligible, groups = set(order), []
    for layer in range(layers):
        for first in range(0, width, group_size):
            unit = [(layer, head) for head in range(first, first + group_size) if not scores[layer, head].isnan()]
            if unit and eligible.issuperset(unit):
                groups.append((sum(float(scores[head]) for head in unit) / len(unit), tuple(unit)))
    return [unit for _, unit in sorted(groups)]
