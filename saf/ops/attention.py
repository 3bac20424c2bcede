"""`mixed_attention`: one layer's live and frozen heads, together or apart."""

from torch import Tensor

from saf.errors import InputError
from saf.ops.frozen import mix_frozen
from saf.ops.frozen_heads import FrozenHeads
from saf.ops.live import check_kernel, live_attention
from saf.ops.positions import check_positions, check_start
from saf.ops.slots import join_heads, live_keys, part_heads, take_heads
from saf.ops.value_heads import live_value_heads
from saf.ops.whole_layer import in_one_launch, infer_layer, mix_in_one_launch


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
