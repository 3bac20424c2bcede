"""What the fused launch reads, made from patterns, and the launch itself: shared by the backends that use it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saf.ops.availability import has_triton
from saf.ops.fused_operator import MAPS, PATTERNS, fused_product
from saf.pattern import CompactPattern, DensePattern

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fused_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the launch cannot run; None when it can."""
    if not has_triton():
        return "Triton is not installed"
    if device.type != "cuda":
        return f"it needs a CUDA device, got {device.type}"
    return None if dtype in DTYPES else f"values must be one of {[str(d) for d in DTYPES]}, got {dtype}"


def fused_tables(
    patterns: Sequence[CompactPattern | DensePattern],
    dtype: torch.dtype,
    device: torch.device,
    kv_head: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """Return patterns for the kernels and head maps: `alone_*` of the frozen heads, `mixed_*` of all slots.

    Mixed maps need `kv_head`, the value head of every slot.
    """
    from saf.ops.triton.fused_tables import COMPACT, DENSE, LIVE, FusedPatterns, HeadMaps

    length = patterns[0].length
    empty = torch.zeros(0, length, dtype=torch.float64, device=device)
    compact = [p.to(device=device, dtype=torch.float64).balanced() for p in patterns if isinstance(p, CompactPattern)]
    dense = [p.weights.to(device=device, dtype=dtype) for p in patterns if isinstance(p, DensePattern)]
    alpha, rho, log_z = (
        torch.stack([getattr(p, name) for p in compact]) if compact else empty for name in ("alpha", "rho", "log_z")
    )
    stored = torch.stack(dense) if dense else torch.zeros(0, length, length, dtype=dtype, device=device)
    made = FusedPatterns.build(alpha, rho, log_z, stored)
    tables: dict[str, Any] = {name: getattr(made, name) for name in PATTERNS}
    kinds = [COMPACT if isinstance(p, CompactPattern) else DENSE for p in patterns]
    layouts = {"alone": (kinds, tuple(range(len(kinds))))}
    if kv_head is not None:
        layouts["mixed"] = ([LIVE] * (len(kv_head) - len(kinds)) + kinds, kv_head)
    for name, (state, value) in layouts.items():
        used = sorted({slot for slot, kind in zip(value, state, strict=True) if kind == LIVE})
        key = [used.index(slot) if kind == LIVE else 0 for slot, kind in zip(value, state, strict=True)]
        maps = HeadMaps.build(state, key=key, value=value, num_value_heads=max(value) + 1, device=device)
        tables |= {f"{name}_{part}": getattr(maps, part) for part in MAPS}
        tables |= {f"{name}_counts": maps.counts, f"{name}_grouped": (maps.grouped,)}
    return tables


def launch_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tables: dict[str, Any],
    layout: str,
    scale: float | None,
) -> Tensor:
    """Return the output of the slots that a layout, `alone` or `mixed`, has: `[B, n, T, D]`.

    `scale` is that of live heads' scores, `1 / sqrt(D)` by default.
    """
    maps = [tables[f"{layout}_{name}"] for name in MAPS]
    patterns = [tables[name] for name in PATTERNS]
    counts, (grouped,) = list(tables[f"{layout}_counts"]), tables[f"{layout}_grouped"]
    scale = value.shape[-1] ** -0.5 if scale is None else scale
    return fused_product(query, key, value, maps, patterns, counts, grouped, scale)[0]
