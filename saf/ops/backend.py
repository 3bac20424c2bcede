"""What a backend of frozen heads must offer: `Backend`, with capabilities that a subclass declares."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from saf.ops.heads import take_heads
from saf.ops.positions import QueryRows, shift_rows
from saf.patterns import Pattern

Tables = dict[str, Any]
"""What `prepare` returns for one dtype of values: tensors, or tuples of ints, by name."""
Slots = tuple[int, ...] | None
"""The value head of every slot of a layer; None where slots and value heads correspond one to one."""


class Backend(ABC):
    """Execute frozen heads in one way, and declare what else this way can do.

    A subclass defines the four abstract methods and is final. A capability is a class attribute set to True together
    with the methods named beside it; the seam calls these only on a backend that declares it.
    """

    pads: ClassVar[bool] = False
    """It computes sequences padded on the left where they lie, without moving values to position 0: `padded`."""
    mixes_live: ClassVar[bool] = False
    """It computes live heads in the launch of frozen ones, and has no other way: `mixed`."""
    decodes: ClassVar[bool] = False
    """It computes single rows of patterns, at positions that only the device may know: `rows`."""
    in_autograd: ClassVar[bool] = False
    """Autograd sees each of its operations, so that derivatives in forward mode pass too."""
    trains: ClassVar[bool] = False
    """It gives gradients to key and distance logits: `untrainable` and `forward_trainable`."""

    @abstractmethod
    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why this backend cannot run on `device` with values of `dtype`; None when it can."""

    @abstractmethod
    def describe(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return in words how it runs on `device` with values of `dtype`."""

    @abstractmethod
    def prepare(
        self, patterns: Sequence[Pattern], dtype: torch.dtype, device: torch.device, kv_head: Slots = None
    ) -> Tables:
        """Return the tables that execute one fixed pattern per frozen head, for values of `dtype`."""

    @abstractmethod
    def forward(self, value: Tensor, heads: tuple[int, ...], tables: Tables) -> Tensor:
        """Return `P V` (Eq. 3), `[B, F, T, D]`: frozen slot f mixes head `heads[f]` of `value [B, H, T, D]`."""

    def mixed(self, query: Tensor, key: Tensor, value: Tensor, tables: Tables, scale: float | None) -> Tensor:
        """Return all slots, `[B, H, T, D]`, of `query [B, L, T, D]`, `key [B, K, T, D]`, `value [B, H_kv, T, D]`."""
        raise NotImplementedError

    def padded(self, value: Tensor, heads: tuple[int, ...], tables: Tables, left_pad: Tensor) -> Tensor:
        """Return `forward` of sequences that begin at `left_pad [B]`; zeros before."""
        raise NotImplementedError

    def rows(self, value: Tensor, heads: tuple[int, ...], tables: Tables, rows: QueryRows) -> Tensor:
        """Return some rows of `forward`, `[B, F, rows.count, D]`.

        Weights of these rows are made and multiplied in plain PyTorch, which autograd differentiates. `value` may hold
        anything finite behind the last row. No value head is copied.
        """
        raise NotImplementedError

    def untrainable(self, alpha: Tensor, rho: Tensor, dtype: torch.dtype) -> str | None:
        """Return why logits `[F, T]` cannot be trained with values of `dtype`; None when they can."""
        raise NotImplementedError

    def forward_trainable(self, value: Tensor, alpha: Tensor, rho: Tensor) -> Tensor:
        """Return `P V` of `value [B, F, T, D]` and logits `[F, >=T]`, with gradients to all three."""
        raise NotImplementedError


def shifted_product(
    backend: Backend, value: Tensor, heads: tuple[int, ...], tables: Tables, left_pad: Tensor | None
) -> Tensor:
    """Return `forward` of padded sequences, moved to position 0 for it and back."""
    if left_pad is None:
        return backend.forward(value, heads, tables)
    moved = shift_rows(take_heads(value, heads), left_pad)
    return shift_rows(backend.forward(moved, tuple(range(len(heads))), tables), -left_pad)
