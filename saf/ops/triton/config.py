"""How the Toeplitz product is cut into programs."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from saf.errors import InputError
from saf.ops.triton.tables import KINDS, PAD, TILE

PRESCALE = ("pass", "tile", "packed")
PRECISIONS = ("ieee", "tf32")
LOADS = ("pointer", "descriptor")
LEAST = {"block_m": 16, "block_n": 16, "block_k": 16, "num_warps": 1, "num_stages": 1, "slabs": 0, "max_registers": 0}
"""Smallest values."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One way to run the product.

    Attributes:
        tables: kind of table that the tile is read from, see `make_tables`.
        prescale: where the input scaling is applied: "pass" in a launch of its own, "tile" to the Toeplitz tile,
            "packed" likewise but in the operands' dtype (one more rounding, half the instructions).
        loads: "pointer" reads through addresses; "descriptor" through the bulk copy engine, for "tiles" with
            "pass" on Hopper and later, and B x D a multiple of 8.
        block_m: output positions a program.
        block_n: columns of the folded (batch, channel) axis a program.
        block_k: positions summed over a step.
        num_warps: warps a program.
        num_stages: depth of the software pipeline.
        fold: consecutive blocks of output rows that one program computes as more columns, for few columns; 2 needs
            "descriptor" loads and blocks of TILE rows.
        slabs: column blocks of a head that are computed before the next ones begin, so that the input they share stays
            in the second-level cache; 0 for all at once.
        max_registers: registers a thread at most, 0 for no limit; 128 lets two programs of 8 warps share a
            multiprocessor.
    """

    tables: str = "tiles"
    prescale: str = "pass"
    loads: str = "pointer"
    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    num_warps: int = 4
    num_stages: int = 3
    fold: int = 1
    slabs: int = 0
    max_registers: int = 0

    def __post_init__(self):
        """Raise InputError for a setting the kernel does not have."""
        self._check_each()
        if self.tables not in KINDS or self.prescale not in PRESCALE:
            raise InputError(
                f"tables must be one of {KINDS} and prescale one of {PRESCALE}, "
                f"got {self.tables!r} and {self.prescale!r}"
            )
        if self.loads not in LOADS or (self.loads != "pointer" and (self.tables, self.prescale) != ("tiles", "pass")):
            raise InputError(
                f"loads must be one of {LOADS}, the second for 'tiles' and 'pass' alone; "
                f"got {self.loads!r} for {self.tables!r} and {self.prescale!r}"
            )
        if self.fold not in (1, 2) or (self.fold == 2 and (self.loads == "pointer" or self.block_m != TILE)):
            raise InputError(
                f"fold must be 1, or 2 with descriptor loads and block_m {TILE}; got {self.fold}, "
                f"{self.loads!r} and {self.block_m}"
            )
        rows = TILE if self.tables == "tiles" else PAD
        if self.block_m > rows or self.block_k > TILE:
            raise InputError(
                f"block_m must not exceed {rows} and block_k {TILE} with {self.tables!r} tables, "
                f"got {self.block_m} and {self.block_k}"
            )

    def _check_each(self) -> None:
        """Raise InputError for a setting of another type, or out of range by itself."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is not type(field.default):
                raise InputError(f"{field.name} must be of type {type(field.default).__name__}, got {value!r}")
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise InputError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("block_m", "block_n", "block_k", "num_warps"):
            size = getattr(self, name)
            if size & (size - 1):
                raise InputError(f"{name} must be a power of two, got {size}")

    @property
    def name(self) -> str:
        """Short label for tables of measurements."""
        fold = f" f{self.fold}" if self.fold > 1 else ""
        slabs = f" g{self.slabs}" if self.slabs else ""
        registers = f" r{self.max_registers}" if self.max_registers else ""
        loads = "" if self.loads == "pointer" else f"/{self.loads}"
        return (
            f"{self.tables}/{self.prescale}{loads} {self.block_m}x{self.block_n}x{self.block_k}"
            f" w{self.num_warps} s{self.num_stages}{fold}{slabs}{registers}"
        )

    def slabs_of(self, total: int) -> int:
        """Return how many of `total` slabs are computed together."""
        return min(self.slabs, total) or total

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """Build from `to_dict`'s form; raise InputError for unknown, missing or unusable settings."""
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, dict):
            raise InputError(f"settings must be by name, got {values!r}")
        if values.keys() != names:
            raise InputError(
                f"unknown settings {sorted(values.keys() - names)}, missing settings {sorted(names - values.keys())}"
            )
        return cls(**values)
