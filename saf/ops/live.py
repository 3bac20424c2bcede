"""Live heads: causal softmax attention by a kernel of PyTorch, of a package that users may have, or pinned by name."""

from contextlib import nullcontext
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from saf.errors import UnsupportedError, check_name
from saf.ops.positions import visible_keys

FLASH_PACKAGES = {
    "fa3": ("FA3", "flash_attn_interface", "FlashAttention-3, built from hopper/ of Dao-AILab/flash-attention"),
    "fa4": ("FA4", "flash_attn.cute.interface", "FlashAttention-4: pip install flash-attn-4"),
}
"""PyTorch's name of a flash kernel, the module that provides it, how to get it."""
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    **dict.fromkeys(FLASH_PACKAGES, SDPBackend.FLASH_ATTENTION),
}
FLASH_DECODE = "flash_decode"
"""The kernel of few queries, live and frozen heads in one launch (saf/ops/decode); longer passes take PyTorch's."""
_activated: list[str] = []
"""The flash kernel of this process, once there is one."""


def live_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None, left_pad: Tensor | None = None,
    kernel: str = "auto", window: int | None = None, soft_cap: float | None = None, visible: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return causal softmax attention `[B, L, Tq, D]` of `query [B, L, Tq, D]` over `key`, `value` `[B, K, Tk, D]`.

    `L` must be a multiple of `K` (consecutive query heads share a key head); queries are the last `Tq` positions.
    `left_pad [B]` is the first real position of each row (left padding); outputs before it are zero. With a `window`
    queries see only so many keys, their own included. `visible`, bool `[B or 1, 1, Tq, Tk]`, replaces both: which keys
    each query sees; outputs of padding may then be anything finite. With a `soft_cap` c softmax takes
    `c * tanh(logit / c)`, which no SDPA kernel computes: patterns are materialised then, in float32 at least. Raises
    InputError for an unknown kernel, UnsupportedError for one that cannot run here or has no soft cap.
    """
    heads, rows, columns = query.shape[1], query.shape[-2], key.shape[-2]
    grouped = heads != key.shape[1]
    mask, causal = visible, False
    windowed = window is not None and columns > window
    if visible is not None:
        left_pad = None
    elif left_pad is not None or windowed or soft_cap is not None or (rows != columns and rows != 1):
        mask = visible_keys(columns - rows, rows, columns, query.device, left_pad, window)
    elif rows > 1:  # decided here: with lengths left open by the compiler, the comparison itself is no bool
        causal = True
    if soft_cap is not None:
        assert mask is not None
        return _without_padding(_capped_attention(query, key, value, mask, scale, soft_cap, kernel), left_pad, columns)
    if grouped and rows == 1:
        # A group's queries are rows of one head, so that every kernel reads its keys once and none copies them.
        query, grouped = query.reshape(query.shape[0], key.shape[1], heads // key.shape[1], query.shape[-1]), False
        mask = None if mask is None else mask.expand(*mask.shape[:-2], query.shape[2], columns).contiguous()
    with pinned(kernel, query.device):
        output = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    return _without_padding(output.reshape(output.shape[0], heads, rows, output.shape[-1]), left_pad, columns)


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
    group = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, 1) if group > 1 else each for each in (key, value))
    logits = capped(query @ key.mT * score_scale(scale, query.shape[-1]), soft_cap)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.masked_fill(~mask, -torch.inf).softmax(-1, dtype=wide).to(value.dtype) @ value


def _without_padding(output: Tensor, left_pad: Tensor | None, columns: int) -> Tensor:
    """Return attention `[B, L, Tq, D]` of the last of `columns` positions with zeros for padding."""
    if left_pad is None:
        return output
    position = torch.arange(columns - output.shape[-2], columns, device=output.device)
    return output * (position >= left_pad.to(output.device)[:, None])[:, None, :, None]


# --- the kernel by name


def check_kernel(kernel: str) -> None:
    """Raise InputError for an unknown kernel."""
    if kernel != "auto":  # in every call: without the list of names
        check_name("attention kernel", kernel, ("auto", *KERNELS, FLASH_DECODE))


def pinned(kernel: str, device: torch.device):
    """Return a context in which SDPA may run only `kernel` on `device`; `"auto"` leaves PyTorch's own order.

    The choice is made inside the forward pass because it is not part of the compile cache's key. Raises InputError
    for an unknown name, UnsupportedError for a kernel of a package that is missing or cannot run here.
    """
    check_kernel(kernel)
    if kernel in ("auto", FLASH_DECODE):
        return nullcontext()
    if kernel in ("cudnn", "efficient") and device.type != "cuda":
        raise UnsupportedError(f"attention kernel {kernel!r} needs a CUDA device, got {device.type}; use 'auto'")
    if KERNELS[kernel] == SDPBackend.FLASH_ATTENTION and (reason := activate_flash(kernel, device.type)):
        raise UnsupportedError(f"attention kernel {kernel!r} cannot run: {reason}")
    return sdpa_kernel(KERNELS[kernel])


def unsupported_reason(kernel: str, device: str) -> str | None:
    """Return why a kernel of `FLASH_PACKAGES` cannot run on a type of device; None when it can."""
    _, module, install = FLASH_PACKAGES[kernel]
    if device != "cuda":
        return f"it needs CUDA tensors, these are on {device}"
    try:
        spec = find_spec(module)
    except ImportError:  # a parent package is missing
        spec = None
    return None if spec else f"the module {module} cannot be found ({install})"


def activate_flash(kernel: str, device: str) -> str | None:
    """Make SDPA's flash kernel the one named, "flash" for PyTorch's own; return the reason when that cannot be.

    PyTorch replaces its flash kernel for the whole process, calls compiled earlier included. So the first name used in
    a process stays: another one is refused rather than run under a wrong name.
    """
    if kernel in FLASH_PACKAGES and (reason := unsupported_reason(kernel, device)):
        return reason
    implementation = FLASH_PACKAGES[kernel][0] if kernel in FLASH_PACKAGES else None
    first = _activated[0] if _activated else attention.current_flash_attention_impl()
    if first not in (None, kernel, implementation):
        return f"this process already uses {first!r} for flash attention and PyTorch holds one; use another process"
    if implementation and attention.current_flash_attention_impl() != implementation:
        attention.activate_flash_attention_impl(implementation)
    _activated[:] = [kernel]
    return None


# What torch.compiler.assume_constant_result sets: compiled code decides while it is traced. Asking for the decorator
# would load the compiler with the package.
activate_flash._dynamo_marked_constant = True  # type: ignore[attr-defined]
