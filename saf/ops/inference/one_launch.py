"""Few tokens without gradients: when a layer's live and frozen heads take one launch, the paper's, and what it reads.

A launch then costs more than the work in it, so rebuilding tiles of P beats reading them. The limits are where one
launch for all heads met the two of the other way, on an H200 (docs/log.md).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saf.machine.cuda_graphs import is_to_be_replayed
from saf.ops.fused.operator import MAPS, PATTERNS, run_fused
from saf.ops.fused.tables import fused_obstacle, fused_tables
from saf.ops.heads import heads_like
from saf.patterns import CompactPattern, DensePattern

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


class OneLaunch(NamedTuple):
    """What the launch reads besides the operands; the lists are empty where it cannot serve.

    Attributes:
        maps: where each head finds its parts, in the order of `fused_operator.MAPS`.
        patterns: of frozen heads, in the order of `fused_operator.PATTERNS`.
        counts: of live, compact and dense heads.
        grouped: whether value heads are shared.
    """

    maps: list[Tensor]
    patterns: list[Tensor]
    counts: list[int]
    grouped: bool

    @classmethod
    def of(cls, tables: dict[str, Any]) -> "OneLaunch":
        """Take what `few_tables` made out of a layer's tables."""
        if PREFIX + PATTERNS[0] not in tables:
            return cls([], [], [], False)
        maps = [tables[f"{PREFIX}mixed_{name}"] for name in MAPS]
        patterns = [tables[PREFIX + name] for name in PATTERNS]
        return cls(maps, patterns, list(tables[PREFIX + "mixed_counts"]), tables[PREFIX + "mixed_grouped"][0])

    def serves(self, value: Tensor, *, replayed: bool) -> bool:
        """Whether values `[B, H_kv, T, D]` of the layer are few; `replayed` where a graph launches its kernels."""
        return len(self.maps) > 0 and are_few(value, sum(self.counts), replayed=replayed)


def run_launch(query: Tensor, key: Tensor, value: Tensor, launch: OneLaunch, scale: float | None) -> Tensor:
    """Return all heads, `[B, H, T, D]`, given value heads up to the last that is read."""
    scale = float(value.shape[-1] ** -0.5) if scale is None else scale
    return run_fused(query, key, value, *launch, scale)[0]


def trace_launch(query: Tensor, key: Tensor, value: Tensor, launch: OneLaunch, scale: float | None) -> Tensor | None:
    """Do `run_launch` where compiled code is traced for one shape of few tokens on CUDA; None elsewhere.

    The compiler then launches the kernel itself, at a fraction of what an operator in Python costs the host. Other
    shapes are decided upon in the call (`saf::inference`), and so are those where two launches are faster on the device
    when a `GraphReplay` is being made: code compiled for calls is compiled once more then. A compiler's own graphs
    (`mode="reduce-overhead"`) cannot be told from calls; an exported program keeps the operator.
    """
    # Not `is_exporting()`: traced by torch 2.11 it is always true.
    if not torch.compiler.is_dynamo_compiling() or torch.compiler._is_exporting_flag or value.device.type != "cuda":
        return None
    if any(x.stride(-1) != 1 for x in (query, key, value)):
        return None
    from torch.fx.experimental.symbolic_shapes import has_static_value

    if not all(has_static_value(size) for size in value.shape):
        return None
    if not launch.serves(value, replayed=True) and (is_to_be_replayed() or not launch.serves(value, replayed=False)):
        return None
    from saf.ops.fused.forward_kernel import fused_forward_kernel
    from saf.ops.fused.launch import forward_arguments, forward_tables, log_sums_like

    kernel: Any = fused_forward_kernel
    read, result = _tables(launch), heads_like(value, sum(launch.counts))
    operands = query, key, value, result
    grid, numbers, constants = forward_arguments(*operands, *read, scale)
    kernel[grid](*operands, log_sums_like(value, launch.counts[0]), *forward_tables(*read), *numbers, **constants)
    return result


def _tables(launch: OneLaunch) -> tuple[Any, Any]:
    """Return maps and patterns as the launcher takes them."""
    from saf.ops.fused.tables import FusedPatterns, HeadMaps

    maps: Any = HeadMaps
    return maps(*launch.maps, tuple(launch.counts), launch.grouped), FusedPatterns(*launch.patterns)
