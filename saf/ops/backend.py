"""What executes frozen heads: operators `saf::*`, `Backend`, rows of P V for few queries, `Reference`, the oracle."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from saf.errors import UnsupportedError
from saf.ops.tensors import CachePosition, dense_product, merge_slots, take_heads, unpadded
from saf.patterns import CompactPattern, Pattern

# --- operators

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# At import: a search while compiled code is traced breaks the graph.
_TRITON = find_spec("triton") is not None


def has_triton() -> bool:
    """Return whether Triton is installed; it is imported only when a kernel runs."""
    return _TRITON


def uses_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether operators on operands of `dtype` run as Triton kernels on this device."""
    return device.type == "cuda" and dtype in TRITON_DTYPES and has_triton()


def operator(
    name: str, *, fake: Callable[..., Any], gradient: Callable[..., Any] | None = None,
    context: Callable[..., None] | None = None, mutates: tuple[str, ...] = (),
) -> Callable[[Callable], Any]:  # fmt: skip
    """Register a function as the operator `saf::name`, for every device, and return the operator.

    `fake` returns empty tensors of the result's true shape, strides and dtype. `gradient(ctx, *gradients)` returns the
    gradients to its arguments, from what `context(ctx, inputs, output)` has put into `ctx`. The function may change
    only arguments that it `mutates`, and returns none of its arguments.
    """

    # As `torch.library.custom_op`, without its checks in every call: those take the host longer than all the rest of an
    # operator of one launch.
    def register(function: Callable) -> Any:
        torch.library.define(f"saf::{name}", torch.library.infer_schema(function, mutates_args=mutates))
        # "default" stands for every device: the function itself chooses between Triton and PyTorch by its operands.
        torch.library.impl(f"saf::{name}", "default", function)
        torch.library.register_fake(f"saf::{name}", fake)
        if gradient is not None:
            torch.library.register_autograd(f"saf::{name}", gradient, setup_context=context)
        return getattr(torch.ops.saf, name).default

    return register


def forbid_second_derivative() -> None:
    """Raise UnsupportedError in a backward pass that is recorded to be differentiated (`create_graph=True`)."""
    # PyTorch records a backward pass, with gradients enabled, only under create_graph=True. The operators called there
    # have no gradient of their own: the second derivative would lack their part.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UnsupportedError("this gradient cannot be differentiated again; leave create_graph out")


def has_tangent(*tensors: Tensor) -> bool:
    """Return whether a tensor has a tangent (`torch.func.jvp`): registered operators would drop it silently."""
    # Asking each tensor costs the host, so first whether any level of forward mode is open: -1 means none.
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


# --- backends

Tables = dict[str, Any]
"""A backend's form of a layer's fixed patterns for values of one dtype: tensors and tuples by name.

`rows` computes the slots in the tuple `stored` from `weights`, those in `convolved` from `distance`.
"""
ValueHeads = tuple[int, ...] | None
"""The value head of every slot of a layer; None where slots and value heads correspond one to one."""


