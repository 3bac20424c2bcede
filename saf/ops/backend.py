"""What a backend of frozen heads offers: `Backend`, with capabilities that a subclass declares."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from saf.ops.heads import pattern_rows
from saf.ops.positions import CachePosition

Tables = dict[str, Any]
"""What executes the fixed patterns of a layer for values of one dtype: tensors, or tuples, by name.

The tuples `stored` and `convolved` say which slots `rows` computes from `weights`, and which from `distance`.
"""
ValueHeads = tuple[int, ...] | None
"""The value head of every slot of a layer; None where slots and value heads correspond one to one."""


class Backend(ABC):
    """Execute frozen heads in one way. A capability is a class attribute and the methods named beside it."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    """Of values that it executes patterns for."""
    mixes_live: ClassVar[bool] = False
    """It computes live heads too: `mixed`. It has no `rows`."""
    trains: ClassVar[bool] = False
    """It gives gradients to key and distance logits: `untrainable_reason` and `forward_trainable`."""
    in_autograd: ClassVar[bool] = False
    """Autograd sees each of its operations, so that derivatives in forward mode pass too."""

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why it cannot run on `device` with values of `dtype`; None when it can."""
        return None if dtype in self.dtypes else f"values must be one of {[str(d) for d in self.dtypes]}, got {dtype}"

    @abstractmethod
    def describe(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return in words how it runs."""

    @abstractmethod
    def prepare(
        self, patterns: Sequence[Any], dtypes: Sequence[torch.dtype], device: torch.device, kv_head: ValueHeads = None
    ) -> dict[torch.dtype, Tables]:
        """Return the tables of one fixed `Pattern` per frozen head, for values of each dtype."""

    @abstractmethod
    def forward(self, value: Tensor, heads: tuple[int, ...], tables: Tables, left_pad: Tensor | None = None) -> Tensor:
        """Return `P V` (Eq. 3), `[B, F, T, D]`: frozen slot f mixes head `heads[f]` of `value [B, H, T, D]`.

        Sequences begin at `left_pad [B]`; outputs before it are zero. saf/ops/__init__.py says where the gradient to
        `value` is computed.
        """

    def rows(self, value: Tensor, heads: tuple[int, ...], tables: Tables, position: CachePosition) -> Tensor:
        """Return some rows of `forward`, `[B, F, count, D]`; `value` may hold anything finite behind the last one."""
        return pattern_rows(value, heads, tables, position)

    def mixed(self, query: Tensor, key: Tensor, value: Tensor, tables: Tables, scale: float | None) -> Tensor:
        """Return all slots, `[B, H, T, D]`, of `query [B, L, T, D]`, `key [B, K, T, D]`, `value [B, H_kv, T, D]`."""
        raise NotImplementedError

    def untrainable_reason(self, alpha: Tensor, rho: Tensor, dtype: torch.dtype) -> str | None:
        """Return why logits `[F, T]` cannot be trained with values of `dtype`; None when they can."""
        return None

    def forward_trainable(self, value: Tensor, alpha: Tensor, rho: Tensor) -> Tensor:
        """Return `P V` of `value [B, F, T, D]` and logits `[F, >=T]`, with gradients to all three."""
        raise NotImplementedError
