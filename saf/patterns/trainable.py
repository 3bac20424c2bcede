"""A compact pattern whose key and distance logits an optimiser trains."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from saf.errors import InputError, UnsupportedError
from saf.patterns.compact import CompactPattern
from saf.patterns.pattern import Pattern


class TrainablePattern(nn.Module):
    """Hold key logits `alpha [T]` and distance logits `rho [T]` of one head as parameters; casting keeps their dtype.

    The normalisers are no parameters: they are computed from these whenever the head is executed, Eq. (3).
    """

    kind: ClassVar[str] = "trainable"
    trainable: ClassVar[bool] = True
    parts: ClassVar[tuple[str, ...]] = ("alpha", "rho")

    def __init__(self, alpha: Tensor, rho: Tensor):
        """Take the logits as given; raise InputError unless both are float32 or both float64, of one shape `[T]`."""
        super().__init__()
        if alpha.shape != rho.shape or alpha.dim() != 1 or not len(alpha):
            raise InputError(f"expected alpha and rho [T], T >= 1; got {list(alpha.shape)} and {list(rho.shape)}")
        if alpha.dtype != rho.dtype or alpha.dtype not in (torch.float32, torch.float64):
            raise InputError(
                f"expected alpha and rho of one dtype, float32 or float64; got {alpha.dtype} and {rho.dtype}"
            )
        if not (bool(alpha.isfinite().all()) and bool(rho.isfinite().all())):
            raise InputError("alpha and rho must be finite")
        self.alpha = nn.Parameter(alpha.detach().clone())
        self.rho = nn.Parameter(rho.detach().clone())

    @classmethod
    def of(
        cls, pattern: Pattern, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> "TrainablePattern":
        """Start from a pattern `[T]`, in the balanced gauge; what tables can hold does not depend on it.

        Raises UnsupportedError for a pattern that has no key and distance logits.
        """
        start = None if pattern.kind == "exponential" else pattern.compact()
        if start is None:
            raise UnsupportedError(
                f"only key and distance logits can be trained, a {type(pattern).__name__} has none; fit a compact "
                "pattern (storage='compact'), or use trainable=False"
            )
        balanced = start.to(dtype=torch.float64, device=device).balanced()
        return cls(balanced.alpha.to(dtype), balanced.rho.to(dtype))

    @property
    def length(self) -> int:
        """Return T, in tokens."""
        return self.alpha.shape[0]

    def compact(self) -> CompactPattern:
        """Return the pattern as it is now, with the normalisers that belong to it."""
        return CompactPattern.from_parameters(self.alpha.detach().clone(), self.rho.detach().clone())

    def prefix(self, length: int) -> CompactPattern:
        """Return the fixed pattern of the first `length` positions as it is now."""
        return self.compact().prefix(length)

    def dense(self) -> Tensor:
        """Return P as it is now, `[T, T]` float64, without gradients."""
        return self.compact().dense()

    def singles(self) -> list["TrainablePattern"]:
        """Return the pattern itself: it is one head's."""
        return [self]

    def own(self) -> "TrainablePattern":
        """Return the pattern itself, whose parameters are the model's."""
        return self

    def state(self) -> dict[str, Tensor]:
        """Return alpha and rho as they are now, `[T]` each."""
        return {"alpha": self.alpha.detach().clone(), "rho": self.rho.detach().clone()}

    def vectors(self) -> dict[str, Tensor]:
        """Return alpha, rho and log_z as they are now, `[T]` each."""
        return self.compact().vectors()

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor]) -> "TrainablePattern":
        """Return the pattern of `state`."""
        return cls(tensors["alpha"], tensors["rho"])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TrainablePattern":
        """Follow the module to another device but keep the dtype."""
        for parameter in self.parameters():
            device = fn(parameter.new_empty(0, dtype=torch.float32)).device
            parameter.data = parameter.data.to(device)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(device)
        return self

    def extra_repr(self) -> str:
        """Describe the pattern when the model is printed."""
        return f"length={self.length}"

    def forward(self, *_: Any) -> Tensor:
        """Refuse: patterns are executed by a backend."""
        raise InputError("a pattern is executed by saf.frozen_attention; call compact() to look at it")


def is_trainable(pattern: Any) -> TypeGuard[TrainablePattern]:
    """Return whether a pattern is a module whose parameters an optimiser trains."""
    return pattern.trainable


def trained_logits(patterns: Iterable[Pattern]) -> list[nn.Parameter]:
    """Return the parameters of the trainable ones among these patterns: alpha and rho of each, `[T]`."""
    return [logits for one in patterns if is_trainable(one) for logits in (one.alpha, one.rho)]
