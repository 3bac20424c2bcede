"""Causal convolution of sequences, one launch: what takes some forty small operators as matrix products."""

import triton
import triton.language as tl
from torch import Tensor

from saf.ops.launch import cdiv, launch

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# The device language's constants and ranges are not what their annotations say.


ROWS, COLUMNS, WARPS = 32, 128, 4


@triton.jit
def causal_convolution_kernel(left_ptr, right_ptr, out_ptr, T, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the sums of one block of positions of one head."""
    head = tl.program_id(1).to(tl.int64) * T
    first = tl.program_id(0) * ROWS
    i = first + tl.arange(0, ROWS)
    b_sum = tl.zeros([ROWS], dtype=out_ptr.dtype.element_ty)
    for start in range(0, first + ROWS, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        b_left = tl.load(left_ptr + head + j, mask=j < T, other=0.0)
        lag = i[:, None] - j[None, :]
        b_right = tl.load(right_ptr + head + lag, mask=(lag >= 0) & (i[:, None] < T), other=0.0)
        b_sum += tl.sum(b_left[None, :] * b_right, 1)
    tl.store(out_ptr + head + i, b_sum, mask=i < T)


def convolve(left: Tensor, right: Tensor) -> Tensor:
    """Return `sum_{j<=k} left_j right_{k-j}`, float32 or float64 `[F, T]` of one dtype, summed in that dtype."""
    left, right = left.contiguous(), right.contiguous()
    out = left.new_empty(left.shape)
    heads, length = left.shape
    grid = (cdiv(length, ROWS), heads)
    launch(
        causal_convolution_kernel, grid, left, right, out, length,
        ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS, device=left.device,
    )  # fmt: skip
    return out
