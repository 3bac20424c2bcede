"""Heads and positions of tensors `[B, H, T, D]`: heads picked and joined, left padding, and queries in a cache.

Tuples of ints name heads: an index tensor would have to be sent to the device. A cache of fixed size, such as
`StaticCache` of transformers, is allocated once for all T positions; one that grows ends with the last query.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saf.errors import InputError

# Dtypes of positions: differences of unsigned ones would wrap around.
_SIGNED_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def take_heads(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Return the named heads of `x [B, H, T, D]`: a view when they are consecutive, a copy otherwise."""
    first, last = heads[0], heads[-1]
    if heads == tuple(range(first, last + 1)):
        return x if len(heads) == x.shape[1] else x[:, first : last + 1]
    # Not `x[:, list(heads)]`: that would send an index tensor to the device in every call.
    single = x.unbind(1)
    return torch.stack([single[head] for head in heads], dim=1)


def unit_stride(x: Tensor) -> Tensor:
    """Return `x` with unit stride of channels, copied where necessary."""
    return x if x.stride(-1) == 1 else x.contiguous()


def flat_heads(heads: Tensor) -> Tensor:
    """Return `[B, H, T, D]` as `[B, T, H * D]`, without a copy of heads that are stored as `[B, T, H, D]`."""
    return heads.transpose(1, 2).flatten(2)


def heads_like(x: Tensor, heads: int) -> Tensor:
    """Return uninitialised memory like `x [B, ., T, D]` for `heads`, stored as `[B, T, heads, D]`."""
    batch, _, length, dim = x.shape
    return x.new_empty(batch, length, heads, dim).transpose(1, 2)


