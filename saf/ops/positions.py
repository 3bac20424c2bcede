"""Positions of a batch: what query, key and value must have in common, padding, and places in a cache of fixed size."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from saf.errors import InputError

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
"""Dtypes of positions: those that can be subtracted below zero."""


def check_positions(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise InputError unless query `[B, L, Tq, D]`, key and value `[B, K, T, D]` fit together, with Tq at most T."""
    asked, keyed, valued = query.shape, key.shape, value.shape  # read once: each costs the host
    if not len(asked) == len(keyed) == len(valued) == 4:
        shapes = _shapes(query, key, value)
        raise InputError(f"query, key and value must be [batch, heads, positions, head_dim]; got {shapes}")
    if not asked[0] == keyed[0] == valued[0] or not asked[3] == keyed[3] == valued[3]:
        raise InputError(f"query, key and value need the same batch and head_dim; got {_shapes(query, key, value)}")
    if not query.dtype == key.dtype == value.dtype and not torch.is_autocast_enabled(value.device.type):
        raise InputError(f"query, key and value need the same dtype; got {query.dtype}, {key.dtype}, {value.dtype}")
    if keyed[2] != valued[2] or asked[2] > valued[2] or not valued[2]:
        raise InputError(
            "key and value need the same positions, one at least, query their last ones; got "
            f"{_shapes(query, key, value)}"
        )


def _shapes(*tensors: Tensor) -> str:
    """Return the shapes in words, for messages."""
    return "query {}, key {}, value {}".format(*(tuple(tensor.shape) for tensor in tensors))


def check_start(start: Tensor, batch: int, length: int, *, wait: bool) -> None:
    """Raise InputError unless `start` is a position of each row, `[B]`.

    Values go unchecked in compiled code, and on another device unless the host may `wait` for it.
    """
    if start.shape != (batch,) or start.dtype not in INTEGERS:
        raise InputError(f"start must be integers [{batch}], one a row; got {start.dtype} {list(start.shape)}")
    if torch.compiler.is_compiling() or not (wait or start.device.type == "cpu"):
        return
    if ((start < 0) | (start >= length)).any():
        raise InputError(f"start must be positions 0 to {length - 1}; got {start.tolist()}")


def assert_later(condition: Tensor, message: str) -> None:
    """Let the device raise a RuntimeError where `condition` is false: for compiled code, which cannot look at it."""
    torch._assert_async(condition, message)  # type: ignore[attr-defined]


def left_padding(attention_mask: Tensor, *, wait: bool = True, parts: bool = False) -> Tensor | None:
    """Return the first real position of each row of a 0/1 mask `[B, T]`; None where no row is padded on the left.

    Padding on the right is never seen by the real tokens before it, so that it is computed as they are. Raises
    InputError for padding between real tokens, and for rows of padding alone, unless the mask may be of `parts` of
    prompts: there such a row is computed as if its last token were real. In compiled code, and where the host may not
    `wait` for the device, the device raises instead, a RuntimeError, and positions are returned in any case.
    """
    start = first_real(attention_mask)
    real = attention_mask.bool()
    position = torch.arange(real.shape[1], device=real.device)
    usable = (real == ((position >= start[:, None]) & (position < (start + real.sum(1))[:, None]))).all()
    usable = usable if parts else usable & real.any(1).all()
    message = (
        "attention_mask must mark padding at the ends of each row only, with one real token at least and none missing "
        "between real ones; to go on after a prompt, pad on the left"
    )
    if torch.compiler.is_compiling() or not wait:
        assert_later(usable, message)
    elif not usable:
        raise InputError(message)
    elif not start.any():
        return None
    return start


def first_real(attention_mask: Tensor) -> Tensor:
    """Return how many zeros each row of a 0/1 mask `[B, T]` begins with, T - 1 at most."""
    return (attention_mask.bool().cumsum(1) == 0).sum(1).clamp(max=attention_mask.shape[1] - 1)


def shift_rows(x: Tensor, start: Tensor) -> Tensor:
    """Move row b of `x [B, F, T, D]` left by `start[b]` positions (right when negative), filling with zeros."""
    length = x.shape[-2]
    source = torch.arange(length, device=x.device) + start[:, None]
    inside = (source >= 0) & (source < length)
    index = source.clamp(0, length - 1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
    return x.gather(2, index) * inside[:, None, :, None]


BLOCK = 128
"""Rows whose weights are made at once: in float32 16 MiB a head over 32,768 keys. Chosen, not measured."""


class Rows(NamedTuple):
    """Say which rows of patterns a pass computes: those of `count` queries, one after another.

    Attributes:
        first: the place of the first query among those of the values; a tensor of one whole number, `[]`, where the
            device alone knows it.
        count: how many.
        start: `[B]` first real position of each row of the batch, or None.
    """

    first: int | Tensor
    count: int
    start: Tensor | None

    def blocks(self) -> "Iterator[Rows]":
        """Yield the same rows, at most `BLOCK` at a time; of none one block of none."""
        for row in range(0, max(1, self.count), BLOCK):
            yield Rows(self.first + row, min(BLOCK, self.count - row), self.start)

    def positions(self, length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return where queries and keys stand in their row's own pattern, how far apart, and which keys queries see.

        Queries `[B or 1, count]`, keys `[B or 1, length]`, distances `[count, length]`, none of them below 0; what is
        seen is `[B or 1, count, length]`.
        """
        query = torch.arange(self.count, device=device) + self.first
        key = torch.arange(length, device=device)
        lag = query[:, None] - key
        first = key.new_zeros(1, 1) if self.start is None else self.start.to(device)[:, None]
        seen = (lag >= 0) & (key >= first)[:, None]
        return (query - first).clamp(min=0), (key - first).clamp(min=0), lag.clamp(min=0), seen


class Places(NamedTuple):
    """Say where the queries of a pass stand among the T places of a cache of fixed size, for all layers alike.

    Places behind the last query are not filled yet and count for nothing. The device alone knows where that is: a CUDA
    graph of such a pass serves the next one. Value heads lie in `cached_order` there.

    Attributes:
        first: the place of the first query, `[]`.
        start: `[B]` first real place of each row, or None.
        visible: which places each query sees, bool `[B or 1, 1, Tq, T]`.
    """

    first: Tensor
    start: Tensor | None
    visible: Tensor

    @property
    def real(self) -> Tensor | None:
        """Return which of the queries are no padding, `[B, Tq]`; None without any."""
        if self.start is None:
            return None
        return torch.arange(self.visible.shape[2], device=self.first.device) + self.first >= self.start[:, None]

    @classmethod
    def of(cls, first: Tensor, rows: int, length: int, start: Tensor | None = None) -> "Places":
        """Return the places of `rows` queries from `first` on, among `length`."""
        key = torch.arange(length, device=first.device)
        query = (key[:rows] + first)[:, None]
        visible = (key <= query)[None, None]
        if start is not None:
            start = start.to(first.device).contiguous()  # as kernels read it
            # A query of the padding sees itself alone, so that no row is empty.
            visible = visible & ((key >= start[:, None, None, None]) | (key == query))
        return cls(first, start, visible)
