"""Device code of the tile loop's first launch: row log-sum-exps.

BM: query rows of a program. BN: keys of a step. D0 + D1: channels in two steps of powers of two, D of them in use.
Logarithms are to base 2 throughout.
"""
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# The device language's constants and ranges are not what their annotations say.

import triton
import triton.language as tl

UNSPECIALIZED = ["N", "H", "T", "scale", "floor", "first", "num_i", "num_j", "offset", "num_tiles"]
"""Arguments of either kernel whose values are not compiled in."""


@triton.jit
def load_rows(pointer, start, stride, T, D: tl.constexpr, ROWS: tl.constexpr, DP: tl.constexpr, EVEN: tl.constexpr):
    """Rows from a start of a [T, D] matrix as [ROWS, DP], zero outside."""
    o_r = tl.arange(0, ROWS)
    o_d = tl.arange(0, DP)
    p = pointer + tl.cast(start, tl.int64) * stride + (o_r[:, None] * stride + o_d[None, :])
    if EVEN and D >= DP:
        return tl.load(p)
    if D >= DP:
        return tl.load(p, mask=(start + o_r < T)[:, None], other=0.0)
    return tl.load(p, mask=(start + o_r < T)[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def _online(
    row_sum, row_max, b_q, b_q1, k_ptr, lo, hi, o_i, T, scale, k_stride_t,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take key blocks in [lo, hi) into running row sums, which are relative to running row maxima."""
    for j0 in tl.range(lo, hi, BN, num_stages=STAGES):
        b_k = load_rows(k_ptr, j0, k_stride_t, T, D, BN, D0, EVEN)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if D1 > 0:
            b_k = load_rows(k_ptr + D0, j0, k_stride_t, T, D - D0, BN, D1, EVEN)
            b_s = tl.dot(b_q1, tl.trans(b_k), b_s, input_precision=PRECISION)
        b_s = b_s * scale
        if MASK:
            b_s = tl.where(o_i[:, None] >= (j0 + tl.arange(0, BN))[None, :], b_s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(b_s, 1))
        row_sum = row_sum * tl.exp2(row_max - new_max) + tl.sum(tl.exp2(b_s - new_max[:, None]), 1)
        row_max = new_max
    return row_sum, row_max


@triton.jit(do_not_specialize=UNSPECIALIZED)
def lse_kernel(
    q_ptr, k_ptr, kv_ptr, lse_ptr, H, T, scale,
    q_stride_n, q_stride_h, q_stride_t, k_stride_n, k_stride_h, k_stride_t,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Row log-sum-exps of one (sequence, head, query block), float32 [N, H, T]."""
    # One pattern's blocks are neighbours and share its keys in cache; those with the longest sum come first.
    blocks = tl.cdiv(T, BM)
    i0 = (blocks - 1 - tl.program_id(0) % blocks) * BM
    pattern = tl.program_id(0) // blocks
    i_n = (pattern // H).to(tl.int64)
    i_h = (pattern % H).to(tl.int64)
    q_ptr += i_n * q_stride_n + i_h * q_stride_h
    k_ptr += i_n * k_stride_n + tl.load(kv_ptr + i_h).to(tl.int64) * k_stride_h
    o_i = i0 + tl.arange(0, BM)
    b_q = load_rows(q_ptr, i0, q_stride_t, T, D, BM, D0, EVEN)
    b_q1 = b_q
    if D1 > 0:
        b_q1 = load_rows(q_ptr + D0, i0, q_stride_t, T, D - D0, BM, D1, EVEN)
    row_sum = tl.zeros((BM,), dtype=tl.float32)
    row_max = tl.full((BM,), float("-inf"), tl.float32)
    row_sum, row_max = _online(
        row_sum, row_max, b_q, b_q1, k_ptr, 0, i0, o_i, T, scale, k_stride_t,
        D, D0, D1, BN, False, True, PRECISION, STAGES,
    )  # fmt: skip
    row_sum, row_max = _online(
        row_sum, row_max, b_q, b_q1, k_ptr, i0, tl.minimum(i0 + BM, T), o_i, T, scale, k_stride_t,
        D, D0, D1, BN, True, EVEN, PRECISION, STAGES,
    )  # fmt: skip
    tl.store(lse_ptr + (i_n * H + i_h) * T + o_i, row_max + tl.log2(row_sum), mask=o_i < T)
