"""`mixed_attention` and `frozen_attention`: validation, head maps and positions; a backend does the mixing."""

import torch
from torch import Tensor

from saf.errors import InputError, UnsupportedError
from saf.ops.backends import BACKENDS
from saf.ops.frozen_heads import FrozenHeads
from saf.ops.live import live_attention


def mixed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    frozen: FrozenHeads | None,
    *,
    scale: float | None = None,
    backend: str = "auto",
    start: Tensor | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Attention of one layer whose heads are partly frozen, in slot order: live heads first.

    Args:
        query: `[B, L, Tq, D]`, the live heads only; the last `Tq` of `T` positions.
        key: `[B, K, T, D]`, ascending, only the KV heads that some live head uses.
        value: `[B, H_kv, T, D]`, every value head.
        frozen: The `F` frozen heads, or None for ordinary attention.
        scale: Score scale of live heads; `1/sqrt(D)` by default.
        backend: `"auto"` or the name of the backend that `frozen` was prepared for.
        start: `[B]` first real position of each row (left padding); outputs before it are zero.
        kernel: SDPA kernel of live heads: `"auto"`, `"cudnn"`, `"flash"`, `"efficient"`, `"math"`; `"fa3"` or `"fa4"`
            where the package is installed.

    Returns:
        `[B, L + F, Tq, D]`.

    Raises:
        InputError: Shapes that do not fit, inputs longer than the patterns, another backend than prepared.
    """
    if frozen is not None and query.shape[1] and frozen.mixes_live:
        return _mixed_together(query, key, value, frozen, scale, backend, start, kernel)
    live, mixed = split_attention(query, key, value, frozen, scale=scale, backend=backend, start=start, kernel=kernel)
    return torch.cat([part for part in (live, mixed) if part is not None], dim=1)


def split_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    frozen: FrozenHeads | None,
    *,
    scale: float | None = None,
    backend: str = "auto",
    start: Tensor | None = None,
    kernel: str = "auto",
) -> tuple[Tensor | None, Tensor | None]:
    """`mixed_attention` with live `[B, L, Tq, D]` and frozen `[B, F, Tq, D]` outputs apart (None when empty).

    A model that splits its output projection the same way copies nothing together.
    """
    num_live, num_frozen = query.shape[1], 0 if frozen is None else frozen.num_frozen
    if frozen is not None and num_live and frozen.mixes_live:
        output = _mixed_together(query, key, value, frozen, scale, backend, start, kernel)
        return output[:, :num_live], output[:, num_live:]
    live_kv = _live_value_heads(num_live, num_frozen, value.shape[1], frozen)
    live = mixed = None
    if num_live:
        live_key, live_value = _expand(key, value, live_kv)
        if frozen is not None and start is None and _runs_beside(query, value, frozen):
            frozen.check_call(value, backend)
            selected = take_heads(value, frozen.value_heads(value.shape[1]))
            tables = frozen.tables(value.dtype)
            return BACKENDS[frozen.backend].beside(query, live_key, live_value, selected, tables, scale, kernel)
        live = live_attention(query, live_key, live_value, scale=scale, start=start, kernel=kernel)
    if frozen is not None:
        mixed = frozen_attention(value, frozen, backend=backend, start=start, rows=query.shape[-2])
    return live, mixed


def _runs_beside(query: Tensor, value: Tensor, frozen: FrozenHeads) -> bool:
    """Whether live and frozen heads run at the same time: whole sequences, no gradients, a backend that can."""
    backend = BACKENDS[frozen.backend]
    if torch.is_grad_enabled() or not hasattr(backend, "beside") or frozen.trainable:
        return False
    return query.shape[-2] == value.shape[-2] and backend.runs_beside(
        value.device, value.dtype, frozen.tables(value.dtype)
    )


def frozen_attention(
    value: Tensor,
    frozen: FrozenHeads,
    *,
    backend: str = "auto",
    start: Tensor | None = None,
    rows: int | None = None,
) -> Tensor:
    """The frozen heads alone, `P V` (Eq. 3): `value [B, H_kv, T, D]` to `[B, F, T, D]`.

    `frozen.kv_head` says which value head each frozen slot reads (in order when `H_kv = F`); `rows` keeps the
    last positions only; `start` is as in `mixed_attention`. Raises InputError as `mixed_attention` does.
    """
    frozen.check_call(value, backend)
    length = value.shape[-2]
    selected = take_heads(value, frozen.value_heads(value.shape[1]))
    rows = length if rows is None else rows
    if start is None:
        return _mix(selected, frozen, rows)
    shifted = _shift(selected, start.to(value.device))
    mixed = _shift(_mix(shifted, frozen, length), -start.to(value.device))
    return mixed[:, :, length - rows :]


def _mix(value: Tensor, frozen: FrozenHeads, rows: int) -> Tensor:
    """Mix `value [B, F, T, D]` by the backend, fixed and trainable patterns apart, and keep the last `rows`."""
    backend, tables = BACKENDS[frozen.backend], frozen.tables(value.dtype)
    if not frozen.trainable:
        return backend.forward(value, tables, rows)
    alpha, rho = frozen.logits()
    if not frozen.fixed:
        return backend.forward_trainable(value, alpha, rho, rows)
    fixed, trainable = list(frozen.fixed), list(frozen.trainable)
    output = value.new_empty(value.shape[0], rows, value.shape[1], value.shape[3]).transpose(1, 2)
    output[:, fixed] = backend.forward(value[:, fixed], tables, rows)
    output[:, trainable] = backend.forward_trainable(value[:, trainable], alpha, rho, rows)
    return output


def _mixed_together(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    frozen: FrozenHeads,
    scale: float | None,
    backend: str,
    start: Tensor | None,
    kernel: str,
) -> Tensor:
    """Let a backend that computes live heads too do all of them."""
    frozen.check_call(value, backend)
    if start is not None or query.shape[-2] != value.shape[-2] or kernel != "auto":
        raise UnsupportedError(
            f"backend {frozen.backend!r} computes live heads itself, over whole sequences: no left padding, no "
            f"shorter query, no choice of kernel (got {kernel!r}); install_ with backend='toeplitz' for those"
        )
    if frozen.kv_head is None:
        raise InputError(f"backend {frozen.backend!r} needs kv_head; pass it to FrozenHeads.from_patterns")
    return BACKENDS[frozen.backend].mixed(query, key, value, frozen.tables(value.dtype), scale)


def take_heads(value: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Select value heads: a view when they are consecutive, a copy otherwise."""
    first, last = heads[0], heads[-1]
    if heads == tuple(range(first, last + 1)):
        return value[:, first : last + 1]
    return value[:, list(heads)]


