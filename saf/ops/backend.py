"""What a backend of frozen heads is: a class that says what it can do beside mixing values by fixed patterns."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from saf.patterns import Pattern

Tables = dict[str, Any]
"""What a backend's `prepare` made for one dtype of values: tensors, or tuples of ints, by name."""


class PreparedHeads(nn.Module):
    """Stand at the base of `FrozenHeads`, so that what it is given to can tell it from anything else."""


class Backend(ABC):
    """Execute frozen heads in one way, and say what else this backend can do.

    A subclass defines the four abstract methods and is final. A capability is a class attribute set to True together
    with the methods named beside it, which nobody calls on a backend that does not declare it.
    """

    mixes_live: ClassVar[bool] = False
    """Whether it computes live heads in the launch of frozen ones, and has no other way: `mixed`."""
    infers: ClassVar[bool] = False
    """Whether it computes whole layers, output product included, without gradients: `can_infer` and `infer`."""
    trains: ClassVar[bool] = False
    """Whether it gives gradients to key and distance logits: `untrainable` and `forward_trainable`."""

    @abstractmethod
    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why this backend cannot run on `device` with values of `dtype`; None when it can."""

    @abstractmethod
    def describe(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return in words how it runs on `device` with values of `dtype`, where it can."""

    @abstractmethod
    def prepare(
        self,
        patterns: Sequence[Pattern],
        dtype: torch.dtype,
        device: torch.device,
        kv_head: tuple[int, ...] | None = None,
    ) -> Tables:
        """Return the tables that execute one fixed pattern per frozen head, for values of `dtype`.

        `kv_head`, when known, names the value head of every slot of the layer.
        """

    @abstractmethod
    def forward(self, value: Tensor, tables: Tables, rows: int) -> Tensor:
        """Return `P V` (Eq. 3) of the last `rows` positions: `value [B, F, T, D]` to `[B, F, rows, D]`."""

    def mixed(self, query: Tensor, key: Tensor, value: Tensor, tables: Tables, scale: float | None) -> Tensor:
        """Return all slots, `[B, H, T, D]`, of `query [B, L, T, D]`, `key [B, K, T, D]`, `value [B, H_kv, T, D]`."""
        raise NotImplementedError

    def can_infer(self, device: torch.device, dtype: torch.dtype, tables: Tables) -> bool:
        """Return whether `infer` serves these tables, and gains anything on `device`."""
        raise NotImplementedError

    def infer(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        live_heads: tuple[int, ...],
        frozen_heads: tuple[int, ...],
        tables: Tables,
        scale: float | None,
        kernel: str,
        projection: Tensor | None,
        *,
        replayed: bool,
    ) -> Tensor:
        """Return all heads of a layer, `[B, H, T, D]`, or what `projection [C, H * D]` makes of them, `[B, T, C]`.

        Sequences are whole and need no gradients. `live_heads` and `frozen_heads` name the value head of each slot;
        `replayed` tells that a CUDA graph will launch what this call launches.
        """
        raise NotImplementedError

    def untrainable(self, alpha: Tensor, rho: Tensor, dtype: torch.dtype) -> str | None:
        """Return why logits `[F, T]` cannot be trained with values of `dtype`; None when they can."""
        raise NotImplementedError

    def forward_trainable(self, value: Tensor, alpha: Tensor, rho: Tensor, rows: int) -> Tensor:
        """Return `forward` of the patterns with logits `[F, >=T]`, with gradients to values and logits."""
        raise NotImplementedError
