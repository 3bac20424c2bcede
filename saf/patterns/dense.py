"""The dense pattern: a causal matrix `[T, T]` given entry by entry."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from saf.errors import InputError
from saf.patterns.pattern import check_prefix, index_leading, split_leading, told

# How far a row's sum may be from one: what rounding T entries to the dtype can add up to, with room.
_ROW_SUM_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@dataclass(frozen=True, eq=False)
class DensePattern:
    """Hold patterns entry by entry: `weights` `[..., T, T]`, causal, non-negative, rows summing to one.

    Row sums may miss one by 1e-8 in float64, 1e-4 in float32, 2e-2 in bfloat16, 5e-3 in float16.
    """

    kind: ClassVar[str] = "dense"
    trainable: ClassVar[bool] = False
    parts: ClassVar[tuple[str, ...]] = ("weights",)

    weights: Tensor

    def __post_init__(self):
        """Raise InputError naming the first property that does not hold."""
        weights = self.weights
        if weights.ndim < 2 or weights.shape[-1] != weights.shape[-2] or weights.shape[-1] == 0:
            raise InputError(f"expected weights [..., T, T], T >= 1; got {list(weights.shape)}")
        if weights.dtype not in _ROW_SUM_TOLERANCE:
            raise InputError(f"expected floating-point weights (dtype); got {weights.dtype}")
        if not bool(weights.isfinite().all()) or bool((weights < 0).any()):
            raise InputError("expected finite, non-negative weights; apply softmax or normalise the rows first")
        if bool(weights.triu(1).any()):
            raise InputError("expected a causal pattern; got weight above the diagonal: mask it and renormalise")
        error = (weights.sum(-1, dtype=torch.float64) - 1).abs()
        tolerance = _ROW_SUM_TOLERANCE[weights.dtype]
        if error.numel() and error.max().item() > tolerance:
            raise InputError(
                f"expected weights whose rows sum to 1 within {tolerance}; one misses by {error.max().item():.3g}"
            )

    @classmethod
    def stack(cls, patterns: Sequence["DensePattern"]) -> "DensePattern":
        """Join patterns of one shape along a new first dimension; raise InputError for none or several shapes."""
        if len({(pattern.weights.shape, pattern.weights.dtype) for pattern in patterns}) != 1:
            shapes = [list(pattern.weights.shape) for pattern in patterns]
            raise InputError(f"stack needs at least one pattern, all of one shape and dtype; got {shapes}")
        return cls(torch.stack([pattern.weights for pattern in patterns]))

    @property
    def length(self) -> int:
        """Return T, in tokens."""
        return self.weights.shape[-1]

    @property
    def shape(self) -> torch.Size:
        """Return the leading dimensions, without T, T."""
        return self.weights.shape[:-2]

    def __repr__(self) -> str:
        return told(self, self.weights)

    def __getitem__(self, index: Any) -> "DensePattern":
        """Index the leading dimensions; raise InputError for an index that would reach into positions."""
        return DensePattern(index_leading(self.weights, index, kept=2))

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> "DensePattern":
        """Move or round the weights."""
        return DensePattern(self.weights.to(device=device, dtype=dtype))

    def prefix(self, length: int) -> "DensePattern":
        """Return the pattern of the first `length` positions."""
        check_prefix(length, self.length)
        return DensePattern(self.weights[..., :length, :length])

    def dense(self) -> Tensor:
        """Return the weights, `[..., T, T]`."""
        return self.weights

    def compact(self) -> None:
        """Return None: entries have no key and distance logits."""

    def singles(self) -> list["DensePattern"]:
        """Return one pattern `[T, T]` a head of `[F, T, T]`, or the pattern itself; InputError for more dimensions."""
        return split_leading(self)

    def own(self) -> "DensePattern":
        """Return the pattern on the CPU, in memory that does not keep alive the batch it was a part of."""
        moved = self.to(device="cpu")
        shared = moved.weights.untyped_storage().nbytes() > moved.weights.nbytes
        return DensePattern(moved.weights.clone()) if shared else moved

    def state(self) -> dict[str, Tensor]:
        """Return the weights, `[..., T, T]`."""
        return {"weights": self.weights}

    def vectors(self) -> dict[str, Tensor]:
        """Return nothing: entries go by pairs of positions."""
        return {}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor]) -> "DensePattern":
        """Return the pattern of `state`."""
        return cls(tensors["weights"])
