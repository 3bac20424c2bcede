"""Device code of the Toeplitz product of values, read through addresses or descriptors, and of two sequences.

`toeplitz_kernel` and `toeplitz_descriptor_kernel` multiply, `prescale_kernel` scales their input in a pass of its own.
`causal_convolution_kernel` convolves sequences of one channel, as normalisers need it, launched by `convolve`.
"""

import triton
import triton.language as tl
from torch import Tensor

from saf.ops.launch import add_product, cdiv, launch

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# The device language's constants and ranges are not what their annotations say.


@triton.jit
def place_of(tile, num_m, num_n, num_f, slabs):
    """Return the row block counted from the longest sum, the head and the column block of a tile.

    A slab is a column block of one head: all its row blocks read the same input. `slabs` of them are computed before
    the next ones begin, so that what they read stays in the second-level cache; among them row blocks with the longest
    sum come first, so that the last wave is made of short ones.
    """
    first = tile // (num_m * slabs) * slabs
    together = tl.minimum(num_n * num_f - first, slabs)
    inside = tile - first * num_m
    slab = first + inside % together
    return inside // together, slab // num_n, slab % num_n


@triton.jit(do_not_specialize=["T", "rows"])
def prescale_kernel(
    x_ptr, pre_ptr, out_ptr, T, N, rows,
    x_stride_b, x_stride_f, x_stride_t, pre_stride_f,
    D: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, FOLD: tl.constexpr, FIRST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write x * pre, rounded to x's dtype, as contiguous [F, rows, FOLD N].

    Columns of group r come from FIRST + r tiles further down; zero outside of 0 to T.
    """
    i_f = tl.program_id(2).to(tl.int64)
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (o_t < rows)[:, None] & (o_n < FOLD * N)[None, :]
    p_out = out_ptr + (i_f * rows + o_t.to(tl.int64)[:, None]) * (FOLD * N) + o_n[None, :]
    if FOLD == 1:
        row = o_t.to(tl.int64)
        column = (o_n // D).to(tl.int64) * x_stride_b + o_n % D
        b_x = tl.load(x_ptr + i_f * x_stride_f + row[:, None] * x_stride_t + column[None, :], mask=mask, other=0.0)
        b_pre = tl.load(pre_ptr + i_f * pre_stride_f + o_t, mask=o_t < T, other=0.0)[:, None]
    else:
        source = o_t[:, None] + (FIRST + o_n // N)[None, :] * TILE
        inside = mask & (source >= 0) & (source < T)
        own = o_n % N
        column = (own // D).to(tl.int64) * x_stride_b + own % D
        p_x = x_ptr + i_f * x_stride_f + source.to(tl.int64) * x_stride_t + column[None, :]
        b_x = tl.load(p_x, mask=inside, other=0.0)
        b_pre = tl.load(pre_ptr + i_f * pre_stride_f + source, mask=inside, other=0.0)
    tl.store(p_out, (b_x.to(tl.float32) * b_pre).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _shifted_offsets(stride_copy, TRANSPOSE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """Return the offsets [BM, BK] of g(query - key) in shifted copies from that of the tile's first entry."""
    o_m = tl.arange(0, BM)
    o_k = tl.arange(0, BK)
    if TRANSPOSE:
        query = o_k[None, :]
        key = o_m[:, None]
    else:
        query = o_m[:, None]
        key = o_k[None, :]
    # Eight queries at one key are one aligned vector of the copy that is shifted by key % 8.
    return (key % 8) * stride_copy + (query - (key // 8) * 8)


@triton.jit
def _load_tile(
    p_g, o_g, table_ptr, m0, k0,
    TRANSPOSE: tl.constexpr, TABLES: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Load one [BM, BK] tile of the Toeplitz matrix (or of its transpose)."""
    if TABLES == "tiles":
        o_m = tl.multiple_of(m0 % TILE, BM) + tl.arange(0, BM)
        o_k = tl.multiple_of(k0 % TILE, BK) + tl.arange(0, BK)
        if TRANSPOSE:
            index = k0 // TILE - m0 // TILE
            offset = o_k[None, :] * TILE + o_m[:, None]
        else:
            index = m0 // TILE - k0 // TILE
            offset = o_m[:, None] * TILE + o_k[None, :]
        return tl.load(table_ptr + index * (TILE * TILE) + offset)
    return tl.load(p_g + o_g)


@triton.jit
def _load_input(p_x, m_k, m_n, EVEN_T: tl.constexpr, EVEN_N: tl.constexpr):
    """Load one [BK, BN] block of the input, zero beyond T and N."""
    if EVEN_T and EVEN_N:
        return tl.load(p_x)
    if EVEN_N:
        return tl.load(p_x, mask=m_k[:, None], other=0.0)
    return tl.load(p_x, mask=m_k[:, None] & m_n[None, :], other=0.0)


@triton.jit(do_not_specialize=["T", "num_m", "num_n", "num_f", "slabs"])
def toeplitz_kernel(
    x_ptr, table_ptr, pre_ptr, post_ptr, out_ptr, T, N,
    x_stride_b, x_stride_f, x_stride_t, out_stride_b, out_stride_f, out_stride_t,
    table_stride_f, table_stride_copy, pre_stride_f, post_stride_f, num_m, num_n, num_f, slabs,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TRANSPOSE: tl.constexpr, TABLES: tl.constexpr, PRESCALE: tl.constexpr, PAD: tl.constexpr, TILE: tl.constexpr,
    EVEN_T: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply by every head's Toeplitz matrix; a program computes one [BM, BN] tile of the output of one head."""
    i_m, i_f, i_n = place_of(tl.program_id(0), num_m, num_n, num_f, slabs)
    i_f = i_f.to(tl.int64)
    if not TRANSPOSE:
        i_m = num_m - 1 - i_m
    m0 = i_m * BM
    o_n = i_n * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    batch = (o_n // D).to(tl.int64)
    channel = o_n % D
    if TRANSPOSE:
        lo = (m0 // BK) * BK
        hi = T
    else:
        lo = m0 * 0
        hi = tl.minimum(m0 + BM, T)

    table_ptr += i_f * table_stride_f
    o_g = _shifted_offsets(table_stride_copy, TRANSPOSE, BM, BK)
    p_g = table_ptr + (PAD + (lo - m0 if TRANSPOSE else m0 - lo))
    p_x = x_ptr + i_f * x_stride_f + lo.to(tl.int64) * x_stride_t
    o_x = o_k[:, None] * x_stride_t + (batch * x_stride_b + channel)[None, :]
    p_pre = pre_ptr + i_f * pre_stride_f + o_k
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k0 in tl.range(lo, hi, BK, num_stages=STAGES):
        b_a = _load_tile(p_g, o_g, table_ptr, m0, k0, TRANSPOSE, TABLES, TILE, BM, BK)
        m_k = k0 + o_k < T
        b_x = _load_input(p_x + o_x, m_k, o_n < N, EVEN_T, EVEN_N)
        if PRESCALE != "pass":
            b_pre = tl.load(p_pre + k0, mask=m_k, other=0.0)
            if PRESCALE == "tile":
                b_a = b_a.to(tl.float32) * b_pre[None, :]
            else:
                b_a = b_a.to(b_x.dtype) * b_pre.to(b_x.dtype)[None, :]
        acc = add_product(acc, b_a, b_x, PRECISION)
        p_x += BK * x_stride_t
        if TRANSPOSE:
            p_g += BK
        else:
            p_g -= BK

    o_m = m0 + tl.arange(0, BM)
    b_post = tl.load(post_ptr + i_f * post_stride_f + o_m, mask=o_m < T, other=0.0)
    p_out = (
        out_ptr + i_f * out_stride_f + o_m.to(tl.int64)[:, None] * out_stride_t
        + (batch * out_stride_b + channel)[None, :]
    )  # fmt: skip
    mask = (o_m < T)[:, None] & (o_n < N)[None, :]
    tl.store(p_out, (acc * b_post[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "rows", "num_m", "num_n", "num_f", "slabs"])
def toeplitz_descriptor_kernel(
    x_desc, tiles_desc, post_ptr, out_ptr, T, N, rows,
    out_stride_b, out_stride_f, out_stride_t, post_stride_f, tiles_per_head, num_m, num_n, num_f, slabs,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TRANSPOSE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Compute one block of one head's output, from the scaled input [F, rows, FOLD N] and tiles stacked as [-, TILE].

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


ROWS, COLUMNS, WARPS = 32, 128, 4
"""Positions of a program's sums, positions that it reads at once, and its warps: 32 float64 numbers a thread stay in
registers, and few frozen heads still give a GPU enough programs. Chosen, not measured against others."""


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
