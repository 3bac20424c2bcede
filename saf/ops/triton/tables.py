"""Lookup tables of g(distance) = exp(rho(distance)) from which the kernels read Toeplitz tiles."""

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
    """Positions a table serves, rounded up to PAD."""
    return tables.shape[1] * TILE if tables.ndim == 4 else tables.shape[-1] - PAD
