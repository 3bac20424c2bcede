"""How the Toeplitz product is cut into programs, and the written rule that picks it."""

import dataclasses
from dataclasses import dataclass

import torch

from saf.errors import InputError
from saf.ops.triton.tables import KINDS, PAD

PRESCALE = ("pass", "x", "tile")
PRECISIONS = ("ieee", "tf32", "tf32x3")


@dataclass(frozen=True, kw_only=True)
class Config:
    """One way to run the product.

    Attributes:
        tables: kind of table that the tile is read from, see `make_tables`.
        prescale: where the input scaling is applied: "pass" in a launch of its own, "x" to the input as it is
            loaded, "tile" to the Toeplitz tile.
        block_m: output positions a program.
        block_n: columns of the folded (batch, channel) axis a program.
        block_k: positions summed over a step.
        num_warps: warps a program.
        num_stages: depth of the software pipeline.
        programs_per_sm: 0 launches one program an output tile; more makes the grid persistent.
        cache: cache modifier of the table loads, "" or ".ca" (keep in L1) or ".cg".
        max_registers: registers a thread at most, 0 for no limit; 128 lets two programs of 8 warps share a
            multiprocessor.
    """

    tables: str = "shifted"
    prescale: str = "tile"
    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    programs_per_sm: int = 0
    cache: str = ""
    max_registers: int = 0

    def __post_init__(self):
        """Raise InputError for a setting the kernel does not have."""
        if self.tables not in KINDS or self.prescale not in PRESCALE:
            raise InputError(
                f"tables must be one of {KINDS} and prescale one of {PRESCALE}, "
                f"got {self.tables!r} and {self.prescale!r}"
            )
        for name in ("block_m", "block_n", "block_k"):
            size = getattr(self, name)
            if size & (size - 1) or size < 16:
                raise InputError(f"{name} must be a power of two of at least 16, got {size}")
        if max(self.block_m, self.block_k) > PAD:
            raise InputError(f"block_m and block_k must not exceed {PAD}, the padding of the tables")

    @property
    def name(self) -> str:
        """Short label for tables of measurements."""
        grid = f" p{self.programs_per_sm}" if self.programs_per_sm else ""
        registers = f" r{self.max_registers}" if self.max_registers else ""
        return (
            f"{self.tables}/{self.prescale} {self.block_m}x{self.block_n}x{self.block_k}"
            f" w{self.num_warps} s{self.num_stages}{grid}{registers}{self.cache}"
        )

    def to_dict(self) -> dict:
        """Return the settings as plain values."""
        return dataclasses.asdict(self)


FULL_PRECISION = Config(
    tables="shifted", prescale="tile", block_m=64, block_n=64, block_k=32, num_warps=4, num_stages=2
)
"""float32 operands: products in plain float32, without matrix units."""


def choose_config(*, length: int, columns: int, heads: int, dtype: torch.dtype, tables: str = "shifted") -> Config:
    """Pick a configuration by rule.

    Args:
        length: positions T of one call.
        columns: B x D, the columns that share one Toeplitz matrix.
        heads: frozen heads in the call.
        dtype: of the operands.
        tables: kind of table at hand.

    Returns:
        The configuration.
    """
    if dtype == torch.float32:
        return dataclasses.replace(FULL_PRECISION, tables=tables)
    block_n = 128 if columns > 64 else 64
    tiles = -(-length // 128) * -(-columns // block_n) * heads
    # Fewer tiles than two a multiprocessor leave matrix units idle: halve the rows.
    block_m = 128 if tiles >= 256 else 64
    return Config(tables=tables, block_m=block_m, block_n=block_n, num_warps=8 if block_m == 128 else 4)
