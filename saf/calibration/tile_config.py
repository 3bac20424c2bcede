"""How the tile loop is cut into programs: the blocks and channels that its kernels are compiled for."""

from dataclasses import dataclass

import torch

from saf.errors import InputError


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """How the loop is cut.

    Attributes:
        block_m: Query rows of a tile.
        block_n: Keys of a tile; divides `block_m`.
        num_warps: Warps a program.
        num_stages: Depth of the software pipeline over sequences.
        max_registers: Registers a thread of the tile kernel at most, 0 for no limit.
        precision: Of float32 products: "ieee", "tf32x3" or "tf32".
    """

    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int = 0
    precision: str = "tf32x3"

    def __post_init__(self):
        """Raise InputError for blocks the kernels cannot take."""
        if any(size & (size - 1) or size < 16 for size in (self.block_m, self.block_n)) or self.block_m < self.block_n:
            raise InputError(
                "block_m and block_n must be powers of two of at least 16, block_m no smaller than block_n; got "
                f"{self.block_m} and {self.block_n}"
            )


def choose_tile_config(*, dim: int, dtype: torch.dtype) -> TileConfig:
    """Pick a configuration for D channels by rule, as measured on an H200 (docs/log.md).

    float32 products are three tf32 products: eight times faster than plain float32, statistics within 1e-6 of it.
    """
    if dtype == torch.float32:
        if dim <= 64:
            return TileConfig(block_m=128, num_warps=8, num_stages=2)
        return TileConfig(block_n=32, num_stages=2 if dim <= 128 else 1)
    if dim <= 96:
        # At most 168 registers leave room for three programs on a multiprocessor.
        return TileConfig(num_stages=3, max_registers=168)
    return TileConfig(block_n=64 if dim <= 128 else 32)


def tile_constants(config: TileConfig, length: int, dim: int) -> dict[str, int | bool | str]:
    """Return the compile-time arguments that both kernels share."""
    padded = max(16, 1 << (dim - 1).bit_length())
    half = padded // 2
    rest = max(16, 1 << (dim - half - 1).bit_length()) if dim > half else 0
    # 96 channels are 64 and 32, not 128; and 256 at a time would not fit into registers.
    first, second = (half, rest) if dim > 16 and (half + rest < padded or padded > 128) else (padded, 0)
    return {
        "D": dim, "D0": first, "D1": second, "BM": config.block_m, "BN": config.block_n,
        "EVEN": length % config.block_m == 0, "PRECISION": config.precision, "STAGES": config.num_stages,
    }  # fmt: skip
