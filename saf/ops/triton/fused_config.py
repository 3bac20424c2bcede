"""How the fused kernels are cut into programs, and the written rule that picks it."""

from dataclasses import dataclass

import torch

from saf.errors import InputError

FEW_ROWS = 49_152
FEW_PAIRS = FEW_ROWS * 1024
"""B x H x T, and B x H x T x T, up to either of which few programs are launched."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Block sizes of one kernel.

    Attributes:
        block_m: query positions.
        block_n: key positions.
        num_warps: warps a program.
        num_stages: depth of the software pipeline.
        max_registers: registers a thread at most, 0 for no limit.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int = 0

    def __post_init__(self):
        """Raise InputError for sizes the kernels do not have."""
        for size in (self.block_m, self.block_n):
            if size & (size - 1) or not 16 <= size <= 128:
                raise InputError(f"blocks must be powers of two from 16 to 128, got {self.block_m} and {self.block_n}")


@dataclass(frozen=True)
class FusedConfig:
    """Block sizes of the three fused kernels: forward, key blocks (dV and dK), query blocks (dQ)."""

    forward: Blocks
    keys: Blocks
    queries: Blocks


def few_programs(rows: int, length: int) -> bool:
    """Whether `rows` B x H x T of sequences of `length` leave multiprocessors idle in large blocks."""
    return rows <= FEW_ROWS or rows * length <= FEW_PAIRS


def choose_fused_config(*, dim: int, dtype: torch.dtype, grouped: bool = False, few: bool = False) -> FusedConfig:
    """Pick block sizes by rule: the fastest of those tried on an H200 with some heads frozen (docs/log.md).

    Args:
        dim: channels D.
        dtype: of the operands.
        grouped: whether a value head serves several heads; the loop over them takes registers in the backward.
        few: whether the forward pass has few programs (`few_programs`); they take smaller blocks of queries.
    """
    if dtype == torch.float32:
        small = Blocks(
            block_m=32 if dim <= 64 else 16,
            block_n=32 if dim <= 128 else 16,
            num_warps=4 if dim <= 64 else 8,
            num_stages=1,
        )
        return FusedConfig(forward=small, keys=small, queries=small)
    queries = Blocks(block_m=128, block_n=64, num_warps=8, num_stages=3)
    if dim <= 64:
        keys = Blocks(block_m=128, block_n=64, num_warps=4, num_stages=2)
        if grouped:
            keys = Blocks(block_m=64, block_n=64, num_warps=4, num_stages=1)
        block_m = 64 if few else 128
        return FusedConfig(Blocks(block_m=block_m, block_n=64, num_warps=4, num_stages=3), keys, queries)
    if dim <= 128:
        keys = Blocks(block_m=64, block_n=128, num_warps=8, num_stages=2)
        if grouped:
            keys = Blocks(block_m=32, block_n=64, num_warps=4, num_stages=2)
        return FusedConfig(Blocks(block_m=64, block_n=64, num_warps=4, num_stages=3), keys, queries)
    return FusedConfig(
        forward=Blocks(block_m=64, block_n=64, num_warps=8, num_stages=1),
        keys=Blocks(block_m=32, block_n=32, num_warps=8, num_stages=1),
        queries=Blocks(block_m=32, block_n=32, num_warps=4, num_stages=1),
    )
