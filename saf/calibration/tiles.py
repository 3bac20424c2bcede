"""`measure_by_kernel` computes a layer's statistics in Triton: tiles outside, all sequences inside each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from saf.calibration.kernels import lse_kernel, tile_kernel
from saf.calibration.streaming import MAX_DIM, LayerStatistics
from saf.errors import InputError
from saf.ops.launch import SHARED_MEMORY, launch, shared_memory
from saf.ops.live import score_scale
from saf.ops.operator import TRITON_DTYPES
from saf.statistics import FLOOR

SCRATCH_BYTES = 1 << 28
"""Memory for the sums of tiles; longer inputs are taken in several bands of rows."""
FLOAT32_BYTES = 160 << 10
"""Shared memory of a program in float32 at 256 channels, the largest of all."""


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """The sizes of programs."""

    block_m: int = 64
    """Query rows of a tile, a power of two."""
    block_n: int = 64
    """Keys of a tile, a power of two of at most `block_m`."""
    num_warps: int = 4
    num_stages: int = 2
    """Depth of the software pipeline over sequences."""
    max_registers: int = 0
    """Most registers a thread of the tile kernel, 0 for no limit."""
    precision: str = "tf32x3"
    """Of float32 products: "ieee", "tf32x3" or "tf32"."""


def choose_tile_config(*, dim: int, dtype: torch.dtype, shared: int = SHARED_MEMORY) -> TileConfig:
    """Pick a configuration for D channels, as measured on an H200 (docs/log.md).

    float32 products are three tf32 products: eight times faster than plain float32, statistics within 1e-6 of it. With
    less `shared` memory than that takes, tiles are smaller, to fit into 99 KiB.
    """
    if dtype == torch.float32 and shared < FLOAT32_BYTES:
        if dim <= 128:
            return TileConfig(block_n=32, num_stages=2 if dim <= 64 else 1)
        return TileConfig(block_m=32, block_n=16, num_stages=1)
    if dtype == torch.float32:
        if dim <= 64:
            return TileConfig(block_m=128, num_warps=8, num_stages=2)
        return TileConfig(block_n=32, num_stages=2 if dim <= 128 else 1)
    if dim <= 96:
        # At most 168 registers leave room for three programs on a multiprocessor.
        return TileConfig(num_stages=3, max_registers=168)
    return TileConfig(block_n=64 if dim <= 128 else 32)


def tile_constants(config: TileConfig, length: int, dim: int) -> dict[str, int | bool | str]:
    """Return the compile-time arguments of both kernels."""
    padded = max(16, 1 << (dim - 1).bit_length())
    half = padded // 2
    rest = max(16, 1 << (dim - half - 1).bit_length()) if dim > half else 0
    # 96 channels are 64 and 32, not 128; and 256 at a time would not fit into registers.
    first, second = (half, rest) if dim > 16 and (half + rest < padded or padded > 128) else (padded, 0)
    return {
        "D": dim, "D0": first, "D1": second, "BM": config.block_m, "BN": config.block_n,
        "EVEN": length % config.block_m == 0, "PRECISION": config.precision, "STAGES": config.num_stages,
    }  # fmt: skip


def measure_by_kernel(
    query: Tensor,
    key: Tensor,
    *,
    kv_head: Sequence[int],
    scale: float | None = None,
    config: TileConfig | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
) -> LayerStatistics:
    """Measure heads as `measure_layer` does, from queries and keys of one dtype and length; D up to 256.

    Row log-sum-exps first, then every causal tile once, all sequences inside: products in the inputs' dtype, float32
    sums over a tile, float64 sums over tiles in a fixed order, so that equal inputs give equal bits. Variance and
    divergence accumulate deviations from the first sequence's pattern, not differences of large sums.

    The entropy takes each row's own normaliser r(i), the sum of its floored entries, from 1 to 1 + T * 1e-9. The
    marginals sum over rows before r(i) is known, so the rows of a block are divided by the middle of their
    normalisers: a relative error of at most T * 1e-9 / 2, which is 8e-6 at 16K and far less for most heads.
    """
    if query.dtype not in TRITON_DTYPES or key.dtype != query.dtype or query.shape[-1] > MAX_DIM:
        raise InputError(f"queries and keys must be float32 or in 16 bits, D <= {MAX_DIM}; got {query.dtype}")
    count, heads, length, dim = query.shape
    config = config or choose_tile_config(dim=dim, dtype=query.dtype, shared=shared_memory(query.device))
    loop = _Loop(query, key, kv_head, score_scale(scale, dim) / math.log(2), config)
    size = config.block_m
    totals = query.new_zeros(3, heads, dtype=torch.float64)
    etas = query.new_zeros(2, heads, loop.blocks * size, dtype=torch.float64)
    for first, last in loop.bands(scratch_bytes):
        sums = loop.band(first, last)
        totals[:2] += sums.scalar
        totals[2] += (sums.row[0].log2() - sums.row[1] / sums.row[0]).sum(-1)
        _add_marginals(etas, sums, 1 / _middle(sums.row[0], size))
    return LayerStatistics(
        variance=totals[0] / (max(count - 1, 1) * length**2),  # Eq. (1)
        forward_kl=totals[1] * (math.log(2) / (count * length)),  # Eq. (2)
        eta_abs=etas[0, :, :length],  # Eq. (4)
        eta_rel=etas[1, :, :length],
        row_entropy=totals[2] * (math.log(2) / length),
    )


class _Sums(NamedTuple):
    """Sums over the tiles of a band of row blocks; R = block_m / block_n, J key blocks, F the floored mean."""

    scalar: Tensor
    """`[2, heads]` float64: squared deviations from the mean; A log2(A / mean)."""
    row: Tensor
    """`[2, heads, rows]` float64: F; F log2 F."""
    column: Tensor
    """`[heads, blocks, T]` float32: F, summed over the rows of a block."""
    diagonal: Tensor
    """`[heads, blocks, R + 1, J, block_n]` float32: F, summed over those of one distance."""


class _Loop:
    """Operands of one layer, and launches over them."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        kv_head: Sequence[int],
        scale: float,
        config: TileConfig,
    ):
        query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
        self.count, self.heads, self.length, dim = query.shape
        self.device, self.config, self.scale = query.device, config, scale
        self.blocks = -(-self.length // config.block_m)
        self.strides = (*query.stride()[:3], *key.stride()[:3])
        kv = torch.tensor(list(kv_head), dtype=torch.int32, device=query.device)
        self.operands = (query, key, kv, query.new_empty(self.count, self.heads, self.length, dtype=torch.float32))
        self.constants = tile_constants(config, self.length, dim)
        launch(
            lse_kernel, (self.blocks * self.count * self.heads,), *self.operands, self.heads, self.length, scale,
            *self.strides, **self.constants, num_warps=config.num_warps, device=query.device,
        )  # fmt: skip

    def bands(self, scratch_bytes: int) -> list[tuple[int, int]]:
        """Split the row blocks so that the sums of a band take about so much memory."""
        ratio = self.config.block_m // self.config.block_n
        size = max(1, scratch_bytes // (4 * self.heads * self.length * (3 * ratio + 2)))
        return [(first, min(first + size, self.blocks)) for first in range(0, self.blocks, size)]

    def band(self, first: int, last: int) -> _Sums:
        """Measure row blocks `first` to `last`."""
        heads, rows, width = self.heads, self.config.block_m, self.config.block_n
        ratio = rows // width
        below, across = ratio * (last * (last - 1) - first * (first - 1)) // 2, ratio * (last - first)
        num_i, num_j = last - first, last * ratio
        scalar = torch.zeros(2, heads, below + across, device=self.device)
        row = torch.zeros(2, heads, num_j, num_i * rows, device=self.device)
        column = torch.zeros(heads, num_i, self.length, device=self.device)
        diagonal = torch.zeros(heads, num_i, ratio + 1, num_j, width, device=self.device)
        options = {"maxnreg": self.config.max_registers} if self.config.max_registers else {}
        for diagonals, tiles, offset in ((False, below, 0), (True, across, below)):
            if tiles:
                launch(
                    tile_kernel, (tiles, heads), *self.operands, scalar, row, column, diagonal,
                    self.count, heads, self.length, self.scale, FLOOR, first, num_i, num_j, offset, below + across,
                    *self.strides, **self.constants, DIAGONAL=diagonals, num_warps=self.config.num_warps,
                    device=self.device, **options,
                )  # fmt: skip
        row = row[..., : self.length - first * rows]
        return _Sums(scalar.sum(-1, dtype=torch.float64), row.sum(2, dtype=torch.float64), column, diagonal)


def _middle(normaliser: Tensor, size: int) -> Tensor:
    """Return the middle of the normalisers `[heads, rows]` of each block of rows."""
    missing = -normaliser.shape[-1] % size
    edge = normaliser[:, -1:].expand(-1, missing)
    low, high = torch.cat([normaliser, edge], 1).unflatten(1, (-1, size)).aminmax(dim=-1)
    return (low + high) / 2


def _add_marginals(etas: Tensor, sums: _Sums, weight: Tensor) -> None:
    """Add a band's column and diagonal sums, row blocks weighted by `weight [heads, blocks]`, to `etas`."""
    etas[0, :, : sums.column.shape[-1]] += (sums.column * weight[..., None]).sum(1)
    heads, _, turns, blocks, width = sums.diagonal.shape
    total = (sums.diagonal * weight[..., None, None, None]).sum(1)
    # Turn k of place p holds the distances from (p + k - R) * block_n on; negative ones are empty.
    lined = total.new_zeros(heads, blocks + turns, width)
    for turn in range(turns):
        lined[:, turn : turn + blocks] += total[:, turn]
    etas[1, :, : blocks * width] += lined[:, turns - 1 : turns - 1 + blocks].flatten(1)
