"""What a backend of frozen heads is: a class that says what it can do beside mixing values; a layer's `Call` of it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from saf.ops.positions import Places, Rows
from saf.patterns import Pattern

if TYPE_CHECKING:  # a call holds them; what makes them knows backends
    from saf.ops.frozen_heads import FrozenHeads

Tables = dict[str, Any]
"""What a backend's `prepare` made for one dtype of values: tensors, or tuples of ints, by name."""


class PreparedHeads(nn.Module):
    """Stand at the base of `FrozenHeads`, so that what it is given to can tell it from anything else."""


class Call(NamedTuple):
    """Hold a checked call of a layer: what a way to compute it reads, and a backend that infers.

    Attributes:
        query: `[B, L, Tq, D]`, live heads.
        key: `[B, K, T, D]`, the KV heads that live heads use.
        value: `[B, H_kv, T, D]`.
        frozen: the frozen heads, or None.
        live_slots: the value head of each live slot.
        frozen_slots: the value head of each frozen slot.
        scale: of live heads' scores; None for `1/sqrt(D)`.
        start: `[B]` first real position of each row, or None.
        places: where queries stand in a cache of fixed size, or None.
        kernel: of live heads.
        apart: whether live and frozen heads are asked for apart.
        projection: `[C, H * D]`, or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    frozen: "FrozenHeads | None"
    live_slots: tuple[int, ...]
    frozen_slots: tuple[int, ...]
    scale: float | None
    start: Tensor | None
    places: Places | None
    kernel: str
    apart: bool
    projection: Tensor | None


class Backend(ABC):
    """Execute frozen heads in one way, and say what else this backend can do.

    A subclass defines the four abstract methods and is final. A capability is a class attribute set to True together
    with the methods named beside it, which nobody calls on a backend that does not declare it.
    """

    mixes_live: ClassVar[bool] = False
    """Whether it computes live heads in the launch of frozen ones, and has no other way: `mixed`."""
    infers: ClassVar[bool] = False
    """Whether it computes whole layers, output product included, without gradients: `can_infer` and `infer`."""
    decodes: ClassVar[bool] = False
    """Whether it computes rows of patterns wherever the device says that they are: `forward_rows`."""
    in_autograd: ClassVar[bool] = False
    """Whether autograd sees each of its operations, so that derivatives in forward mode pass too."""
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

    def infer(self, call: Call, tables: Tables) -> Tensor:
        """Return all heads of a layer, `[B, H, T, D]`, or what the call's projection makes of them, `[B, T, C]`.

        Sequences are whole and need no gradients; `query` and `key` may have another dtype than `value`, whose dtype
        `tables` are of.
        """
        raise NotImplementedError

    def forward_rows(
        self, value: Tensor, heads: tuple[int, ...], tables: Tables, rows: Rows, live: Tensor | None
    ) -> Tensor:
        """Return live heads `[B, L, rows.count, D]` as given and then rows of frozen ones, `[B, L + F, rows.count, D]`.

        `value [B, H_kv, T, D]` may hold anything finite behind the last row; `heads` names the value head of each
        frozen slot. No value head is copied.
        """
        raise NotImplementedError

    def untrainable(self, alpha: Tensor, rho: Tensor, dtype: torch.dtype) -> str | None:
        """Return why logits `[F, T]` cannot be trained with values of `dtype`; None when they can."""
        raise NotImplementedError

    def forward_trainable(self, value: Tensor, alpha: Tensor, rho: Tensor, rows: int) -> Tensor:
        """Return `forward` of the patterns with logits `[F, >=T]`, with gradients to values and logits."""
        raise NotImplementedError
