"""How the fused kernels are cut into programs, and the written rule that picks it."""

from dataclasses import dataclass

import torch

from saf.errors import InputError
from saf.ops.triton.tables import PAD


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Block sizes of one kernel.

    Attributes:
        block_m: query positions.
        block_n: key positions.
        num_warps: warps a program.
        num_stages: depth of the software pipeline.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __post_init__(self):
        """Raise InputError for sizes the kernels do not have."""
        for size in (self.block_m, self.block_n):
            if size & (size - 1) or not 16 <= size <= PAD:
                raise InputError(
                    f"blocks must be powers of two from 16 to {PAD}, got {self.block_m} and {self.block_n}"
                )


@dataclass(frozen=True, kw_only=True)
class FusedConfig:
    """Block sizes of the three fused kernels: forward, key blocks (dV and dK), query blocks (dQ)."""

    forward: Blocks
    keys: Blocks
    queries: Blocks


def choose_fused_config(*, dim: int, dtype: torch.dtype) -> FusedConfig:
    """Pick block sizes by rule from the channels D and the dtype of the operands."""
    if dtype == torch.float32:
        small = Blocks(block_m=32, block_n=32, num_warps=4, num_stages=1)
        return FusedConfig(forward=small, keys=small, queries=small)
    if dim <= 64:
        return FusedConfig(
            forward=Blocks(block_m=128, block_n=64, num_warps=4, num_stages=3),
            keys=Blocks(block_m=64, block_n=128, num_warps=8, num_stages=2),
            queries=Blocks(block_m=128, block_n=64, num_warps=8, num_stages=2),
        )
    if dim <= 128:
        return FusedConfig(
            forward=Blocks(block_m=128, block_n=64, num_warps=8, num_stages=2),
            keys=Blocks(block_m=64, block_n=128, num_warps=8, num_stages=2),
            queries=Blocks(block_m=128, block_n=64, num_warps=8, num_stages=2),
        )
    return FusedConfig(
        forward=Blocks(block_m=64, block_n=64, num_warps=8, num_stages=1),
        keys=Blocks(block_m=32, block_n=64, num_warps=8, num_stages=1),
        queries=Blocks(block_m=64, block_n=32, num_warps=8, num_stages=1),
    )
