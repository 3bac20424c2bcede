"""Launcher of the separate input scaling."""

from collections.abc import Callable

from torch import Tensor

from saf.ops.triton.launch import PreparedLaunch, cdiv
from saf.ops.triton.tables import TILE
from saf.ops.triton.toeplitz_kernel import prescale_kernel


def prescaling(x: Tensor, pre: Tensor, *, fold: int = 1, transpose: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what computes x * pre, for all of this layout, in x's dtype as contiguous [F, T, B D].

    Folded, the result is [F, T rounded up, fold B D]: group r of the columns holds the rows r - fold + 1 tiles away
    (r tiles away transposed), zero beyond T.
    """
    batch, heads, length, dim = x.shape
    rows = rows_of(length, fold)
    columns = fold * batch * dim
    shape = (heads, rows, columns)
    launch = PreparedLaunch(
        prescale_kernel, (cdiv(rows, 32), cdiv(columns, 128), heads), length, batch * dim, rows,
        *x.stride()[:3], pre.stride(0),
        D=dim, BT=32, BN=128, FOLD=fold, FIRST=0 if transpose else 1 - fold, TILE=TILE,
        num_warps=4, device=x.device,
    )  # fmt: skip

    def scale(x: Tensor, pre: Tensor) -> Tensor:
        scaled = x.new_empty(shape)
        launch(x, pre, scaled)
        return scaled

    return scale


def rows_of(length: int, fold: int) -> int:
    """Return how many rows the scaled input of `length` positions has."""
    return length if fold == 1 else cdiv(length, fold * TILE) * fold * TILE
