"""The paper's execution: one Triton launch a layer for live and frozen heads, tiles of P rebuilt in registers.

It is the paper's row in every benchmark; `toeplitz` is faster. Whole sequences only: no decoding, no padding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from saf.ops.backend import Backend, Tables
from saf.ops.fused.operator import fused_product
from saf.ops.fused.tables import MAPS, PATTERNS, fused_obstacle, fused_tables
from saf.ops.live import score_scale
from saf.patterns import Pattern


class Fused(Backend):
    """Execute frozen heads as the paper does, in one launch with live ones."""

    mixes_live = True

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why the launch cannot run; None when it can."""
        return fused_obstacle(device, dtype)

    def describe(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return in words how it runs."""
        return "one Triton launch a layer for live and frozen heads (the paper's execution)"

    def prepare(
        self,
        patterns: Sequence[Pattern],
        dtype: torch.dtype,
        device: torch.device,
        kv_head: tuple[int, ...] | None = None,
    ) -> Tables:
        """Return what the kernels read: `fused_tables`."""
        return fused_tables(patterns, dtype, device, kv_head)

    def forward(self, value: Tensor, tables: Tables, rows: int) -> Tensor:
        """Return `P V` of the frozen heads for the last `rows` positions: `[B, F, T, D]` to `[B, F, rows, D]`."""
        none = value[:, :0]
        return _launch(none, none, value, tables, "alone", 1.0)[:, :, value.shape[-2] - rows :]

    def mixed(self, query: Tensor, key: Tensor, value: Tensor, tables: Tables, scale: float | None) -> Tensor:
        """Return all slots, `[B, H, T, D]`, from one launch."""
        return _launch(query, key, value, tables, "mixed", scale)


def _launch(query: Tensor, key: Tensor, value: Tensor, tables: Tables, layout: str, scale: float | None) -> Tensor:
    """Return the output of the slots that a layout of heads, `alone` or `mixed`, has: `[B, n, T, D]`.

    `scale` is that of live heads' scores, `1 / sqrt(D)` by default.
    """
    maps = [tables[f"{layout}_{name}"] for name in MAPS]
    patterns = [tables[name] for name in PATTERNS]
    counts, (grouped,) = list(tables[f"{layout}_counts"]), tables[f"{layout}_grouped"]
    factor = score_scale(scale, value.shape[-1])
    return fused_product(query, key, value, maps, patterns, counts, grouped, factor)[0]
