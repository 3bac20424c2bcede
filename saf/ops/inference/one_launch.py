"""Few tokens without gradients: when all heads of a layer take one launch, the paper's, what it reads, and the launch.

A launch then costs more than the work in it, so rebuilding tiles of P beats reading them. Where the host sets the pace,
so does an operator in Python: code compiled for one shape of few tokens has the kernel in it, launched by the compiler.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saf.ops.fused.tables import MAPS, PATTERNS, fused_obstacle, fused_tables, read_tables
from saf.ops.heads import unit_stride
from saf.ops.live import score_scale
from saf.patterns import Pattern

LENGTH = 4096
"""Positions that tables are made for: no longer sequence is few by the limits below."""
SHORT = 1024
"""Positions up to which one launch was no slower than two on an H200, at the batches that `SHORT_PAIRS` allows."""
SHORTEST = 256
"""Positions that shorter sequences count as: their time no longer falls with the square of the length."""
SHORT_PAIRS = 40 * SHORT**2
"""B x H x T x T up to which one launch is faster on the device, T from `SHORTEST`, if fewer, to `SHORT` (docs/log.md).

On an H200 it met the two launches between 2 and 4 sequences of 1,024 and between 8 and 16 of 512, at 12 heads.
"""
HOST_BOUND = 2 * 4096 * 768 * (12 * 768 + 4096)
"""B x T x C x (12 C + T), half a layer's operations, up to which a host that launches every kernel sets the pace.

It is a layer of the 124M model at two sequences of 4,096 tokens, where two launches take a host twice as long as the
device needs; at four it depends on the host, and at eight the device sets the pace (docs/log.md). Two launches are
faster on the device there, so graphs take two.
"""
DIM = 128
"""Channels up to which the kernel's tiles were measured; wider heads leave it few registers."""
DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes that it was measured for; float32 has no matrix units at full precision, and few tokens cost more there."""
PREFIX = "few_"
"""What the names of its tables begin with among those of a layer."""
FEW = "; few tokens without gradients: one launch with live heads"


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the launch runs on a device with values of `dtype`, and is known to pay on such a device."""
    return dtype in DTYPES and fused_obstacle(device, dtype) is None and _measured(device)


def _measured(device: torch.device) -> bool:
    """Return whether a CUDA device is of a kind that the limits were measured on: Hopper and later."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def are_few(value: Tensor, heads: int, *, replayed: bool) -> bool:
    """Return whether values `[B, H_kv, T, D]` of a layer of `heads` are few.

    `replayed` tells that a CUDA graph launches the kernels: the host's pace then has no say.
    """
    batch, _, length, dim = value.shape
    if dim > DIM or length > LENGTH:
        return False
    if length <= SHORT and batch * heads * length * max(length, SHORTEST) <= SHORT_PAIRS:
        return True
    width = heads * dim
    return not replayed and batch * length * width * (12 * width + length) <= HOST_BOUND


def few_tables(
    patterns: Sequence[Pattern], dtype: torch.dtype, device: torch.device, kv_head: tuple[int, ...] | None
) -> dict[str, Any]:
    """Return the launch's tables of the first positions, their names prefixed; none where it cannot serve."""
    if kv_head is None or not serves(device, dtype):
        return {}
    first = [pattern.prefix(min(LENGTH, pattern.length)) for pattern in patterns]
    return {PREFIX + name: table for name, table in fused_tables(first, dtype, device, kv_head).items()}


class OneLaunch(NamedTuple):
    """Hold what the launch reads besides the operands; the lists are empty where it cannot serve.

    Attributes:
        maps: where each head finds its parts, in the order of `fused.tables.MAPS`.
        patterns: of frozen heads, in the order of `fused.tables.PATTERNS`.
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
        """Return whether values `[B, H_kv, T, D]` of the layer are few; `replayed` as in `are_few`."""
        return len(self.maps) > 0 and are_few(value, sum(self.counts), replayed=replayed)


def called_launch(query: Tensor, key: Tensor, value: Tensor, launch: OneLaunch, scale: float | None) -> Tensor:
    """Return all heads, `[B, H, T, D]`, given value heads up to the last that is read, in a call."""
    query, key, value = (unit_stride(x) for x in (query, key, value))
    return _launcher()(query, key, value, *read_tables(*launch), scale=score_scale(scale, value.shape[-1]))[0]


@cache
def _launcher() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the kernel's launcher; an import in every call would cost the host more than it does."""
    from saf.ops.fused.launch import fused_forward

    return fused_forward


def compiled_launch(
    query: Tensor, key: Tensor, value: Tensor, launch: OneLaunch, scale: float | None, *, replayed: bool
) -> Tensor | None:
    """Return what `called_launch` does where code is compiled for one shape of few tokens on CUDA; None elsewhere.

    The compiler looks into the operator and launches the kernel itself, at a fraction of what a call of an operator
    costs the host. Other shapes are decided upon in the call, by `saf::inference`. A compiler's own graphs
    (`mode="reduce-overhead"`) cannot be told from calls.
    """
    if not torch.compiler.is_dynamo_compiling() or value.device.type != "cuda":
        return None
    if any(x.stride(-1) != 1 for x in (query, key, value)):
        return None
    from torch.fx.experimental.symbolic_shapes import has_static_value

    if not all(has_static_value(size) for size in value.shape) or not launch.serves(value, replayed=replayed):
        return None
    from saf.ops.fused.launch import visible_forward

    return visible_forward(query, key, value, *launch, score_scale(scale, value.shape[-1]))
