"""Few tokens without gradients: when a layer's live and frozen heads take one launch, the paper's, and what it reads.

A launch then costs more than the work in it, so rebuilding tiles of P beats reading them. The limits are where one
launch for all heads met the two of the other way, on an H200 (docs/log.md).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saf.ops.fused_tables import fused_obstacle, fused_tables
from saf.pattern import CompactPattern, DensePattern

LENGTH = 4096
"""Positions that tables are made for."""
SHORT = 1024
SHORTEST = 256
SHORT_PAIRS = 40 * SHORT**2
"""B x H x T x T up to which one launch is faster on the device, T from `SHORTEST`, if fewer, to `SHORT`."""
HOST_BOUND = 4096 * 768 * (12 * 768 + 4096)
"""B x T x C x (12 C + T), half a layer's operations, up to which a host that launches every kernel sets the pace."""
DIM = 128
DTYPES = (torch.bfloat16, torch.float16)
PREFIX = "few_"
FEW = "; few tokens without gradients: one launch with live heads"


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the launch runs on a device with values of `dtype`, on a kind of device where it is known to pay."""
    return dtype in DTYPES and fused_obstacle(device, dtype) is None and _measured(device)


def _measured(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def are_few(value: Tensor, heads: int, *, replayed: bool) -> bool:
    """Whether values `[B, H_kv, T, D]` of a layer of `heads` are few; `replayed` where a graph launches its kernels."""
    batch, _, length, dim = value.shape
    if dim > DIM or length > LENGTH:
        return False
    if length <= SHORT and batch * heads * length * max(length, SHORTEST) <= SHORT_PAIRS:
        return True
    width = heads * dim
    return not replayed and batch * length * width * (12 * width + length) <= HOST_BOUND


def few_tables(
    patterns: Sequence[CompactPattern | DensePattern],
    dtype: torch.dtype,
    device: torch.device,
    kv_head: tuple[int, ...] | None,
) -> dict[str, Any]:
    """Return the launch's tables of the first positions, their names prefixed; none where it cannot serve."""
    if kv_head is None or not serves(device, dtype):
        return {}
    first = [pattern.prefix(min(LENGTH, pattern.length)) for pattern in patterns]
    return {PREFIX + name: table for name, table in fused_tables(first, dtype, device, kv_head).items()}
