"""`mixed_attention` and `frozen_attention`: validation, head maps and positions; a backend does the mixing."""

from typing import Any

import torch
from torch import Tensor

from saf.errors import InputError, UnsupportedError
from saf.ops.backends import BACKENDS
from saf.ops.frozen_heads import FrozenHeads
from saf.ops.live import check_kernel, live_attention
from saf.ops.positions import check_positions, check_start
from saf.ops.slots import join_heads, put_together, take_heads


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
        InputError: Shapes that do not fit, inputs longer than the patterns, another backend than prepared, or one where
            no head is frozen.
        UnsupportedError: A backend that computes live heads itself (`fused`), asked for padding, a shorter query or a
            kernel of theirs; a kernel that cannot run here.
    """
    if frozen is not None and query.shape[1] and frozen.mixes_live:
        return _mixed_together(query, key, value, frozen, scale, backend, start, kernel)
    live, mixed = split_attention(query, key, value, frozen, scale=scale, backend=backend, start=start, kernel=kernel)
    if live is None or mixed is None:
        both = live if mixed is None else mixed
        assert both is not None
        return both
    return join_heads(live, mixed)


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

    A model that splits its output projection the same way copies nothing together. Raises as `mixed_attention` does.
    """
    num_live = query.shape[1]
    if frozen is not None and num_live and frozen.mixes_live:
        output = _mixed_together(query, key, value, frozen, scale, backend, start, kernel)
        return output[:, :num_live], output[:, num_live:]
    live_kv = _live_value_heads(query, key, value, frozen, start)
    check_kernel(kernel)
    if frozen is None and backend != "auto":
        raise InputError(f"backend {backend!r} would execute frozen heads, and there are none; leave it out")
    live = mixed = None
    if num_live:
        live_key, live_value = _expand(key, value, live_kv)
        tables = None if frozen is None or start is not None else _tables_beside(query, value, frozen)
        if frozen is not None and tables is not None:
            frozen.check_call(value, backend)
            selected = take_heads(value, frozen.value_heads(value.shape[1]))
            return BACKENDS[frozen.backend].beside(query, live_key, live_value, selected, tables, scale, kernel)
        live = live_attention(query, live_key, live_value, scale=scale, start=start, kernel=kernel)
    if frozen is not None:
        mixed = frozen_attention(value, frozen, backend=backend, start=start, rows=query.shape[-2])
    return live, mixed


def _tables_beside(query: Tensor, value: Tensor, frozen: FrozenHeads) -> dict[str, Any] | None:
    """Return the tables when live and frozen heads run at the same time, else None.

    That takes whole sequences, no gradients and a backend that can.
    """
    backend = BACKENDS[frozen.backend]
    if torch.is_grad_enabled() or not hasattr(backend, "beside") or frozen.trainable:
        return None
    if query.shape[-2] != value.shape[-2]:
        return None
    tables = frozen.tables(value.dtype)
    return tables if backend.runs_beside(value.device, value.dtype, tables) else None


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
    if not 0 <= rows <= length:
        raise InputError(f"rows are the last of {length} positions; got {rows}")
    if start is None:
        return _mix(selected, frozen, rows)
    check_start(start, value.shape[0], length, wait=False)
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
    fixed = backend.forward(take_heads(value, frozen.fixed), tables, rows)
    trained = backend.forward_trainable(take_heads(value, frozen.trainable), alpha, rho, rows)
    return put_together([(frozen.fixed, fixed), (frozen.trainable, trained)])


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
    _live_value_heads(query, key, value, frozen)
    frozen.value_heads(value.shape[1])
    # Its maps know the value heads that slots read, and no others.
    value = value[:, : max(frozen.kv_head) + 1]
    return BACKENDS[frozen.backend].mixed(query, key, value, frozen.tables(value.dtype), scale)


def _live_value_heads(
    query: Tensor, key: Tensor, value: Tensor, frozen: FrozenHeads | None, start: Tensor | None = None
) -> tuple[int, ...]:
    """Return the value head of each live slot; raise InputError for heads or positions that do not fit together."""
    num_live, num_value_heads = query.shape[1], value.shape[1]
    slots = None if frozen is None else frozen.kv_head
    num_heads = num_live + (0 if frozen is None else frozen.num_frozen)
    if slots is None:
        group = 1 if num_value_heads == num_heads else num_live // num_value_heads if num_value_heads else 0
        if num_value_heads != num_heads and (frozen is not None or group * num_value_heads != num_live):
            raise InputError(
                f"{num_live} live heads and {num_heads - num_live} frozen ones over {num_value_heads} value heads need "
                "kv_head; pass it to FrozenHeads.from_patterns"
            )
        slots = tuple(slot // group for slot in range(num_heads))
    if len(slots) != num_heads:
        raise InputError(
            f"kv_head has {len(slots)} slots, live and frozen heads make {num_live} + {num_heads - num_live}"
        )
    live = slots[:num_live]
    if num_live and key.shape[1] != len(set(live)):
        raise InputError(f"key holds the {len(set(live))} KV heads that live heads use, ascending; got {key.shape[1]}")
    check_positions(query, key if num_live else value, value)
    if start is not None:
        check_start(start, value.shape[0], value.shape[2], wait=False)
    return live


def _expand(key: Tensor, value: Tensor, live_kv: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Give live heads their keys and values: grouped when every group has the same size, else one per head."""
    used = sorted(set(live_kv))
    if len(used) == len(live_kv) or live_kv == tuple(sorted(used * (len(live_kv) // len(used)))):
        return key, take_heads(value, tuple(used))
    return take_heads(key, tuple(used.index(head) for head in live_kv)), take_heads(value, live_kv)


def _shift(x: Tensor, start: Tensor) -> Tensor:
    """Move row b of `x [B, F, T, D]` left by `start[b]` positions (right when negative), filling with zeros."""
    length = x.shape[-2]
    source = torch.arange(length, device=x.device) + start[:, None]
    inside = (source >= 0) & (source < length)
    index = source.clamp(0, length - 1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
    return x.gather(2, index) * inside[:, None, :, None]