def cached_order(slots: tuple[int, ...], num_frozen: int, linear: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the value heads that `slots` read in the order of a cache of fixed size: those of live slots come first.

    So the values of live heads are one view of the cache, as their keys are. Frozen slots in `linear` read no cache.

    >>> cached_order((0, 2, 0, 1), num_frozen=2), cached_order((0, 2, 0, 1), num_frozen=2, linear=(1,))
    ((0, 2, 1), (0, 2))
    """
    num_live = len(slots) - num_frozen
    live = sorted(set(slots[:num_live]))
    frozen = {head for slot, head in enumerate(slots[num_live:]) if slot not in linear}
    return (*live, *sorted(frozen - set(live)))


# --- parts of a layer as one tensor


def merge_slots(parts: Iterable[tuple[tuple[int, ...], Tensor]]) -> Tensor:
    """Return one tensor of heads, stored as `[B, T, H, D]`, from parts `(their slots, [B, n, T, D])`."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0][1]
    by_slot: dict[int, Tensor] = {}
    for slots, part in parts:
        by_slot.update(zip(slots, part.unbind(1), strict=True))
    return torch.stack([by_slot[slot] for slot in sorted(by_slot)], dim=2).transpose(1, 2)


def join_heads(*parts: Tensor) -> Tensor:
    """Return live heads `[B, L, T, D]` and then frozen ones `[B, F, T, D]` as one tensor, stored as `[B, T, H, D]`.

    A single part is returned as it is.
    """
    if len(parts) == 1:
        return parts[0]
    # Without gradients no custom function: compilers then see a plain concatenation.
    return _Join.apply(*parts) if torch.is_grad_enabled() else _concatenate(*parts)


def _concatenate(live: Tensor, frozen: Tensor) -> Tensor:
    # Joined as [B, T, H, D], so that `flat_heads` copies nothing before the output projection.
    return torch.cat([live.transpose(1, 2), frozen.transpose(1, 2)], dim=2).transpose(1, 2)


class _Join(torch.autograd.Function):
    """Join heads; live heads get a gradient in memory of its own, in the memory order of attention's output.

    A slice of the joint gradient would not do: cuDNN's backward pass may run a graph that it cached for gradients of
    another memory order, and read beyond memory (docs/log.md). Frozen heads take a slice.
    """

    @staticmethod
    def forward(ctx: Any, live: Tensor, frozen: Tensor) -> Tensor:
        ctx.counts = [live.shape[1], frozen.shape[1]]
        return _concatenate(live, frozen)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        live, frozen = gradients[0].transpose(1, 2).split(ctx.counts, dim=2)
        return live.contiguous().transpose(1, 2), frozen.transpose(1, 2)


def dense_product(weights: Tensor, value: Tensor) -> Tensor:
    """Return `P V`: `weights [F, >=T, >=T]`, `value [B, F, T, D]` to `[B, F, T, D]`."""
    length = value.shape[-2]
    if not torch.compiler.is_compiling():
        return torch.einsum("fqk,bfkd->bfqd", weights[:, :length, :length], value)
    # Compiled, a copy by index: a slice that may be the whole array would compile one more graph.
    position = torch.arange(length, device=value.device)
    return torch.einsum("fqk,bfkd->bfqd", weights[:, position[:, None], position], value)


# --- positions


def check_left_pad(left_pad: Tensor, batch: int, length: int) -> None:
    """Raise InputError unless `left_pad` is a position of each row, `[B]`; its values are checked on a CPU only."""
    if left_pad.shape != (batch,) or left_pad.dtype not in _SIGNED_INTEGERS:
        got = f"{left_pad.dtype} {list(left_pad.shape)}"
        raise InputError(f"left padding must be integers [{batch}], one a row; got {got}")
    if torch.compiler.is_compiling() or left_pad.device.type != "cpu":
        return  # looking at its values would wait for the device, in every layer
    if ((left_pad < 0) | (left_pad >= length)).any():
        raise InputError(f"left padding must be positions 0 to {length - 1}; got {left_pad.tolist()}")


def device_assert(condition: Tensor, message: str) -> None:
    """Let the device raise a RuntimeError where `condition` is false: compiled code cannot branch on its value."""
    torch._assert_async(condition, message)  # type: ignore[attr-defined]


def left_padding(attention_mask: Tensor, *, wait: bool = True, allow_empty: bool = False) -> Tensor | None:
    """Return the first real position of each row of a 0/1 mask `[B, T]`; None where no row is padded on the left.

    Padding on the right needs no care: real tokens never see what follows them. Raises InputError for padding between
    real tokens, and for rows without a real token. `allow_empty` admits the latter, for prompts that are read chunk by
    chunk: their last token counts as real. In compiled code, and where the host may not `wait` for the device, the
    device raises a RuntimeError instead, and positions are returned even without padding.
    """
    # A row is usable if its real tokens are consecutive: its mask then equals the range of as many from the first on.
    first = first_real_position(attention_mask)
    real = attention_mask.bool()
    position = torch.arange(real.shape[1], device=real.device)
    usable = (real == ((position >= first[:, None]) & (position < (first + real.sum(1))[:, None]))).all()
    usable = usable if allow_empty else usable & real.any(1).all()
    message = "attention_mask must have padding at the ends of each row only, and a real token in it; pad on the left"
    if torch.compiler.is_compiling() or not wait:
        device_assert(usable, message)
    elif not usable:
        raise InputError(message)
    elif not first.any():
        return None
    return first


def first_real_position(attention_mask: Tensor) -> Tensor:
    """Return the number of zeros at the start of each row of a 0/1 mask `[B, T]`, at most T - 1."""
    return (attention_mask.bool().cumsum(1) == 0).sum(1).clamp(max=attention_mask.shape[1] - 1)


def unpadded(compute: Callable[[Tensor], Tensor], value: Tensor, left_pad: Tensor | None) -> Tensor:
    """Move sequences `[B, F, T, D]` that begin at `left_pad` to position 0, compute, and move the result back."""
    # A pattern's alpha counts from a sequence's first real token, and one product serves the whole batch: so values
    # move, not patterns. Zeros behind a moved sequence are later positions, which no earlier one sees.
    if left_pad is None:
        return compute(value)
    return _shift_rows(compute(_shift_rows(value, left_pad)), -left_pad)


def _shift_rows(x: Tensor, by: Tensor) -> Tensor:
    """Move row b of `x [B, F, T, D]` left by `by[b]` positions (right when negative), filling with zeros."""
    length = x.shape[-2]
    # A gather of all rows at once: slices by row would need the positions on the host.
    source = torch.arange(length, device=x.device) + by[:, None]
    inside = (source >= 0) & (source < length)
    index = source.clamp(0, length - 1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
    return x.gather(2, index) * inside[:, None, :, None]


def visible_keys(
    first: int | Tensor, rows: int, length: int, device: torch.device, left_pad: Tensor | None = None,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """Return which of `length` keys each query sees: bool `[rows, length]`, `[B, 1, rows, length]` with left padding.

    Queries stand from position `first` on, and see the last `window` keys up to their own. A query of the padding sees
    itself alone, so that no row is empty.
    """
    key = torch.arange(length, device=device)
    query = (key[:rows] + first)[:, None]
    visible = key <= query
    if window is not None:
        visible = visible & (key > query - window)
    if left_pad is not None:
        left_pad = left_pad.to(device)
        # A row of weights without any key would be 0/0, and NaN spreads from padding into gradients.
        visible = visible & ((key >= left_pad[:, None, None, None]) | (key == query))
    return visible


class CachePosition(NamedTuple):
    """The positions of the queries of a forward pass among T keys: `count` consecutive ones from `first` on.

    In a cache of fixed size `first` is a tensor: only the device knows its value, so that a CUDA graph of one step
    serves the next. Such a cache has no keys behind the last query yet, and its value heads are in the order of
    `cached_order`.
    """

    first: int | Tensor  # `[]`, integer
    count: int
    left_pad: Tensor | None  # `[B]` first real position of each row of the batch
    visible: Tensor | None = None  # in such a cache, the positions that each query sees, bool `[B or 1, 1, Tq, T]`

    @classmethod
    def of(cls, first: Tensor, rows: int, length: int, left_pad: Tensor | None = None) -> "CachePosition":
        """Return the positions of `rows` queries from `first` on, in a cache of fixed size `length`."""
        if left_pad is not None:
            left_pad = left_pad.to(first.device).contiguous()  # as kernels read it
        visible = visible_keys(first, rows, length, first.device, left_pad)
        return cls(first, rows, left_pad, visible if visible.ndim == 4 else visible[None, None])

    @property
    def first_operands(self) -> tuple[Tensor | None, int]:
        """Return `first` as operators take it: on the device, or None and on the host."""
        return (self.first, 0) if isinstance(self.first, Tensor) else (None, self.first)

    @property
    def real(self) -> Tensor | None:
        """Return which queries are real tokens, `[B, Tq]`; None without padding."""
        if self.left_pad is None:
            return None
        return torch.arange(self.count, device=self.left_pad.device) + self.first >= self.left_pad[:, None]

    def positions_in_pattern(self, length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return positions counted from each row's first real token, where its pattern begins.

        These are positions of queries `[B or 1, count]` and of keys `[B or 1, length]`, distances `[count, length]`,
        all clamped to 0 from below; and which keys a query sees, `[B or 1, count, length]`.
        """
        query = torch.arange(self.count, device=device) + self.first
        key = torch.arange(length, device=device)
        lag = query[:, None] - key
        pad = key.new_zeros(1, 1) if self.left_pad is None else self.left_pad.to(device)[:, None]
        seen = (lag >= 0) & (key >= pad)[:, None]
        return (query - pad).clamp(min=0), (key - pad).clamp(min=0), lag.clamp(min=0), seen
