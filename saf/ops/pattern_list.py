"""The patterns of one layer's frozen heads as a list, one per head, of whatever kinds."""

from collections.abc import Sequence

from saf.errors import InputError
from saf.ops.trainable_pattern import TrainablePattern
from saf.pattern import CompactPattern, DensePattern

Pattern = CompactPattern | DensePattern | TrainablePattern


def as_list(pattern: Pattern | Sequence[Pattern]) -> list[Pattern]:
    """Return one pattern per head from a batched `[F, ...]` pattern or a list of patterns."""
    if isinstance(pattern, TrainablePattern):
        return [pattern]
    if isinstance(pattern, CompactPattern | DensePattern):
        if len(pattern.shape) == 0:
            return [pattern]
        if len(pattern.shape) != 1:
            raise InputError(f"patterns of a layer have one leading dimension [F]; got shape {pattern.shape}")
        return [pattern[index] for index in range(pattern.shape[0])]
    return [single for item in pattern for single in as_list(item)]


def own(pattern: CompactPattern | DensePattern) -> CompactPattern | DensePattern:
    """Return a pattern on the CPU that does not keep the batch alive which it was a part of."""
    moved = pattern.to(device="cpu")
    if isinstance(moved, DensePattern) and moved.weights.untyped_storage().nbytes() > moved.weights.nbytes:
        return DensePattern(moved.weights.clone())
    return moved
