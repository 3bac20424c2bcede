"""Few tokens without gradients: live and frozen heads of a layer in one launch, the paper's.

A launch then costs more than the work in it, so rebuilding tiles of P beats reading them (docs/log.md). The limits are
where that was measured, on an H200: below them the launch beats cuDNN's attention of all heads.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from saf.ops.fused_tables import fused_obstacle, fused_tables, launch_fused
from saf.pattern import CompactPattern, DensePattern

LENGTH = 1024
ROWS = 24_576
"""B x H x T at most: two programs a multiprocessor or three."""
DIM = 64
DTYPES = (torch.bfloat16, torch.float16)
PREFIX = "few_"
FEW = "; few tokens without gradients: one launch with live heads"


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the launch runs on a device with values of `dtype`, on a kind of device where it is known to pay."""
    return dtype in DTYPES and fused_obstacle(device, dtype) is None and _measured(device)


def _measured(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


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


def mixes(value: Tensor, heads: int, tables: Iterable[str]) -> bool:
    """Whether `mixed` serves values `[B, H_kv, T, D]` of a layer of `heads`, given its tables' names."""
    if PREFIX + "alpha" not in tables or value.dim() != 4:
        return False
    batch, _, length, dim = value.shape
    return dim <= DIM and length <= LENGTH and batch * heads * length <= ROWS


def mixed(query: Tensor, key: Tensor, value: Tensor, tables: dict[str, Any], scale: float | None) -> Tensor:
    """Return the output of all slots, `[B, H, T, D]`, from one launch; without gradients."""
    return launch_fused(query, key, value, tables, "mixed", scale, prefix=PREFIX)
