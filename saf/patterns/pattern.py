"""What every kind of pattern answers, and the checks that the kinds share.

A kind of pattern is one file of this folder and one line of `KINDS` in `saf/patterns/__init__.py`; which backends
execute it is theirs to say.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from saf.errors import InputError, OutOfRangeError, shown

if TYPE_CHECKING:
    from saf.patterns.compact import CompactPattern


@runtime_checkable
class Pattern(Protocol):
    """Give a causal matrix `[T, T]` whose rows sum to one, or several of them along leading dimensions."""

    kind: ClassVar[str]
    """The name of this kind of pattern, by which `KINDS` knows it."""
    trainable: ClassVar[bool]
    """Whether the optimiser trains it."""
    parts: ClassVar[tuple[str, ...]]
    """The names of the tensors that `state` returns."""

    @property
    def length(self) -> int:
        """Return T, in tokens."""
        ...

    def prefix(self, length: int) -> "Pattern":
        """Return the pattern of the first `length` positions; raise InputError unless it has as many."""
        ...

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Pattern":
        """Return the pattern on a device, in `dtype`; a trainable one is moved in place and keeps its dtype."""
        ...

    def dense(self) -> Tensor:
        """Return the matrix entry by entry, `[..., T, T]`."""
        ...

    def compact(self) -> "CompactPattern | None":
        """Return the compact pattern that it is now, fixed; None where it has no key and distance logits."""
        ...

    def singles(self) -> Sequence["Pattern"]:
        """Return one pattern a head, from a batched pattern `[F, ...]` or from a single one."""
        ...

    def own(self) -> "Pattern":
        """Return the pattern as a layer keeps it: a fixed one on the CPU, a trainable one itself."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a file holds of it, by the names in `parts`, detached."""
        ...

    def vectors(self) -> dict[str, Tensor]:
        """Return what of it is one number a position, `[..., T]` by name: nothing of a dense pattern."""
        ...

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Return the pattern whose `state` these tensors are; raise InputError for tensors that cannot be one."""
        ...


def pattern_for_each_head(patterns: Pattern | Iterable[Pattern]) -> list[Pattern]:
    """Return one pattern a head from a batched pattern `[F, ...]`, or from a list of patterns of any kinds."""
    # Patterns first: indexing makes a batched one iterable too.
    given = [patterns] if isinstance(patterns, Pattern) else patterns
    return [single for pattern in given for single in pattern.singles()]


def told(pattern: Any, tensor: Tensor) -> str:
    """Return a pattern in one line: how many, over how many tokens, and the dtype and device of `tensor`."""
    many = " x ".join(map(str, pattern.shape))
    which = f"{many} of " if many else ""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{type(pattern).__name__}({which}{pattern.length} tokens, {dtype}, {tensor.device})"


def check_prefix(length: int, longest: int) -> None:
    """Raise InputError unless a pattern over `longest` positions has a prefix of `length`."""
    if not 1 <= length <= longest:
        raise InputError(f"prefix must have 1 to {longest} positions; got length {length}")


def index_leading(tensor: Tensor, index: Any, kept: int = 1) -> Tensor:
    """Index the leading dimensions of a tensor; raise InputError when that reaches into the `kept` last ones."""
    try:
        result = tensor[index]
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        raise OutOfRangeError(
            f"index must select among the leading dimensions {list(tensor.shape[:-kept])}; got {shown(index)}: {error}"
        ) from None
    positions = tensor.shape[-kept:]
    if result.ndim < kept or result.shape[-kept:] != positions:
        raise InputError(
            f"index must select among the leading dimensions {list(tensor.shape[:-kept])}; got {shown(index)}"
        )
    return result


def split_leading(pattern: Any) -> list[Any]:
    """Return the patterns along the one leading dimension, or the single pattern; InputError for more dimensions."""
    if not pattern.shape:
        return [pattern]
    if len(pattern.shape) != 1:
        raise InputError(f"patterns of a layer have one leading dimension [F]; got shape {pattern.shape}")
    return [pattern[index] for index in range(pattern.shape[0])]
