"""Live and frozen heads of a layer in one call of a backend: always, or in inference; when that is, and the call."""

import torch
from torch import Tensor

from saf.errors import InputError, UnsupportedError
from saf.ops.backends import BACKENDS
from saf.ops.frozen_heads import FrozenHeads
from saf.ops.live import check_kernel
from saf.ops.positions import check_positions
from saf.ops.settled import layout_of_call
from saf.ops.value_heads import live_value_heads


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
    layout = layout_of_call(query, key, value, scale, backend, kernel, projection is None)
    known = frozen.settled.find(layout, frozen._buffers) if layout else None
    if known is not None:
        run, read = known
        return run(query, key, value, read, projection)
    frozen.check_call(value, backend)
    tables = frozen.tables(value.dtype)
    if not module.infers(value.device, value.dtype, tables):
        return None
    live_heads = live_value_heads(query, key, value, frozen)
    check_positions(query, key, value)
    check_kernel(kernel)
    operands = query.to(value.dtype), key.to(value.dtype), value  # as autocast does for SDPA: rotated ones may be wider
    slots = live_heads, frozen.value_heads(value.shape[1])
    result = module.infer(*operands, *slots, tables, scale, kernel, projection)
    if layout and not frozen.settled.stays(layout):
        run, read = module.settle(query, key, value, *slots, tables, scale, kernel) or (None, ())
        frozen.settled.keep(layout, run, read, frozen._buffers)
    return result


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
