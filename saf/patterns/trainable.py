"""A compact pattern whose key and distance logits an optimiser trains."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from saf.errors import InputError
from saf.patterns.compact import CompactPattern


class TrainablePattern(nn.Module):
    """Key logits `alpha [T]` and distance logits `rho [T]` of one head as parameters; they keep their dtype when cast.

    The normalisers are no parameters: they are computed from these whenever the head is executed, Eq. (3).
    """

    def __init__(self, alpha: Tensor, rho: Tensor):
        """Take the logits as given; raise InputError unless both are float32 or both float64, of one shape `[T]`."""
        super().__init__()
        if alpha.shape != rho.shape or alpha.dim() != 1 or not len(alpha):
            raise InputError(f"expected alpha and rho [T], T >= 1; got {list(alpha.shape)} and {list(rho.shape)}")
        if alpha.dtype != rho.dtype or alpha.dtype not in (torch.float32, torch.float64):
            raise InputError(f"expected float32 or float64 logits of one dtype; got {alpha.dtype} and {rho.dtype}")
        self.alpha = nn.Parameter(alpha.detach().clone())
        self.rho = nn.Parameter(rho.detach().clone())

    @classmethod
    def of(
        cls, pattern: CompactPattern, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> "TrainablePattern":
        """Start from a fixed pattern `[T]`, in the balanced gauge; what tables can hold does not depend on it."""
        balanced = pattern.to(dtype=torch.float64, device=device).balanced()
        return cls(balanced.alpha.to(dtype), balanced.rho.to(dtype))

    @property
    def length(self) -> int:
        """T, in tokens."""
        return self.alpha.shape[0]

    def compact(self) -> CompactPattern:
        """Return the pattern as it is now, with the normalisers that belong to it."""
        return CompactPattern.from_parameters(self.alpha.detach().clone(), self.rho.detach().clone())

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
