"""Device code of the fused forward: ordinary, compact and dense heads in one launch.

BM: query positions of a program. BN: key positions of a step. DP: channels rounded up to a power of two.
"""

import triton
import triton.language as tl

from saf.ops.launch import add_product

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# The device language's constants and ranges are not what their annotations say.


@triton.jit
def load_rows(
    pointer, start, stride, T, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Rows from a start of a [T, D] matrix as [ROWS, DP], zero outside."""
    o_r = tl.arange(0, ROWS)
    o_d = tl.arange(0, DP)
    p = pointer + tl.cast(start, tl.int64) * stride + (o_r[:, None] * stride + o_d[None, :])
    if EVEN and D == DP:
        return tl.load(p)
    if D == DP:
        return tl.load(p, mask=(start + o_r < T)[:, None], other=0.0)
    return tl.load(p, mask=(start + o_r < T)[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def band_tile(band_ptr, shift_stride, query, key, start):
    """Rho at distances start + query - key as aligned vectors over queries; -inf at future keys."""
    return tl.load(band_ptr + start + (key % 4) * shift_stride + (query - (key // 4) * 4))


@triton.jit
def _attend(
    acc, row_sum, row_max, b_q, k_ptr, v_ptr, lo, hi, o_m, T, scale, k_stride, v_stride,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over key blocks in [lo, hi), in powers of two."""
    for n0 in tl.range(lo, hi, BN, num_stages=STAGES):
        o_n = n0 + tl.arange(0, BN)
        b_k = load_rows(k_ptr, n0, k_stride, T, BN, D, DP, EVEN)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
        if MASK:
            b_s = tl.where(o_m[:, None] >= o_n[None, :], b_s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - new_max[:, None])
        correction = tl.exp2(row_max - new_max)
        row_sum = row_sum * correction + tl.sum(b_p, 1)
        acc = acc * correction[:, None]
        b_v = load_rows(v_ptr, n0, v_stride, T, BN, D, DP, EVEN)
        acc = add_product(acc, b_p, b_v, PRECISION)
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit
def fused_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, state_ptr, query_ptr, key_ptr, value_ptr, pattern_ptr,
    alpha_ptr, band_ptr, log_z_ptr, dense_ptr, H, L, T, scale,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_t,
    v_stride_b, v_stride_h, v_stride_t, out_stride_b, out_stride_h, out_stride_t,
    pattern_stride, band_stride, band_shift_stride, dense_stride, dense_row_stride,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PAD: tl.constexpr,
    HAS_LIVE: tl.constexpr, HAS_COMPACT: tl.constexpr, HAS_DENSE: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One (batch element, head, query block): the head's state says how its weights come about."""
    # Blocks with the longest sum come first.
    i_m = tl.num_programs(1) - 1 - tl.program_id(1)
    i_b = (tl.program_id(0) // H).to(tl.int64)
    i_h = tl.program_id(0) % H
    state = tl.load(state_ptr + i_h)
    slot = tl.load(pattern_ptr + i_h).to(tl.int64)
    m0 = i_m * BM
    o_m = m0 + tl.arange(0, BM)
    hi = tl.minimum(m0 + BM, T)
    v_ptr += i_b * v_stride_b + tl.load(value_ptr + i_h).to(tl.int64) * v_stride_h
    acc = tl.zeros((BM, DP), dtype=tl.float32)
    scale = tl.cast(scale, tl.float32)  # compilers that launch this hand over float64

    if HAS_LIVE:  # noqa: SIM102
        if state == 0:
            i_q = tl.load(query_ptr + i_h).to(tl.int64)
            q_ptr += i_b * q_stride_b + i_q * q_stride_h
            k_ptr += i_b * k_stride_b + tl.load(key_ptr + i_h).to(tl.int64) * k_stride_h
            b_q = load_rows(q_ptr, m0, q_stride_t, T, BM, D, DP, EVEN)
            row_max = tl.full((BM,), float("-inf"), tl.float32)
            row_sum = tl.zeros((BM,), dtype=tl.float32)
            # Key blocks wholly in the past need no mask.
            middle = (m0 // BN) * BN
            acc, row_sum, row_max = _attend(
                acc, row_sum, row_max, b_q, k_ptr, v_ptr, 0, middle, o_m, T, scale, k_stride_t, v_stride_t,
                D, DP, BN, False, True, PRECISION, STAGES,
            )  # fmt: skip
            acc, row_sum, row_max = _attend(
                acc, row_sum, row_max, b_q, k_ptr, v_ptr, middle, hi, o_m, T, scale, k_stride_t, v_stride_t,
                D, DP, BN, True, EVEN, PRECISION, STAGES,
            )  # fmt: skip
            acc = acc / row_sum[:, None]
            # 0.6931... = log 2: the stored log-sum-exp is a natural logarithm.
            lse = (row_max + tl.log2(row_sum)) * 0.6931471805599453
            tl.store(lse_ptr + (i_b * L + i_q) * T + o_m, lse, mask=o_m < T)

    if HAS_COMPACT:  # noqa: SIM102
        if state == 1:
            o_r = tl.arange(0, BM)[:, None]
            o_c = tl.arange(0, BN)[None, :]
            b_z = tl.load(log_z_ptr + slot * pattern_stride + o_m, mask=o_m < T, other=0.0)
            band_ptr += slot * band_stride
            for n0 in tl.range(0, hi, BN, num_stages=STAGES):
                o_n = n0 + tl.arange(0, BN)
                b_rho = band_tile(band_ptr, band_shift_stride, o_r, o_c, PAD + m0 - n0)
                b_alpha = tl.load(alpha_ptr + slot * pattern_stride + o_n, mask=o_n < T, other=float("-inf"))
                b_p = tl.exp2((b_rho - b_z[:, None]) + b_alpha[None, :])
                b_v = load_rows(v_ptr, n0, v_stride_t, T, BN, D, DP, EVEN)
                acc = add_product(acc, b_p, b_v, PRECISION)

    if HAS_DENSE:  # noqa: SIM102
        if state == 2:
            p_p = dense_ptr + slot * dense_stride + o_m.to(tl.int64)[:, None] * dense_row_stride
            for n0 in tl.range(0, hi, BN, num_stages=STAGES):
                o_n = n0 + tl.arange(0, BN)
                causal = (o_m < T)[:, None] & (o_m[:, None] >= o_n[None, :])
                b_p = tl.load(p_p + o_n[None, :], mask=causal, other=0.0)
                b_v = load_rows(v_ptr, n0, v_stride_t, T, BN, D, DP, EVEN)
                acc = add_product(acc, b_p, b_v, PRECISION)

    out_ptr += i_b * out_stride_b + i_h.to(tl.int64) * out_stride_h
    o_d = tl.arange(0, DP)
    p_out = out_ptr + o_m.to(tl.int64)[:, None] * out_stride_t + o_d[None, :]
    tl.store(p_out, acc.to(out_ptr.dtype.element_ty), mask=(o_m < T)[:, None] & (o_d < D)[None, :])
