"""The paper's execution: one Triton launch a layer for live and frozen heads, tiles of P rebuilt in registers.

It is the paper's row in every benchmark; `toeplitz` is faster. Whole sequences only: no decoding, no padding.
"""

from typing import Any

import torch
from torch import Tensor

from saf.ops.fused.tables import fused_obstacle as supports
from saf.ops.fused.tables import fused_tables as prepare
from saf.ops.fused.tables import launch_fused

__all__ = ["describe", "forward", "mixed", "prepare", "supports"]


def describe(device: torch.device, dtype: torch.dtype) -> str:
    """Say how this backend would run."""
    return "one Triton launch a layer for live and frozen heads (the paper's execution)"


def forward(value: Tensor, tables: dict[str, Any], rows: int) -> Tensor:
    """Return `P V` of the frozen heads for the last `rows` positions: `value [B, F, T, D]` to `[B, F, rows, D]`."""
    none = value[:, :0]
    return launch_fused(none, none, value, tables, "alone", 1.0)[:, :, value.shape[-2] - rows :]


def mixed(query: Tensor, key: Tensor, value: Tensor, tables: dict[str, Any], scale: float | None) -> Tensor:
    """Return the output of all slots, `[B, H, T, D]`, from one launch."""
    return launch_fused(query, key, value, tables, "mixed", scale)
