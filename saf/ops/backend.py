"""`Backend`: what executes the frozen heads of a layer, and rows of P V for a few queries in plain PyTorch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from saf.ops.heads import merge_slots, take_heads
from saf.ops.positions import CachePosition

Tables = dict[str, Any]
"""What executes the fixed patterns of a layer for values of one dtype: tensors, or tuples, by name.

The tuples `stored` and `convolved` say which slots `rows` computes from `weights`, and which from `distance`.
"""
ValueHeads = tuple[int, ...] | None
"""The value head of every slot of a layer; None where slots and value heads correspond one to one."""


class Backend(ABC):
    """Execute frozen heads in one way. A class attribute declares each capability, and names its methods."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    """Dtypes of values that it executes patterns for."""
    mixes_live: ClassVar[bool] = False
    """It computes live heads too, by `mixed`. It has no `rows`."""
    trains: ClassVar[bool] = False
    """It has gradients for key and distance logits: `untrainable_reason` and `forward_trainable`."""
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
        parts = []
        for slots, weights_of in ((tables["stored"], _dense_weights), (tables["convolved"], _compact_weights)):
            if slots:
                read = tuple(heads[slot] for slot in slots)
                parts.append((slots, _row_product(partial(weights_of, tables), value, read, position)))
        return merge_slots(parts)

    def mixed(self, query: Tensor, key: Tensor, value: Tensor, tables: Tables, scale: float | None) -> Tensor:
        """Return all slots, `[B, H, T, D]`, of `query [B, L, T, D]`, `key [B, K, T, D]`, `value [B, H_kv, T, D]`."""
        raise NotImplementedError

    def untrainable_reason(self, alpha: Tensor, rho: Tensor, dtype: torch.dtype) -> str | None:
        """Return why logits `[F, T]` cannot be trained with values of `dtype`; None when they can."""
        return None

    def forward_trainable(self, value: Tensor, alpha: Tensor, rho: Tensor) -> Tensor:
        """Return `P V` of `value [B, F, T, D]` and logits `[F, >=T]`, with gradients to all three."""
        raise NotImplementedError


# --- rows of P V in plain PyTorch, which autograd differentiates

MOST_ROWS, MOST_WEIGHTS = 128, 1 << 26
"""Most rows of patterns, and weights in these rows of all heads, in memory at once: 256 MiB in float32. Chosen, not
measured."""


def _dense_weights(tables: Tables, query: Tensor, key: Tensor, _: Tensor) -> Tensor:
    return tables["weights"][:, query[:, :, None], key[:, None, :]]


def _compact_weights(tables: Tables, query: Tensor, key: Tensor, lag: Tensor) -> Tensor:
    """Return `exp(rho(i - j)) exp(alpha(j)) / Z(i)` (Eq. 3)."""
    key_scale, row_scale = tables["key_scale"], tables["row_scale"]
    by_distance = tables["distance"][:, lag].to(row_scale.dtype)[:, None]
    return by_distance * key_scale[:, key][:, :, None] * row_scale[:, query][..., None]


def _row_product(
    weights_of: Callable[[Tensor, Tensor, Tensor], Tensor], value: Tensor, heads: tuple[int, ...],
    position: CachePosition,
) -> Tensor:  # fmt: skip
    """Return rows of `P V`, block by block.

    `weights_of(query, key, lag)` returns weights `[F, B or 1, count, T]` at what `CachePosition.in_pattern` returns.
    """
    parts, most = [], MOST_ROWS
    if not torch.compiler.is_compiling():  # where lengths may be open
        row = len(heads) * value.shape[-2] * (1 if position.left_pad is None else max(1, len(value)))
        most = max(1, min(most, MOST_WEIGHTS // row))
    for block in position.blocks(most):
        *at, seen = block.in_pattern(value.shape[-2], value.device)
        weights = weights_of(*at).transpose(0, 1).masked_fill(~seen[:, None], 0).to(value.dtype)
        parts.append(_weighed(weights, value, heads))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _weighed(weights: Tensor, value: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Return `weights [B or 1, F, n, T]` times the values that slots read: one product, or one for each head read.

    One product of heads that do not follow one another would copy their values.
    """
    if heads == tuple(range(heads[0], heads[-1] + 1)):
        return weights @ take_heads(value, heads)
    parts = []
    for head in sorted(set(heads)):
        slots = tuple(slot for slot, each in enumerate(heads) if each == head)
        flat = take_heads(weights, slots).flatten(1, 2) @ value[:, head]
        parts.append((slots, flat.unflatten(1, (len(slots), -1))))
    return merge_slots(parts)
