"""The patterns that frozen heads have: one file a kind, what all kinds answer, and their sums.

`pattern` says what every kind answers; `compact`, `dense`, `exponential` and `trainable` are the kinds; `log_sums` adds
up compact patterns without ever forming a T x T array.
"""

from collections.abc import Mapping

from torch import Tensor

from saf.errors import CheckpointError
from saf.patterns.compact import CompactPattern
from saf.patterns.dense import DensePattern
from saf.patterns.exponential import ExponentialPattern
from saf.patterns.pattern import Pattern, pattern_for_each_head
from saf.patterns.trainable import TrainablePattern, is_trainable, trained_logits

__all__ = [
    "KINDS",
    "CompactPattern",
    "DensePattern",
    "ExponentialPattern",
    "Pattern",
    "TrainablePattern",
    "is_trainable",
    "pattern_for_each_head",
    "pattern_from_state",
    "trained_logits",
]

KINDS: dict[str, type[Pattern]] = {
    kind.kind: kind for kind in (CompactPattern, DensePattern, ExponentialPattern, TrainablePattern)
}


def pattern_from_state(tensors: Mapping[str, Tensor], *, trainable: bool = False) -> Pattern:
    """Return the pattern whose `state` these tensors are: their names tell its kind, beside whether it is trained.

    Raises CheckpointError when no kind of pattern has exactly these tensors.
    """
    for kind in KINDS.values():
        if kind.trainable == trainable and set(kind.parts) == set(tensors):
            return kind.from_state(tensors)
    expected = [f"{kind.kind}: {', '.join(kind.parts)}" for kind in KINDS.values() if kind.trainable == trainable]
    raise CheckpointError(f"expected the tensors of a pattern ({'; '.join(expected)}); got {sorted(tensors) or 'none'}")
