"""Which patterns a value dtype can hold as the tables of a convolution; others are executed as stored matrices."""

import torch
from torch import Tensor

from saf.ops.convolution import causal_convolution
from saf.ops.pattern_gradient import compact_tables
from saf.pattern import CompactPattern

ROW_SUM_TOLERANCE = 0.02
SMALL_VALUE = 2.0**-8


def holds(pattern: CompactPattern, dtype: torch.dtype) -> Tensor:
    """Return per head of `[C, T]` whether `dtype` can hold its pattern as tables; `prepare` stores the others."""
    return convolution_tables(pattern.to(dtype=torch.float64), dtype)[1]


def convolution_tables(pattern: CompactPattern, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tables of heads `[C, T]` in their balanced gauge and, per head, whether `dtype` can hold them."""
    balanced = pattern.balanced()
    distance, key_scale, row_scale = compact_tables(balanced.alpha, balanced.rho, dtype)
    tables = {"distance": distance, "key_scale": key_scale, "row_scale": row_scale}
    return tables, tables_hold(distance, key_scale, row_scale)


def tables_hold(distance: Tensor, key_scale: Tensor, row_scale: Tensor) -> Tensor:
    """Return per head whether nothing underflows that matters.

    The row sums that scaled and rounded values would give, for values of size 1 and of size 2**-8, show it.
    """
    holds = (row_scale.isfinite() & (row_scale > 0)).all(1)
    for size in (1.0, SMALL_VALUE):
        executed = causal_convolution((key_scale * size).to(distance.dtype).double() / size, distance.double())
        holds &= ((executed * row_scale.double() - 1).abs() <= ROW_SUM_TOLERANCE).all(1)
    return holds
