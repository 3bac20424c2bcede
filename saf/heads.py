"""A `HeadSet` is a set of heads of a model; a `HeadLayout` is the order in which a layer executes its heads."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from operator import index
from typing import Any

from saf.errors import InputError

Head = tuple[int, int]


def head_pairs(heads: Any) -> list[Head]:
    """Return `(layer, head)` pairs of int from pairs of any integers, such as lists of JSON, in the same order."""
    # `index` takes integers of numpy and torch, and refuses 1.0 and "1".
    return [(index(layer), index(head)) for layer, head in heads]


class HeadSet(tuple[Head, ...]):
    """Immutable set of `(layer, head)` pairs of the original model: a tuple of them in ascending order.

    >>> heads = HeadSet([(1, 0), (0, 2)])
    >>> list(heads), heads.in_layer(0)
    ([(0, 2), (1, 0)], [2])
    """

    def __new__(cls, heads: Iterable[Iterable[int]] = ()) -> "HeadSet":
        pairs = sorted(head_pairs(heads))
        # A head named twice is a mistake in a list: a set that dropped it would freeze fewer heads than asked for.
        if len(set(pairs)) != len(pairs):
            raise InputError(f"a set names each head once; got {len(pairs)} pairs, {len(set(pairs))} different")
        if any(layer < 0 or head < 0 for layer, head in pairs):
            raise InputError(f"layers and heads count from 0; got {pairs[0]}")
        return super().__new__(cls, pairs)

    def to_list(self) -> list[list[int]]:
        """Return `[[layer, head], ...]` for JSON."""
        return [[layer, head] for layer, head in self]

    def in_layer(self, layer: int) -> list[int]:
        """Return the ascending head ids of one layer."""
        return [head for at, head in self if at == layer]

    def __or__(self, other: "HeadSet") -> "HeadSet":
        return HeadSet({*self, *other})

    def __and__(self, other: "HeadSet") -> "HeadSet":
        return HeadSet(set(self) & set(other))

    def __sub__(self, other: "HeadSet") -> "HeadSet":
        return HeadSet(set(self) - set(other))

    def __repr__(self) -> str:
        return f"HeadSet({list(self)})"


# --- the rows of heads in a layer's projections

# A layer's projections. A head owns rows of the first three and columns of `output`; these are called rows, too.
ROLES = ("query", "key", "value", "output")
BIAS = "_bias"  # suffix of a role's name for its projection's bias
# Projections in which heads of a kind have rows, kinds in slot order: an edit to a kind removes the other rows.
KINDS: dict[str, tuple[str, ...]] = {"live": ROLES, "frozen": ("value", "output"), "pruned": ()}
EDITED = ("frozen", "pruned")  # the kinds that freezing and pruning make


def roles_of(name: str) -> tuple[str, ...]:
    """Return the roles whose rows a parameter of this name holds one after another.

    >>> roles_of("query_bias"), roles_of("query_key_value")
    (('query',), ('query', 'key', 'value'))
    """
    return tuple(name.removesuffix(BIAS).split("_"))


@dataclass(frozen=True)
class HeadLayout:
    """One layer's execution order: live heads first, then frozen ones, each in ascending original id, no pruned ones.

    >>> HeadLayout(4, 4, frozen=(1,), pruned=(2,)).slots
    (0, 3, 1)
    """

    num_heads: int
    num_kv_heads: int
    frozen: tuple[int, ...] = ()
    pruned: tuple[int, ...] = ()

    def __post_init__(self):
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise InputError(f"num_heads must be a positive multiple of num_kv_heads, {self.num_kv_heads}; got {self}")
        for kind in EDITED:
            heads: tuple[int, ...] = getattr(self, kind)
            if list(heads) != sorted(set(heads)) or not all(0 <= head < self.num_heads for head in heads):
                raise InputError(f"{kind} head ids must ascend within [0, {self.num_heads}); got {heads}")
        if both := set(self.frozen) & set(self.pruned):
            raise InputError(f"a head is frozen or pruned; got {sorted(both)} as both")

    # `cached_property` writes into __dict__ itself, which a frozen dataclass allows.
    @cached_property
    def live(self) -> tuple[int, ...]:
        """Original ids of the heads that compute ordinary attention."""
        return tuple(head for head in range(self.num_heads) if head not in {*self.frozen, *self.pruned})

    @property
    def ordinary(self) -> bool:
        """Whether all heads are live."""
        return not (self.frozen or self.pruned)

    def with_kind(self, heads: Iterable[int], kind: str) -> "HeadLayout":
        """Return the layout in which `heads` have become of `kind`, one of `KINDS`."""
        moved = set(heads)
        edited = {each: set(getattr(self, each)) - moved for each in EDITED}
        if kind in edited:
            edited[kind] |= moved
        return replace(self, **{each: tuple(sorted(ids)) for each, ids in edited.items()})

    @cached_property
    def rows(self) -> dict[str, tuple[int, ...]]:
        """By role, the heads whose rows the projection holds, in slot order.

        With grouped queries `key` and `value` have rows of the KV heads that some head still reads, in ascending order.
        """
        rows: dict[str, tuple[int, ...]] = dict.fromkeys(ROLES, ())
        for kind, roles in KINDS.items():
            for role in roles:
                rows[role] += getattr(self, kind)
        if self.grouped:
            # Never permuted into slot order: query heads of several slots share a KV head (see `kv_head`).
            for role in ("key", "value"):
                rows[role] = tuple(sorted(set(map(self.kv_of, rows[role]))))
        return rows

    def rows_in(self, name: str) -> tuple[tuple[str, int], ...]:
        """Return `(role, head)` of every block of rows in a parameter, in order; roles of fused ones follow each other.

        >>> HeadLayout(2, 2, frozen=(1,)).rows_in("query_value")
        (('query', 0), ('value', 0), ('value', 1))
        """
        return tuple((role, head) for role in roles_of(name) for head in self.rows[role])

    def kv_of(self, head: int) -> int:
        """Return the KV head of a query head, by the original model's numbers."""
        return head // (self.num_heads // self.num_kv_heads)

    @property
    def slots(self) -> tuple[int, ...]:
        """Original head id of each slot, a place in the order of execution."""
        return self.rows["output"]  # with grouped queries, too, these have columns of every head that is not pruned

    @property
    def num_live(self) -> int:
        return self.num_heads - len(self.frozen) - len(self.pruned)

    @property
    def num_slots(self) -> int:
        """Number of heads that are executed."""
        return self.num_heads - len(self.pruned)

    @property
    def num_frozen(self) -> int:
        return len(self.frozen)

    @property
    def grouped(self) -> bool:
        """Whether several query heads share one KV head."""
        return self.num_kv_heads != self.num_heads

    @property
    def kv_head(self) -> tuple[int, ...]:
        """Index of the value head that each slot reads, among the value heads that the layer holds."""
        # Not `kv_of` itself: KV heads that no head reads any more have no rows, so later ones move up.
        return tuple(self.rows["value"].index(self.kv_of(head)) for head in self.slots)

    @property
    def key_head(self) -> tuple[int, ...]:
        """Index of the key head that each live slot reads, among the key heads that the layer holds."""
        return tuple(self.rows["key"].index(self.kv_of(head)) for head in self.live)
