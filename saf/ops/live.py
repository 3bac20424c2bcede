"""Live heads: causal softmax attention by a kernel of PyTorch, which callers may pin by name.

`live_attention` computes it; `pinned` is the context in which SDPA runs one kernel only. "flash" is PyTorch's own, or
the one that `torch.nn.attention.activate_flash_attention_impl` has put in its place.
"""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from saf.errors import UnsupportedError, check_name
from saf.ops.tensors import take_heads, visible_keys

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# The launch of saf/ops/flash_decode, for few queries after a cache; longer passes take PyTorch's kernels.
FLASH_DECODE = "flash_decode"


def live_attention(
    query: Tensor, key: Tensor, value: Tensor, *, live_kv: tuple[int, ...] | None = None, scale: float | None = None,
    left_pad: Tensor | None = None, kernel: str = "auto", window: int | None = None, soft_cap: float | None = None,
    visible: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return causal softmax attention `[B, L, Tq, D]` of `query [B, L, Tq, D]` over `key`, `value` `[B, K, Tk, D]`.

    Consecutive query heads share a key head, so `L` must be a multiple of `K`. Or `live_kv` names the head of `value`
    that each query head reads; `key` then has these heads alone, ascending. Queries are the last `Tq` positions.
    `left_pad [B]` is the first real position of each row; outputs before it are zero. With a `window` a query sees that
    many keys, its own included. `visible`, bool `[B or 1, 1, Tq, Tk]`, says instead of both which keys each query sees;
    outputs of padding may then be anything finite. A `soft_cap` c makes each logit `c * tanh(logit / c)`, which no SDPA
    kernel computes: patterns are materialised, in float32 at least. Raises InputError for an unknown kernel,
    UnsupportedError for one that cannot run here or has no soft cap.
    """
    slots = None
    if live_kv is not None:
        query, key, value, slots = _equal_groups(query, key, value, live_kv)
    # No mask where sequences are whole or one query sees every key: cuDNN and flash attention skip the upper triangle
    # for `is_causal`, and PyTorch's flash kernel takes no mask at all.
    heads, rows, columns = query.shape[1], query.shape[-2], key.shape[-2]
    mask, causal = visible, False
    windowed = window is not None and columns > window
    if visible is not None:
        left_pad = None
    elif left_pad is not None or windowed or soft_cap is not None or (rows != columns and rows != 1):
        mask = visible_keys(columns - rows, rows, columns, query.device, left_pad, window)
    elif rows > 1:  # not `causal = rows > 1`: with lengths left open by the compiler that is no bool
        causal = True
    if soft_cap is not None:
        assert mask is not None  # a soft cap takes the branch with a mask
        output = _capped_attention(query, key, value, mask, scale, soft_cap, kernel)
    else:
        grouped = heads != key.shape[1]
        if grouped and rows == 1:
            # A group's queries become rows of one head, so that every kernel reads its keys once and none copies them:
            # `enable_gqa` repeats keys in PyTorch's math kernel.
            grouped, group = False, heads // key.shape[1]
            query = query.reshape(query.shape[0], key.shape[1], group, query.shape[-1])
            mask = None if mask is None else mask.expand(*mask.shape[:-2], group, columns).contiguous()
        with pinned(kernel, query.device):
            output = scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
            )
        output = output.reshape(output.shape[0], heads, rows, output.shape[-1])
    if left_pad is not None:
        position = torch.arange(columns - rows, columns, device=output.device)
        output = output * (position >= left_pad.to(output.device)[:, None])[:, None, :, None]
    return output if slots is None else take_heads(output, slots)


def _equal_groups(
    query: Tensor, key: Tensor, value: Tensor, live_kv: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...] | None]:
    """Return heads in groups of one size, ascending, as SDPA takes them, and the place of each slot if that changed.

    Other groups take a key for each query where sequences are whole. With fewer rows some queries are computed twice.
    """
    used, size = tuple(sorted(set(live_kv))), largest_group(live_kv)
    if live_kv == tuple(head for head in used for _ in range(size)):
        return query, key, take_heads(value, used), None
    if query.shape[-2] == key.shape[-2]:
        return query, take_heads(key, tuple(map(used.index, live_kv))), take_heads(value, live_kv), None
    # After a cache keys are many and queries few: every group is filled up to the size of the largest by repeating its
    # last query, and no key is copied.
    order: list[int] = []
    for head in used:
        group = [slot for slot, each in enumerate(live_kv) if each == head]
        order += group + group[-1:] * (size - len(group))
    places = tuple(order.index(slot) for slot in range(len(live_kv)))
    return take_heads(query, tuple(order)), key, take_heads(value, used), places


def largest_group(live_kv: tuple[int, ...]) -> int:
    """Return how many live slots read one KV head at most."""
    return max([1, *[live_kv.count(head) for head in set(live_kv)]])  # torch.compile knows no max(..., default=)


def score_scale(scale: float | None, dim: int) -> float:
    """Return the factor of products of queries and keys with `dim` channels, `1 / sqrt(D)` by default."""
    return dim**-0.5 if scale is None else scale


def capped(logits: Tensor, soft_cap: float | None) -> Tensor:
    """Return `c * tanh(logits / c)` for a soft cap c; the logits themselves without one."""
    return logits if soft_cap is None else (logits / soft_cap).tanh() * soft_cap


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, soft_cap: float, kernel: str
) -> Tensor:
    """Return attention with soft-capped logits: products in the tensors' dtype, softmax in float32 at least."""
    check_kernel(kernel)
    if kernel not in ("auto", "math"):
        raise UnsupportedError(f"attention kernel {kernel!r} has no soft cap; use 'auto'")
    if (group := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = capped(query @ key.mT * score_scale(scale, query.shape[-1]), soft_cap)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.masked_fill(~mask, -torch.inf).softmax(-1, dtype=wide).to(value.dtype) @ value


# --- the kernel by name


def check_kernel(kernel: str) -> None:
    """Raise InputError for an unknown kernel."""
    if kernel != "auto":  # every call passes here: the list of names costs the host time
        check_name("attention kernel", kernel, ("auto", *KERNELS, FLASH_DECODE))


def pinned(kernel: str, device: torch.device):
    """Return a context in which SDPA may run only `kernel` on `device`; `"auto"` leaves PyTorch's own order.

    Enter it inside the forward pass: the choice is no part of the compile cache's key. Raises InputError for an unknown
    name, UnsupportedError for a kernel that needs CUDA elsewhere.
    """
    check_kernel(kernel)
    if kernel in ("auto", FLASH_DECODE):  # what does not take the flash-decoding launch is PyTorch's choice
        return nullcontext()
    if kernel in ("cudnn", "efficient") and device.type != "cuda":
        raise UnsupportedError(f"attention kernel {kernel!r} needs a CUDA device, got {device.type}; use 'auto'")
    return sdpa_kernel(KERNELS[kernel])
