"""Which value head each live slot reads; `FrozenHeads.value_heads` answers the same for frozen slots."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from saf.errors import InputError, UnsupportedError
from saf.ops.backends import BACKENDS
from saf.ops.frozen_heads import FrozenHeads
from saf.ops.heads import flat_heads, join_heads, live_keys, part_heads, put_together, take_heads
from saf.ops.live import check_kernel, live_attention
from saf.ops.positions import check_positions, check_start, shift_rows


def live_value_heads(query: Tensor, key: Tensor, value: Tensor, frozen: FrozenHeads | None) -> tuple[int, ...]:
    """Return the value head of each live slot; raise InputError for heads that do not fit together."""
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
    return live


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
    return mix_frozen(take_heads(value, frozen.value_heads(value.shape[1])), frozen, start, rows)


def mix_frozen(value: Tensor, frozen: FrozenHeads, start: Tensor | None, rows: int | None) -> Tensor:
    """`frozen_attention` of values `[B, F, T, D]` that frozen slots read, in their order; calls are checked before."""
    length = value.shape[-2]
    rows = length if rows is None else rows
    if not 0 <= rows <= length:
        raise InputError(f"rows are the last of {length} positions; got {rows}")
    if start is None:
        return _mix(value, frozen, rows)
    check_start(start, value.shape[0], length, wait=False)
    shifted = shift_rows(value, start.to(value.device))
    mixed = shift_rows(_mix(shifted, frozen, length), -start.to(value.device))
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


def infer_layer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    frozen: FrozenHeads | None,
    *,
    scale: float | None = None,
    backend: str = "auto",
    start: Tensor | None = None,
    kernel: str = "auto",
    projection: Tensor | None = None,
) -> Tensor | None:
    """Return all heads, `[B, H, T, D]`, or projected by `projection [C, H * D]`, `[B, T, C]`; None where none can.

    That takes a backend which does it, fixed patterns, whole sequences without padding, no gradients, and values of the
    dtype that autocast would give them. The projection has that dtype too.
    """
    if frozen is None or frozen.trainable or torch.is_grad_enabled() or _autocasts(value):
        return None
    if start is not None or not query.shape[1] or query.shape[-2] != value.shape[-2]:
        return None
    module = BACKENDS[frozen.backend]
    if not hasattr(module, "infer"):
        return None
    frozen.check_call(value, backend)
    tables = frozen.tables(value.dtype)
    if not module.infers(value.device, value.dtype, tables):
        return None
    live_heads = live_value_heads(query, key, value, frozen)
    check_positions(query, key, value)
    check_kernel(kernel)
    operands = query.to(value.dtype), key.to(value.dtype), value  # as autocast does for SDPA: rotated ones may be wider
    slots = live_heads, frozen.value_heads(value.shape[1])
    return module.infer(*operands, *slots, tables, scale, kernel, projection)


def in_one_launch(query: Tensor, frozen: FrozenHeads | None) -> bool:
    """Whether live and frozen heads are computed in one launch because the backend has no other way."""
    return frozen is not None and query.shape[1] > 0 and frozen.always_mixes_live


def mix_in_one_launch(
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
    live_value_heads(query, key, value, frozen)
    check_positions(query, key, value)
    query, key = query.to(value.dtype), key.to(value.dtype)  # as autocast does for SDPA: rotated ones may be wider
    frozen.value_heads(value.shape[1])
    # Its maps know the value heads that slots read, and no others.
    value = value[:, : max(frozen.kv_head) + 1]
    return BACKENDS[frozen.backend].mixed(query, key, value, frozen.tables(value.dtype), scale)


def _autocasts(value: Tensor) -> bool:
    """Whether matrix products would compute in another dtype than that of `value`."""
    kind = value.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != value.dtype


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
    if frozen is not None and in_one_launch(query, frozen):
        return mix_in_one_launch(query, key, value, frozen, scale, backend, start, kernel)
    options = {"scale": scale, "backend": backend, "start": start, "kernel": kernel}
    done = infer_layer(query, key, value, frozen, **options)
    if done is not None:
        return done
    live, mixed = split_attention(query, key, value, frozen, **options)
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

    Where both are projected apart, nothing is copied together. Raises as `mixed_attention` does.
    """
    num_live = query.shape[1]
    if frozen is not None and in_one_launch(query, frozen):
        output = mix_in_one_launch(query, key, value, frozen, scale, backend, start, kernel)
        return output[:, :num_live], output[:, num_live:]
    live_kv = live_value_heads(query, key, value, frozen)
    check_positions(query, key if num_live else value, value)
    if start is not None:
        check_start(start, value.shape[0], value.shape[2], wait=False)
    check_kernel(kernel)
    if frozen is None and backend != "auto":
        raise InputError(f"backend {backend!r} would execute frozen heads, and there are none; leave it out")
    if frozen is None:
        live_key, live_heads = live_keys(key, live_kv)
        live_value = take_heads(value, live_heads)
        return live_attention(query, live_key, live_value, scale=scale, start=start, kernel=kernel), None
    frozen.check_call(value, backend)
    frozen_kv = frozen.value_heads(value.shape[1])
    if not num_live:
        return None, mix_frozen(take_heads(value, frozen_kv), frozen, start, query.shape[-2])
    live_key, live_heads = live_keys(key, live_kv)
    live_value, selected = part_heads(value, live_heads, frozen_kv)
    live = live_attention(query, live_key, live_value, scale=scale, start=start, kernel=kernel)
    return live, mix_frozen(selected, frozen, start, query.shape[-2])


JOINED = 8192 * 768
"""Size B x T x H * D up to which training joins live and frozen heads before the product.

One product and a copy then cost less than two products, whose launches outweigh their work (docs/log.md).
"""


def projected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    frozen: FrozenHeads,
    projection: Tensor,
    *,
    start: Tensor | None = None,
    kernel: str = "auto",
) -> Tensor:
    """`mixed_attention` of a layer with live and frozen heads, and the product with `projection [C, H * D]`.

    Returns `[B, Tq, C]` in the dtype of `value`, or autocast's; raises as `mixed_attention` does.
    """
    projection = projection.to(value.dtype)  # once: autocast would cast the columns of either part by themselves
    options = {"start": start, "kernel": kernel}
    done = infer_layer(query, key, value, frozen, projection=projection, **options)
    if done is not None:
        return done
    if in_one_launch(query, frozen):
        return F.linear(flat_heads(mixed_attention(query, key, value, frozen, **options)), projection)
    parts = split_attention(query, key, value, frozen, **options)
    return project_parts([part for part in parts if part is not None], projection)


def project_parts(parts: Sequence[Tensor], projection: Tensor) -> Tensor:
    """Project heads that come in parts `[B, n, T, D]`, in slot order, by `projection [C, H * D]`: `[B, T, C]`.

    Of many tokens, and without gradients, each part by a product of its own: nothing is copied together then, and
    attention's backward pass sees a gradient in the memory order of its output.
    """
    if len(parts) == 2 and torch.is_grad_enabled() and sum(part.numel() for part in parts) <= JOINED:
        parts = [join_heads(*parts)]
    columns = projection.split([part.shape[1] * part.shape[-1] for part in parts], dim=1)
    products = [F.linear(flat_heads(part), own) for part, own in zip(parts, columns, strict=True)]
    return products[0] if len(products) == 1 else products[0] + products[1]