class Backend(ABC):
    """Execute frozen heads in one way. Class attributes declare its capabilities and the methods that these need."""

    how: ClassVar[str]
    """How it runs, a clause for people; {} is Triton or PyTorch."""
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    """Dtypes of values."""
    mixes_live: ClassVar[bool] = False
    """It computes live heads too, by `mixed`, and has no `rows`."""
    trains: ClassVar[bool] = False
    """It has gradients for key and distance logits: `untrainable_reason` and `forward_trainable`."""
    in_autograd: ClassVar[bool] = False
    """Autograd sees each of its operations, so that derivatives in forward mode pass too."""

    def unsupported_reason(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why the backend cannot run on `device` with values of `dtype`; None when it can."""
        return None if dtype in self.dtypes else f"values must be one of {[str(d) for d in self.dtypes]}, got {dtype}"

    @abstractmethod
    def prepare(
        self, patterns: Sequence[Any], dtypes: Sequence[torch.dtype], device: torch.device, kv_head: ValueHeads = None
    ) -> dict[torch.dtype, Tables]:
        """Return the tables of fixed patterns, one per frozen head, for values of each dtype."""

    @abstractmethod
    def forward(self, value: Tensor, tables: Tables, left_pad: Tensor | None = None) -> Tensor:
        """Return `P V` (Eq. 3), `[B, F, T, D]`, of the values `[B, F, T, D]` that the slots read.

        Sequences begin at `left_pad [B]`; outputs before it are zero. Gradients are listed in saf/ops/__init__.py.
        """

    def rows(self, value: Tensor, heads: tuple[int, ...], tables: Tables, position: CachePosition) -> Tensor:
        """Return the rows of `forward` at `position`, `[B, F, count, D]`; slot f reads head `heads[f]` of the values.

        Values behind the last row may be anything finite.
        """
        parts = []
        for slots, weights_at in ((tables["stored"], _stored_weights), (tables["convolved"], _compact_weights)):
            if slots:
                slot_heads = tuple(heads[slot] for slot in slots)
                parts.append((slots, _row_product(weights_at, tables, value, slot_heads, position)))
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

# Most rows of a pattern and most weights of all heads in memory at once, 256 MiB in float32. Chosen, not measured.
MOST_ROWS, MOST_WEIGHTS = 128, 1 << 26


def _stored_weights(tables: Tables, query: Tensor, key: Tensor, _: Tensor) -> Tensor:
    """Return stored weights `[F, B or 1, count, T]`; positions are those of `CachePosition.positions_in_pattern`."""
    return tables["weights"][:, query[:, :, None], key[:, None, :]]


def _compact_weights(tables: Tables, query: Tensor, key: Tensor, lag: Tensor) -> Tensor:
    """Return the same of compact patterns: `exp(rho(i - j)) exp(alpha(j)) / Z(i)` (Eq. 3)."""
    key_scale, row_scale = tables["key_scale"], tables["row_scale"]
    # In the scalings' dtype, float32 at least: three factors in 16 bits would be rounded three times.
    by_distance = tables["distance"][:, lag].to(row_scale.dtype)[:, None]
    return by_distance * key_scale[:, key][:, :, None] * row_scale[:, query][..., None]


def _row_product(
    weights_at: Callable[..., Tensor], tables: Tables, value: Tensor, heads: tuple[int, ...], position: CachePosition
) -> Tensor:
    """Return rows of `P V`, block by block."""
    parts, most = [], MOST_ROWS
    if not torch.compiler.is_compiling():  # a compiler may leave lengths open, and a bound on them would be a guard
        # Padded sequences begin at positions of their own, so that each has weights of its own.
        sequences = 1 if position.left_pad is None else max(1, len(value))
        weights_of_row = len(heads) * value.shape[-2] * sequences
        most = max(1, min(most, MOST_WEIGHTS // weights_of_row))
    for row in range(0, max(1, position.count), most):  # one empty block where there are no queries
        block = CachePosition(position.first + row, min(most, position.count - row), position.left_pad)
        query, key, lag, seen = block.positions_in_pattern(value.shape[-2], value.device)
        # `masked_fill`, not a product with the mask: weights of positions that no query sees may be infinite.
        weights = weights_at(tables, query, key, lag).transpose(0, 1).masked_fill(~seen[:, None], 0).to(value.dtype)
        parts.append(_weighted_sum(weights, value, heads))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _weighted_sum(weights: Tensor, value: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Return `weights [B or 1, F, n, T]` times the values that slots read."""
    if heads == tuple(range(heads[0], heads[-1] + 1)):
        return weights @ take_heads(value, heads)
    # Heads in another order take a product each, of all slots that read one head: a single one would copy the values.
    parts = []
    for head in sorted(set(heads)):
        slots = tuple(slot for slot, each in enumerate(heads) if each == head)
        flat = take_heads(weights, slots).flatten(1, 2) @ value[:, head]
        parts.append((slots, flat.unflatten(1, (len(slots), -1))))
    return merge_slots(parts)


# --- the oracle of all backends: dense patterns, eager PyTorch, any floating dtype; no gradient code: autograd


class Reference(Backend):
    """Execute frozen heads as one dense matrix product a head, of `weights [F, T, T]`."""

    how = "dense T x T patterns and a matrix product per head (the oracle: exact, slow, large)"
    trains = True
    in_autograd = True

    def prepare(
        self, patterns: Sequence[Pattern], dtypes: Sequence[torch.dtype], device: torch.device,
        kv_head: ValueHeads = None,
    ) -> dict[torch.dtype, Tables]:  # fmt: skip
        exact = [_weights(one) for one in patterns]
        prepared: dict[torch.dtype, Tables] = {}
        for dtype in dtypes:
            weights = torch.stack([one.to(device=device, dtype=dtype) for one in exact])
            prepared[dtype] = {"weights": weights, "stored": tuple(range(len(patterns))), "convolved": ()}
        return prepared

    def forward(self, value: Tensor, tables: Tables, left_pad: Tensor | None = None) -> Tensor:
        return unpadded(lambda x: dense_product(tables["weights"], x), value, left_pad)

    def forward_trainable(self, value: Tensor, alpha: Tensor, rho: Tensor) -> Tensor:
        """P is computed in float64, the product in float32 at least, and autograd does the rest."""
        length = value.shape[-2]
        position = torch.arange(length, device=value.device)
        lag = position[:, None] - position
        scores = alpha.double()[:, None, :length] + rho.double()[:, lag.clamp(min=0)]
        weights = scores.masked_fill(lag < 0, -torch.inf).softmax(-1)  # Eq. (3): Z is the sum of the row
        wide = torch.promote_types(value.dtype, torch.float32)
        return (weights.to(wide) @ value.to(wide)).to(value.dtype)


def _weights(pattern: Pattern) -> Tensor:
    """Return P, `[T, T]`, of Eq. (3); a compact one is normalised anew in float64."""
    compact = pattern.compact()
    if compact is None:
        return pattern.dense()
    # A fit in float32 carries a rounded log Z; the oracle's rows sum to one in float64.
    return CompactPattern.from_parameters(compact.alpha.double(), compact.rho.double()).dense()
