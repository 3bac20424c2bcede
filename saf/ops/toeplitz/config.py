"""How the Toeplitz product runs: tables of g(distance) = exp(rho(distance)), ways to run, the rule that picks one.

Figures are of an H200 (docs/log.md, "The product of frozen heads"); the ways to run differ in speed alone.
"""

import dataclasses
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from saf.errors import InputError

PAD = 256
"""Zeros in front of g and the multiple its length is rounded up to: the largest block of output positions."""
SHIFTS = 8
"""Shifted copies of g: eight 16-bit elements make one aligned 16-byte load."""
TILE = 128
"""Rows and columns of a materialised Toeplitz tile."""
KINDS = ("shifted", "tiles")


def make_tables(g: Tensor, *, kind: str, dtype: torch.dtype) -> Tensor:
    """Build one kind of table from g.

    Args:
        g: [F, L] non-negative weights by distance, finite.
        kind: "shifted", eight copies [F, 8, PAD + W] of which copy s holds g(distance - s), PAD zeros in front;
            "tiles", [F, W / TILE, TILE, TILE] with tile t holding g(t TILE + row - column). W is L rounded up to PAD.
        dtype: of the table.

    Returns:
        The contiguous table.

    Raises:
        InputError: g is not a matrix, or the kind is unknown.
    """
    if g.ndim != 2:
        raise InputError(f"g must be [F, L], got shape {tuple(g.shape)}; pass one row a frozen head")
    if kind not in KINDS:
        raise InputError(f"unknown table kind {kind!r}; expected one of {', '.join(KINDS)}")
    heads, length = g.shape
    width = -(-length // PAD) * PAD
    padded = g.new_zeros(heads, PAD + width)
    padded[:, PAD : PAD + length] = g
    if kind == "shifted":
        table = g.new_zeros(heads, SHIFTS, PAD + width)
        for shift in range(SHIFTS):
            table[:, shift, shift:] = padded[:, : PAD + width - shift]
        return table.to(dtype)
    starts = torch.arange(width // TILE, device=g.device).view(-1, 1, 1) * TILE
    offsets = torch.arange(TILE, device=g.device)
    return padded[:, PAD + starts + offsets.view(1, -1, 1) - offsets.view(1, 1, -1)].to(dtype)


def table_kind(tables: Tensor) -> str:
    """Name the kind of a table from its number of dimensions."""
    if tables.ndim not in (3, 4):
        raise InputError(f"tables must have 3 or 4 dimensions, got {tables.ndim}; build them with make_tables")
    return KINDS[tables.ndim - 3]


def table_length(tables: Tensor) -> int:
    """Return the positions that a table serves, rounded up to PAD."""
    return tables.shape[1] * TILE if tables.ndim == 4 else tables.shape[-1] - PAD


PRESCALE = ("pass", "tile", "packed")
PRECISIONS = ("ieee", "tf32")
LOADS = ("pointer", "descriptor")
LEAST = {"block_m": 16, "block_n": 16, "block_k": 16, "num_warps": 1, "num_stages": 1, "slabs": 0}
"""Smallest values."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Hold one configuration of the product.

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
        """Return a short label for tables of measurements."""
        fold = f" f{self.fold}" if self.fold > 1 else ""
        slabs = f" g{self.slabs}" if self.slabs else ""
        loads = "" if self.loads == "pointer" else f"/{self.loads}"
        return (
            f"{self.tables}/{self.prescale}{loads} {self.block_m}x{self.block_n}x{self.block_k}"
            f" w{self.num_warps} s{self.num_stages}{fold}{slabs}"
        )

    def slabs_of(self, total: int) -> int:
        """Return how many of `total` slabs are computed together."""
        return min(self.slabs, total) or total


CACHED = 32 << 20
"""Bytes of input that programs running together may share: about half of a data-centre GPU's second-level cache."""
PROCESSORS = 132
"""Multiprocessors of an H200: fewer programs than these leave some idle."""
SCALED_IN_TILE = 1024
"""Positions up to which inputs are scaled in the tile: there it took 47 us where a launch of its own took 51, and at
4,096 positions 128 where that took 99."""
FOLDED = 32_768
"""Positions beyond which blocks of a single sequence's output go two by two: 1,457 us instead of 1,920 at 65,536, and
a draw here."""
WIDE_FROM = 4096
"""Positions beyond which blocks are 256 columns wide: here they gained with four heads and lost with fewer."""
FULL_PRECISION = Config(
    tables="shifted", prescale="tile", block_m=64, block_n=64, block_k=32, num_warps=4, num_stages=2
)
"""float32 operands: products in plain float32, without matrix units."""


@cache
def choose_config(
    *,
    length: int,
    columns: int,
    heads: int,
    dtype: torch.dtype,
    tables: str | None = None,
    descriptors: bool = False,
    shared_memory: int = 227 << 10,
) -> Config:
    """Pick a configuration by rule.

    Args:
        length: positions T of one call.
        columns: B x D, the columns that share one Toeplitz matrix.
        heads: frozen heads in the call.
        dtype: of the operands.
        tables: kind of table at hand; default: the kind to build, "shifted" for float32 and "tiles" otherwise.
        descriptors: whether the device has the bulk copy engine.
        shared_memory: bytes that one program may have; where the choice needs more, its pipeline is made shorter.

    Returns:
        The configuration.
    """
    if dtype == torch.float32:
        return dataclasses.replace(FULL_PRECISION, tables=tables or FULL_PRECISION.tables)
    if tables not in (None, "tiles"):
        return Config(tables=tables, prescale="tile")
    config = _by_shape(length, columns, heads, dtype, descriptors)
    if descriptors and config.prescale == "pass" and columns % config.block_n == 0:
        config = dataclasses.replace(config, loads="descriptor")
    stages = min(config.num_stages, max(2, shared_memory // _stage_bytes(config, dtype)))
    config = dataclasses.replace(config, num_stages=stages)
    return in_slabs(config, length=length, columns=columns, heads=heads, dtype=dtype)


def _by_shape(length: int, columns: int, heads: int, dtype: torch.dtype, descriptors: bool) -> Config:
    """Return blocks, where the scaling goes and how deep the pipeline is.

    The numbers without a name lie between shapes for which one way and shapes for which another was the fastest of
    those tried; where between them the ways are even was not measured.
    """
    rows = -(-length // 128)
    programs = rows * -(-columns // 128) * heads
    if length <= SCALED_IN_TILE and (short := _scaled_in_tile(length, columns, programs, dtype)):
        return short
    if columns <= 64 and columns % 8 == 0 and length > FOLDED and descriptors:
        return Config(num_warps=8, num_stages=4, fold=2, loads="descriptor")
    if (columns <= 64 and length > 2048 and rows * heads > 96) or (
        columns > 128 and length <= 2048 and programs < PROCESSORS
    ):
        return Config(block_n=64, num_stages=5)
    if columns <= 64 or (columns <= 128 and length <= 4096):
        return Config(block_m=64, block_n=64, block_k=128)
    if columns > 128 and length > WIDE_FROM and rows * -(-columns // 256) * heads >= 256:
        return Config(block_n=256, num_warps=8)
    # Few programs: one a multiprocessor, its loads further ahead; more of them: two that take turns. Long sums of a
    # single column block gain from loads further ahead all the same: 6 heads of 16384 positions and 128 columns took
    # 324 us with four stages and 354 with three, 329 and 366 transposed (H200).
    long = columns <= 128 and length >= 16384
    return Config(num_stages=4 if programs < 400 or long else 3)


def _scaled_in_tile(length: int, columns: int, programs: int, dtype: torch.dtype) -> Config | None:
    """Return how to run short inputs, whose scaling costs less in every step than in a pass; None where it does not.

    With few programs float16 keeps the pass: its range is narrow, and there is little to gain.
    """
    if programs >= 160 and columns <= 128:
        return None
    if programs >= 256:
        return Config(prescale="packed" if dtype == torch.bfloat16 else "tile")
    if dtype != torch.bfloat16:
        return None
    if programs >= 160:
        return Config(prescale="tile") if length <= 512 else None
    if columns >= 256:
        return Config(prescale="tile", block_m=64, block_k=128)
    return Config(prescale="tile", block_m=32, block_n=32, block_k=128) if length <= 512 else None


def in_slabs(config: Config, *, length: int, columns: int, heads: int, dtype: torch.dtype) -> Config:
    """Return a configuration that computes as many slabs together as fit in the cache; arguments as above."""
    total = -(-config.fold * columns // config.block_n) * heads
    fitting = max(1, CACHED // (max(1, length) * config.block_n * dtype.itemsize))
    return dataclasses.replace(config, slabs=fitting if fitting < total else 0)


def _stage_bytes(config: Config, dtype: torch.dtype) -> int:
    """Return the bytes of both operands of one step."""
    return (config.block_m + config.block_n) * config.block_k * dtype.itemsize
