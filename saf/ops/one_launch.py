"""Live and frozen heads of a layer in one launch: when that is, and the call."""

from torch import Tensor

from saf.errors import InputError, UnsupportedError
from saf.ops.backends import BACKENDS
from saf.ops.frozen_heads import FrozenHeads
from saf.ops.positions import check_positions
from saf.ops.value_heads import live_value_heads


def in_one_launch(
    query: Tensor, value: Tensor, frozen: FrozenHeads, *, start: Tensor | None = None, kernel: str = "auto"
) -> bool:
    """Whether a call computes live and frozen heads in one launch; a model then projects them together too.

    So does a backend that has no other way, and another one for few tokens without gradients: whole sequences, no
    padding, no kernel named.
    """
    if not query.shape[1] or frozen.always_mixes_live:
        return query.shape[1] > 0
    return start is None and kernel == "auto" and query.shape[-2] == value.shape[-2] and frozen.mixes_live(value)


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
