"""Device code of the Toeplitz product whose operands come through the bulk copy engine (tensor descriptors).

BM: output rows of a program. BK: positions summed over a step. BN: columns of the folded (batch, channel) axis.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# The device language's constants and ranges are not what their annotations say.

import triton
import triton.language as tl

from saf.ops.triton.order import place_of


@triton.jit(do_not_specialize=["T", "rows", "num_m", "num_n", "num_f", "slabs"])
def toeplitz_descriptor_kernel(
    x_desc, tiles_desc, post_ptr, out_ptr, T, N, rows,
    out_stride_b, out_stride_f, out_stride_t, post_stride_f, tiles_per_head, num_m, num_n, num_f, slabs,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TRANSPOSE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """One tile of one head's output, from the scaled input [F, rows, FOLD N] and tiles stacked as [-, TILE].

    It has BM rows of BN columns of N. With FOLD it has the same columns of FOLD consecutive blocks of BM rows: what a
    tile of the matrix is multiplied with for one of them lies a block further for the next, so that the scaled input
    holds both beside one another (`prescale_kernel`) and a tile read once serves both.
    """
    i_m, i_f, i_n = place_of(tl.program_id(0), num_m, num_n, num_f, slabs)
    n0 = i_n * BN
    if not TRANSPOSE:
        i_m = num_m - 1 - i_m
    # Forward, the last of the blocks sees all keys that the others see, and the first of them transposed.
    m0 = i_m * FOLD * BM
    if TRANSPOSE:
        lo = (m0 // BK) * BK
        hi = rows
    else:
        m0 += (FOLD - 1) * BM
        lo = m0 * 0
        hi = tl.minimum(m0 + BM, rows)
    first = i_f * tiles_per_head * TILE
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k0 in tl.range(lo, hi, BK, num_stages=STAGES):
        if TRANSPOSE:
            row = first + (k0 // TILE - m0 // TILE) * TILE + k0 % TILE
            b_a = tl.trans(tiles_desc.load([row, m0 % TILE]))
        else:
            row = first + (m0 // TILE - k0 // TILE) * TILE + m0 % TILE
            b_a = tiles_desc.load([row, k0 % TILE])
        b_x = x_desc.load([i_f, k0, n0]).reshape(BK, BN)
        acc = tl.dot(b_a, b_x, acc)

    o_m = i_m * FOLD * BM + tl.arange(0, BM)
    o_n = n0 + tl.arange(0, BN)
    i_f = i_f.to(tl.int64)
    own = o_n if FOLD == 1 else o_n % N
    p_post = post_ptr + i_f * post_stride_f + o_m
    column = (own // D).to(tl.int64) * out_stride_b + own % D
    inside = (o_m < T)[:, None]
    b_post = tl.load(p_post, mask=o_m < T, other=0.0)[:, None]
    if FOLD == 2:
        second = (o_n >= N)[None, :]
        column += tl.where(o_n >= N, BM * out_stride_t, 0)
        inside = tl.where(second, (o_m + BM < T)[:, None], inside)
        b_post = tl.where(second, tl.load(p_post + BM, mask=o_m + BM < T, other=0.0)[:, None], b_post)
    p_out = out_ptr + i_f * out_stride_f + o_m.to(tl.int64)[:, None] * out_stride_t + column[None, :]
    mask = inside & (o_n < FOLD * N)[None, :]
    tl.store(p_out, (acc * b_post).to(out_ptr.dtype.element_ty), mask=mask)