def _live_value_heads(
    num_live: int, num_frozen: int, num_value_heads: int, frozen: FrozenHeads | None
) -> tuple[int, ...]:
    """The value head of each live slot."""
    num_heads = num_live + num_frozen
    if frozen is None or frozen.kv_head is None:
        if num_value_heads == num_heads:
            return tuple(range(num_live))
        if frozen is None and num_live % num_value_heads == 0:
            group = num_live // num_value_heads
            return tuple(slot // group for slot in range(num_live))
        raise InputError(
            f"{num_live} live and {num_frozen} frozen heads over {num_value_heads} value heads need kv_head; "
            "pass it to FrozenHeads.from_patterns"
        )
    if len(frozen.kv_head) != num_heads:
        raise InputError(
            f"kv_head has {len(frozen.kv_head)} slots, query and frozen heads make {num_live} + {num_frozen}"
        )
    return frozen.kv_head[:num_live]


def _expand(key: Tensor, value: Tensor, live_kv: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Give live heads their keys and values: grouped when every group has the same size, else one per head."""
    used = sorted(set(live_kv))
    if key.shape[1] != len(used):
        raise InputError(f"key holds the {len(used)} KV heads that live heads use, ascending; got {key.shape[1]}")
    if len(used) == len(live_kv) or live_kv == tuple(sorted(used * (len(live_kv) // len(used)))):
        return key, take_heads(value, tuple(used))
    return key[:, [used.index(head) for head in live_kv]], value[:, list(live_kv)]


def _shift(x: Tensor, start: Tensor) -> Tensor:
    """Move row b of `x [B, F, T, D]` left by `start[b]` positions (right when negative), filling with zeros."""
    length = x.shape[-2]
    source = torch.arange(length, device=x.device) + start[:, None]
    inside = (source >= 0) & (source < length)
    index = source.clamp(0, length - 1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
    return x.gather(2, index) * inside[:, None, :, None]
