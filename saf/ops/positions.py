"""Positions of a batch: what query, key and value must have in common, and padding."""

import torch
from torch import Tensor

from saf.arguments import check
from saf.errors import InputError


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
    if keyed[2] != valued[2] or asked[2] > valued[2]:
        raise InputError(
            f"key and value need the same positions, query their last ones; got {_shapes(query, key, value)}"
        )


def _shapes(*tensors: Tensor) -> str:
    """Return the shapes in words, for messages."""
    return "query {}, key {}, value {}".format(*(tuple(tensor.shape) for tensor in tensors))


def check_start(start: Tensor, batch: int, length: int, *, wait: bool) -> None:
    """Raise InputError unless `start` is a position of each row, `[B]`.

    Values go unchecked in compiled code, and on another device unless the host may `wait` for it.
    """
    if not isinstance(start, Tensor):
        check("start", start, Tensor)
    if start.shape != (batch,) or start.is_floating_point():
        raise InputError(f"start must be integers [{batch}], one a row; got {start.dtype} {list(start.shape)}")
    if torch.compiler.is_compiling() or not (wait or start.device.type == "cpu"):
        return
    if ((start < 0) | (start >= length)).any():
        raise InputError(f"start must be positions 0 to {length - 1}; got {start.tolist()}")


def assert_later(condition: Tensor, message: str) -> None:
    """Let the device raise a RuntimeError where `condition` is false: for compiled code, which cannot look at it."""
    torch._assert_async(condition, message)  # type: ignore[attr-defined]


def left_padding(attention_mask: Tensor) -> Tensor | None:
    """Return the first real position of each row of a 0/1 mask `[B, T]`; None where no row is padded on the left.

    Padding on the right is never seen by the real tokens before it, so that it is computed as they are. Raises
    InputError for padding between real tokens, and for rows of padding alone. In compiled code the device raises
    instead, a RuntimeError, and positions are returned in any case.
    """
    start = first_real(attention_mask)
    real = attention_mask.bool()
    position = torch.arange(real.shape[1], device=real.device)
    usable = (real == ((position >= start[:, None]) & (position < (start + real.sum(1))[:, None]))).all()
    usable = usable & (start < real.shape[1]).all()
    message = (
        "attention_mask must mark padding at the ends of each row only, with one real token at least and none missing "
        "between real ones; to go on after a prompt, pad on the left"
    )
    if torch.compiler.is_compiling():
        assert_later(usable, message)
    elif not usable:
        raise InputError(message)
    elif not start.any():
        return None
    return start


def first_real(attention_mask: Tensor) -> Tensor:
    """Return how many zeros each row of a 0/1 mask `[B, T]` begins with."""
    return (attention_mask.bool().cumsum(1) == 0).sum(1)


def shift_rows(x: Tensor, start: Tensor) -> Tensor:
    """Move row b of `x [B, F, T, D]` left by `start[b]` positions (right when negative), filling with zeros."""
    length = x.shape[-2]
    source = torch.arange(length, device=x.device) + start[:, None]
    inside = (source >= 0) & (source < length)
    index = source.clamp(0, length - 1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
    return x.gather(2, index) * inside[:, None, :, None]
