"""The fused launches and their kernels: ordinary, compact and dense heads, forward in one launch, backward in three.

    fused_forward_kernel   a block of queries of one head          O = P V
    delta_kernel           live heads, for the softmax's gradient  delta_i = <dO_i, O_i>
    key_block_kernel       a block of keys of one value head       dV = P^T dO of all heads, dK = scale dS^T Q of live
    query_block_kernel     a block of queries of one live head     dQ = scale dS K,  dS = P * (dO V^T - delta)

P is softmax(scale Q K^T) for live heads, which come first, exp(rho(i - j) + alpha(j) - log Z(i)) for compact ones
(Eq. 3), rebuilt tile by tile, and read from memory for dense ones. Exponentials are powers of two: scores, alpha, rho
and log Z are in units of log 2. Tiles in the key-block kernel are [key, query], transposed weights. Names are those of
launch.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saf.ops.launch import add_product, cdiv, launch, load_rows, padded_channels, strides
from saf.ops.tensors import heads_like

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# The device language's constants and ranges are not what their annotations say.

# Entries of minus infinity in front of rho, and the multiple to which its length is rounded up. A tile on the diagonal
# reads twice the largest block of 128 positions back.
PAD = 256
LOG2E = tl.constexpr(1.4426950408889634)  # 1 / log 2: the kernels' exponentials are powers of two
# B x H x T, and B x H x T x T, up to either of which few programs are launched, in smaller blocks of queries. Up to the
# first, blocks of 128 queries number less than three a multiprocessor of an H200 (384 on 132). Around the limits both
# sizes of blocks came within 1.5% of one another.
FEW_ROWS = 49_152
FEW_PAIRS = FEW_ROWS * 1024


class Blocks(NamedTuple):
    """Block sizes of one kernel: query and key positions, powers of two from 16 to 128; warps; pipeline stages."""

    block_m: int
    block_k: int
    num_warps: int
    num_stages: int

    def constants(self, length: int, dim: int) -> dict[str, Any]:
        """Return the compile-time arguments that follow from sizes and shape; float32 products are exact."""
        return {
            "D": dim, "DP": padded_channels(dim), "BM": self.block_m, "BK": self.block_k,
            "EVEN": length % max(self.block_m, self.block_k) == 0, "STAGES": self.num_stages,
            "num_warps": self.num_warps, "num_stages": self.num_stages,
        }  # fmt: skip


def choose_forward(*, dim: int, dtype: torch.dtype, few: bool) -> Blocks:
    """Return the blocks of the forward kernel: the fastest of those tried on an H200 with some heads frozen.

    With `few` programs (`FEW_ROWS`) blocks of queries are smaller.
    """
    if dtype == torch.float32:
        return _small(dim)
    if dim <= 128:
        return Blocks(128 if dim <= 64 and not few else 64, 64, 4, 3)
    return Blocks(64, 64, 8, 1)


def choose_backward(*, dim: int, dtype: torch.dtype, grouped: bool) -> tuple[Blocks, Blocks]:
    """Return the blocks of the key-block kernel (dV and dK) and of the query-block kernel (dQ), chosen alike.

    With `grouped` heads the loop over heads takes registers, so that blocks of keys are smaller.
    """
    if dtype == torch.float32:
        return _small(dim), _small(dim)
    queries = Blocks(128, 64, 8, 3)
    if dim <= 64:
        return Blocks(64, 64, 4, 1) if grouped else Blocks(128, 64, 4, 2), queries
    if dim <= 128:
        return Blocks(32, 64, 4, 2) if grouped else Blocks(64, 128, 8, 2), queries
    return Blocks(32, 32, 8, 1), Blocks(32, 32, 4, 1)


def _small(dim: int) -> Blocks:
    """Return the blocks of float32 operands: without matrix units sums are in registers."""
    return Blocks(32 if dim <= 64 else 16, 32 if dim <= 128 else 16, 4 if dim <= 64 else 8, 1)


def fused_forward(
    query: Tensor, key: Tensor, value: Tensor, tables: Sequence[Tensor], counts: Sequence[int], scale: float, *,
    visible: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Do `saf::fused` in one launch; with `visible` a compiler sees the kernel.

    Channels have unit stride, other dimensions any. The output is stored as `[B, T, H, D]`; log-sum-exps are float32,
    in nats.
    """
    (batch, _, length, dim), live, heads = value.shape, counts[0], sum(counts)
    state, key_slot, value_slot, pattern, _, _, *patterns = tables
    result, lse = heads_like(value, heads), value.new_empty(batch, live, length, dtype=torch.float32)
    if not result.numel():
        return result, lse
    rows = batch * heads * length
    few = rows <= FEW_ROWS or rows * length <= FEW_PAIRS
    blocks = choose_forward(dim=dim, dtype=value.dtype, few=few)
    grid = (batch * heads, cdiv(length, blocks.block_m))
    arguments = (
        query, key, value, result, lse, state, key_slot, value_slot, pattern, *patterns, patterns[0].shape[1],
        heads, live, length, scale * LOG2E.value, *strides(query, key, value),
    )  # fmt: skip
    constants = blocks.constants(length, dim) | _kinds(counts)
    # A compiler that sees the kernel puts its launch into the compiled code, at a fraction of an operator's host time.
    if visible:
        torch.library.wrap_triton(fused_forward_kernel)[grid](*arguments, **constants)
    else:
        launch(fused_forward_kernel, grid, *arguments, **constants, device=value.device)
    return result, lse


@torch.library.triton_op("saf::fused_visible", mutates_args=())
def visible_forward(
    query: Tensor, key: Tensor, value: Tensor, tables: list[Tensor], counts: list[int], scale: float
) -> Tensor:
    """Return the output of `saf::fused`, whose arguments these are, so that compiled code launches the kernel itself.

    Called from Python or from an exported program, it costs the host more than `saf::fused`. Channels have unit stride.
    """
    return fused_forward(query, key, value, tables, counts, scale, visible=True)[0]


def fused_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    tables: Sequence[Tensor], counts: Sequence[int], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients to query, key and value, each stored as `[B, T, heads, D]`; deterministic.

    `grad [B, H, T, D]` is that of the output `out`, `lse` the log-sum-exps of `fused_forward`.
    """
    (batch, num_value_heads, length, dim), live, keys = value.shape, counts[0], key.shape[1]
    dq, dk, dv = heads_like(query, live), heads_like(key, keys), heads_like(value, num_value_heads)
    if dv.numel() == 0:
        return dq, dk, dv
    state, key_slot, value_slot, pattern, group_start, group_heads, *patterns = tables
    grouped = group_start.numel() > 0
    # Programs of a key block or a query block add in a fixed order, without atomics: gradients repeat bit for bit.
    by_key, by_query = choose_backward(dim=dim, dtype=value.dtype, grouped=grouped)
    operands, delta = (query, key, value, grad, lse), torch.empty_like(lse)
    of_operands = strides(query, key, value, grad)
    if live:
        # delta_i = <dO_i, O_i> once, not in each of the two kernels that read it.
        launch(
            delta_kernel, (batch * live, cdiv(length, 64)), out, grad, delta, live, length,
            *strides(out, grad), D=dim, DP=padded_channels(dim), BM=64, num_warps=4, device=value.device,
        )  # fmt: skip
    launch(
        key_block_kernel, (batch * num_value_heads, cdiv(length, by_key.block_k)), *operands, delta, dk, dv,
        state, key_slot, pattern, group_start, group_heads, *patterns, patterns[0].shape[1],
        num_value_heads, live, keys, length, scale, *of_operands,
        **by_key.constants(length, dim), **_kinds(counts), GROUPED=grouped, device=value.device,
    )  # fmt: skip
    if live:
        launch(
            query_block_kernel, (batch * live, cdiv(length, by_query.block_m)), *operands, delta, dq,
            key_slot, value_slot, live, length, scale, *of_operands,
            **by_query.constants(length, dim), device=value.device,
        )  # fmt: skip
    return dq, dk, dv


def _kinds(counts: Sequence[int]) -> dict[str, Any]:
    """Return constants that leave out the code of absent kinds of heads."""
    names = "HAS_LIVE", "HAS_COMPACT", "HAS_DENSE"
    return {name: count > 0 for name, count in zip(names, counts, strict=True)} | {"PAD": PAD}


# --- forward


@triton.jit
def fused_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, state_ptr, key_ptr, value_ptr, pattern_ptr,
    alpha_ptr, band_ptr, log_z_ptr, dense_ptr, covered, H, L, T, scale,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PAD: tl.constexpr,
    HAS_LIVE: tl.constexpr, HAS_COMPACT: tl.constexpr, HAS_DENSE: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute O = P V of one (sequence, head, block of queries); the head's state selects how P is computed."""
    # Blocks with the longest sum come first.
    m0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * BM
    i_b = (tl.program_id(0) // H).to(tl.int64)
    i_h = tl.program_id(0) % H
    state = tl.load(state_ptr + i_h)
    slot = tl.load(pattern_ptr + i_h).to(tl.int64)  # 64 bits: it multiplies T x T for dense patterns
    p_v = v_ptr + i_b * v_stride_b + tl.load(value_ptr + i_h).to(tl.int64) * v_stride_h
    b_out = tl.zeros((BM, DP), dtype=tl.float32)
    scale = tl.cast(scale, tl.float32)  # compilers that launch this hand over float64

    # Values of `state`: 0 is LIVE, 1 COMPACT, 2 DENSE, as in fused.py. HAS_* are compile-time constants: the
    # code of an absent kind is left out.
    if HAS_LIVE and state == 0:
        p_k = k_ptr + i_b * k_stride_b + tl.load(key_ptr + i_h).to(tl.int64) * k_stride_h
        b_out = _live_rows(
            b_out, q_ptr + i_b * q_stride_b + i_h.to(tl.int64) * q_stride_h, p_k, p_v, lse_ptr + (i_b * L + i_h) * T,
            m0, T, scale, q_stride_t, k_stride_t, v_stride_t, D, DP, BM, BK, EVEN, STAGES,
        )  # fmt: skip
    if HAS_COMPACT and state == 1:
        b_out = _compact_rows(
            b_out, p_v, alpha_ptr + slot * covered, band_ptr + slot * 4 * band_width(covered, PAD),
            log_z_ptr + slot * covered, m0, T, band_width(covered, PAD), v_stride_t,
            D, DP, BM, BK, PAD, EVEN, STAGES,
        )  # fmt: skip
    if HAS_DENSE and state == 2:
        b_out = _dense_rows(
            b_out, p_v, dense_ptr + slot * covered * covered, m0, T, covered, v_stride_t,
            D, DP, BM, BK, EVEN, STAGES,
        )  # fmt: skip
    _store_rows(out_ptr + (i_b * T * H + i_h) * D, b_out, m0, H * D, T, D, DP, BM)


@triton.jit
def _live_rows(
    b_out, p_q, p_k, p_v, p_lse, m0, T, scale2, q_stride_t, k_stride_t, v_stride_t,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Return softmax(scale Q K^T) V of a block of queries, [BM, DP], and store its log-sum-exps."""
    o_m = m0 + tl.arange(0, BM)
    b_q = load_rows(p_q, m0, q_stride_t, T, BM, D, DP, EVEN)
    row_max = tl.full((BM,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BM,), dtype=tl.float32)
    # Key blocks wholly in the past need no mask.
    middle = (m0 // BK) * BK
    b_out, row_sum, row_max = _attend(
        b_out, row_sum, row_max, b_q, p_k, p_v, 0, middle, o_m, T, scale2, k_stride_t, v_stride_t,
        D, DP, BK, False, True, STAGES,
    )  # fmt: skip
    b_out, row_sum, row_max = _attend(
        b_out, row_sum, row_max, b_q, p_k, p_v, middle, tl.minimum(m0 + BM, T), o_m, T, scale2, k_stride_t, v_stride_t,
        D, DP, BK, True, EVEN, STAGES,
    )  # fmt: skip
    # 0.6931... = log 2: the stored log-sum-exp is a natural logarithm.
    tl.store(p_lse + o_m, (row_max + tl.log2(row_sum)) * 0.6931471805599453, mask=o_m < T)
    return b_out / row_sum[:, None]


@triton.jit
def _attend(
    acc, row_sum, row_max, b_q, k_ptr, v_ptr, lo, hi, o_m, T, scale, k_stride, v_stride,
    D: tl.constexpr, DP: tl.constexpr, BK: tl.constexpr, MASK: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Take the online softmax over key blocks in [lo, hi), in powers of two."""
    for k0 in tl.range(lo, hi, BK, num_stages=STAGES):
        o_k = k0 + tl.arange(0, BK)
        b_k = load_rows(k_ptr, k0, k_stride, T, BK, D, DP, EVEN)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        if MASK:
            b_s = tl.where(o_m[:, None] >= o_k[None, :], b_s, float("-inf"))
        # The online softmax: sums so far shrink whenever a larger score appears.
        new_max = tl.maximum(row_max, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - new_max[:, None])
        correction = tl.exp2(row_max - new_max)
        row_sum = row_sum * correction + tl.sum(b_p, 1)
        acc = acc * correction[:, None]
        b_v = load_rows(v_ptr, k0, v_stride, T, BK, D, DP, EVEN)
        acc = add_product(acc, b_p, b_v, "ieee")
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit
def _compact_rows(
    b_out, p_v, p_alpha, p_band, p_log_z, m0, T, band_stride, v_stride_t,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PAD: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Return sum_j exp(rho(i - j) - log Z(i) + alpha(j)) v_j (Eq. 3) of a block of queries, [BM, DP]."""
    o_m = m0 + tl.arange(0, BM)
    query = tl.arange(0, BM)[:, None]
    key = tl.arange(0, BK)[None, :]
    b_z = tl.load(p_log_z + o_m, mask=o_m < T, other=float("inf"))
    for k0 in tl.range(0, tl.minimum(m0 + BM, T), BK, num_stages=STAGES):
        o_k = k0 + tl.arange(0, BK)
        # No causal mask: rho is minus infinity at future keys.
        b_rho = band_tile(p_band, band_stride, query, key, PAD + m0 - k0)
        b_alpha = tl.load(p_alpha + o_k, mask=o_k < T, other=float("-inf"))
        b_p = tl.exp2((b_rho - b_z[:, None]) + b_alpha[None, :])  # P(i, j) of Eq. (3)
        b_v = load_rows(p_v, k0, v_stride_t, T, BK, D, DP, EVEN)
        b_out = add_product(b_out, b_p, b_v, "ieee")
    return b_out


@triton.jit
def _dense_rows(
    b_out, p_v, p_dense, m0, T, dense_stride, v_stride_t,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Return P V of a block of queries, [BM, DP], with P in memory."""
    o_m = m0 + tl.arange(0, BM)
    p_p = p_dense + o_m.to(tl.int64)[:, None] * dense_stride
    for k0 in tl.range(0, tl.minimum(m0 + BM, T), BK, num_stages=STAGES):
        o_k = k0 + tl.arange(0, BK)
        causal = (o_m < T)[:, None] & (o_m[:, None] >= o_k[None, :])
        b_p = tl.load(p_p + o_k[None, :], mask=causal, other=0.0)
        b_v = load_rows(p_v, k0, v_stride_t, T, BK, D, DP, EVEN)
        b_out = add_product(b_out, b_p, b_v, "ieee")
    return b_out


# --- backward


@triton.jit
def delta_kernel(
    out_ptr, grad_ptr, delta_ptr, L, T,
    out_stride_b, out_stride_h, out_stride_t, grad_stride_b, grad_stride_h, grad_stride_t,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Sum the rows of output times its gradient, for live heads."""
    m0 = tl.program_id(1) * BM
    o_m = m0 + tl.arange(0, BM)
    i_b = (tl.program_id(0) // L).to(tl.int64)
    i_h = (tl.program_id(0) % L).to(tl.int64)
    b_out = load_rows(out_ptr + i_b * out_stride_b + i_h * out_stride_h, m0, out_stride_t, T, BM, D, DP, False)
    b_grad = load_rows(grad_ptr + i_b * grad_stride_b + i_h * grad_stride_h, m0, grad_stride_t, T, BM, D, DP, False)
    b_delta = tl.sum(b_out.to(tl.float32) * b_grad.to(tl.float32), 1)
    tl.store(delta_ptr + tl.program_id(0).to(tl.int64) * T + o_m, b_delta, mask=o_m < T)


@triton.jit
def key_block_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    state_ptr, key_ptr, pattern_ptr, group_start_ptr, group_heads_ptr,
    alpha_ptr, band_ptr, log_z_ptr, dense_ptr, covered, num_value_heads, L, K, T, scale,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_t,
    v_stride_b, v_stride_h, v_stride_t, grad_stride_b, grad_stride_h, grad_stride_t,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PAD: tl.constexpr,
    HAS_LIVE: tl.constexpr, HAS_COMPACT: tl.constexpr, HAS_DENSE: tl.constexpr, GROUPED: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dV of all heads and dK of live ones, in a fixed order, of one (sequence, value head, block of keys)."""
    i_b = (tl.program_id(0) // num_value_heads).to(tl.int64)
    i_g = tl.program_id(0) % num_value_heads
    k0 = tl.program_id(1) * BK
    p_v = v_ptr + i_b * v_stride_b + i_g.to(tl.int64) * v_stride_h
    b_dv = tl.zeros((BK, DP), dtype=tl.float32)
    b_dk = tl.zeros((BK, DP), dtype=tl.float32)
    # The key head that the live heads of this value head read, -1 without any: a tensor like k0, because the loop
    # carries it (Triton 3.7 makes a tensor of a plain -1 too).
    i_k = k0 * 0 - 1
    # A single head has a loop of constant bounds, which the compiler takes apart: in a real one it would keep addresses
    # of one kind of head alive through another's loop.
    lo, hi, own = 0, 1, i_g
    if GROUPED:
        lo, hi, own = tl.load(group_start_ptr + i_g), tl.load(group_start_ptr + i_g + 1), 0
    for entry in range(lo, hi):
        i_h = tl.load(group_heads_ptr + own + entry)
        state = tl.load(state_ptr + i_h)
        slot = tl.load(pattern_ptr + i_h).to(tl.int64)
        p_grad = grad_ptr + i_b * grad_stride_b + i_h.to(tl.int64) * grad_stride_h
        if HAS_LIVE and state == 0:
            i_k = tl.load(key_ptr + i_h)
            rows = (i_b * L + i_h) * T
            b_dk, b_dv = _live_keys(
                b_dk, b_dv, k_ptr + i_b * k_stride_b + i_k.to(tl.int64) * k_stride_h, p_v,
                q_ptr + i_b * q_stride_b + i_h.to(tl.int64) * q_stride_h, p_grad, lse_ptr + rows, delta_ptr + rows,
                k0, T, scale * LOG2E, q_stride_t, k_stride_t, v_stride_t, grad_stride_t,
                D, DP, BM, BK, EVEN, STAGES,
            )  # fmt: skip
        if HAS_COMPACT and state == 1:
            b_dv = _compact_keys(
                b_dv, p_grad, alpha_ptr + slot * covered, band_ptr + slot * 4 * band_width(covered, PAD),
                log_z_ptr + slot * covered, k0, T, band_width(covered, PAD), grad_stride_t,
                D, DP, BM, BK, PAD, EVEN, STAGES,
            )  # fmt: skip
        if HAS_DENSE and state == 2:
            b_dv = _dense_keys(
                b_dv, p_grad, dense_ptr + slot * covered * covered, k0, T, covered, grad_stride_t,
                D, DP, BM, BK, EVEN, STAGES,
            )  # fmt: skip

    _store_rows(dv_ptr + (i_b * T * num_value_heads + i_g) * D, b_dv, k0, num_value_heads * D, T, D, DP, BK)
    if HAS_LIVE and i_k >= 0:
        _store_rows(dk_ptr + (i_b * T * K + i_k) * D, b_dk * scale, k0, K * D, T, D, DP, BK)


@triton.jit
def _live_keys(
    b_dk, b_dv, p_k, p_v, p_q, p_grad, p_lse, p_delta, k0, T, scale2,
    q_stride_t, k_stride_t, v_stride_t, grad_stride_t,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add a live head's part to dV and (unscaled) dK of one key block."""
    o_k = k0 + tl.arange(0, BK)
    b_k = load_rows(p_k, k0, k_stride_t, T, BK, D, DP, EVEN)
    b_v = load_rows(p_v, k0, v_stride_t, T, BK, D, DP, EVEN)
    # Query blocks wholly after the key block need no mask.
    middle = tl.minimum(tl.cdiv(k0 + BK, BM) * BM, T)
    for m0 in tl.range((k0 // BM) * BM, middle, BM, num_stages=STAGES):
        b_dk, b_dv = _live_step(
            b_dk, b_dv, b_k, b_v, p_q, p_grad, p_lse, p_delta, m0, o_k, T, scale2, q_stride_t, grad_stride_t,
            D, DP, BM, True, EVEN,
        )  # fmt: skip
    for m0 in tl.range(middle, T, BM, num_stages=STAGES):
        b_dk, b_dv = _live_step(
            b_dk, b_dv, b_k, b_v, p_q, p_grad, p_lse, p_delta, m0, o_k, T, scale2, q_stride_t, grad_stride_t,
            D, DP, BM, False, EVEN,
        )  # fmt: skip
    return b_dk, b_dv


@triton.jit
def _live_step(
    b_dk, b_dv, b_k, b_v, q_ptr, grad_ptr, lse_ptr, delta_ptr, m0, o_k, T, scale2, q_stride, grad_stride,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, MASK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Add one query block's part to dV and (unscaled) dK of a live head."""
    o_m = m0 + tl.arange(0, BM)
    b_q = load_rows(q_ptr, m0, q_stride, T, BM, D, DP, EVEN)
    b_grad = load_rows(grad_ptr, m0, grad_stride, T, BM, D, DP, EVEN)
    # Rows beyond T: +inf makes their weights zero.
    b_lse = tl.load(lse_ptr + o_m, mask=o_m < T, other=float("inf"))
    b_delta = tl.load(delta_ptr + o_m, mask=o_m < T, other=0.0)
    # P is computed again from the stored log-sum-exp, in place of T x T numbers stored by the forward pass.
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee")
    b_p = tl.exp2(b_s * scale2 - (b_lse * LOG2E)[None, :])
    if MASK:
        b_p = tl.where(o_m[None, :] >= o_k[:, None], b_p, 0.0)
    b_dv = add_product(b_dv, b_p, b_grad, "ieee")  # dV = P^T dO
    b_dp = tl.dot(b_v, tl.trans(b_grad), input_precision="ieee")
    b_ds = b_p * (b_dp - b_delta[None, :])  # dS = P * (dO V^T - delta), transposed
    b_dk = add_product(b_dk, b_ds, b_q, "ieee")  # dK = dS^T Q; its scale comes with the store
    return b_dk, b_dv


@triton.jit
def _compact_keys(
    b_dv, p_grad, p_alpha, p_band, p_log_z, k0, T, band_stride, grad_stride_t,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PAD: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add a compact head's part, P^T dO, to dV of one key block."""
    o_k = k0 + tl.arange(0, BK)
    key = tl.arange(0, BK)[:, None]
    query = tl.arange(0, BM)[None, :]
    b_alpha = tl.load(p_alpha + o_k, mask=o_k < T, other=float("-inf"))
    for m0 in tl.range((k0 // BM) * BM, T, BM, num_stages=STAGES):
        o_m = m0 + tl.arange(0, BM)
        b_rho = band_tile(p_band, band_stride, query, key, PAD + m0 - k0)
        # Rows beyond T: +inf makes their weights zero; unnormalised ones may be infinite, and their gradients are zero.
        b_z = tl.load(p_log_z + o_m, mask=o_m < T, other=float("inf"))
        b_p = tl.exp2((b_rho - b_z[None, :]) + b_alpha[:, None])  # P(i, j) of Eq. (3), [key, query]
        b_grad = load_rows(p_grad, m0, grad_stride_t, T, BM, D, DP, EVEN)
        b_dv = add_product(b_dv, b_p, b_grad, "ieee")
    return b_dv


@triton.jit
def _dense_keys(
    b_dv, p_grad, p_dense, k0, T, dense_stride, grad_stride_t,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add a dense head's part, P^T dO, to dV of one key block."""
    o_k = k0 + tl.arange(0, BK)
    for m0 in tl.range((k0 // BM) * BM, T, BM, num_stages=STAGES):
        o_m = m0 + tl.arange(0, BM)
        causal = (o_m < T)[None, :] & (o_m[None, :] >= o_k[:, None])
        p_p = p_dense + o_m.to(tl.int64)[None, :] * dense_stride + o_k[:, None]
        b_p = tl.load(p_p, mask=causal, other=0.0)
        b_grad = load_rows(p_grad, m0, grad_stride_t, T, BM, D, DP, EVEN)
        b_dv = add_product(b_dv, b_p, b_grad, "ieee")
    return b_dv


@triton.jit
def query_block_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr, key_ptr, value_ptr, L, T, scale,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_t,
    v_stride_b, v_stride_h, v_stride_t, grad_stride_b, grad_stride_h, grad_stride_t,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dQ of one (batch element, live head, query block)."""
    m0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * BM
    i_b = (tl.program_id(0) // L).to(tl.int64)
    i_h = (tl.program_id(0) % L).to(tl.int64)
    o_m = m0 + tl.arange(0, BM)
    scale2 = scale * LOG2E
    p_k = k_ptr + i_b * k_stride_b + tl.load(key_ptr + i_h).to(tl.int64) * k_stride_h
    p_v = v_ptr + i_b * v_stride_b + tl.load(value_ptr + i_h).to(tl.int64) * v_stride_h
    b_q = load_rows(q_ptr + i_b * q_stride_b + i_h * q_stride_h, m0, q_stride_t, T, BM, D, DP, EVEN)
    p_grad = grad_ptr + i_b * grad_stride_b + i_h * grad_stride_h
    b_grad = load_rows(p_grad, m0, grad_stride_t, T, BM, D, DP, EVEN)
    row = (i_b * L + i_h) * T + o_m
    b_lse = tl.load(lse_ptr + row, mask=o_m < T, other=float("inf")) * LOG2E
    b_delta = tl.load(delta_ptr + row, mask=o_m < T, other=0.0)
    b_dq = tl.zeros((BM, DP), dtype=tl.float32)
    for k0 in tl.range(0, tl.minimum(m0 + BM, T), BK, num_stages=STAGES):
        o_k = k0 + tl.arange(0, BK)
        b_k = load_rows(p_k, k0, k_stride_t, T, BK, D, DP, EVEN)
        b_v = load_rows(p_v, k0, v_stride_t, T, BK, D, DP, EVEN)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_p = tl.exp2(b_s * scale2 - b_lse[:, None])
        b_p = tl.where(o_m[:, None] >= o_k[None, :], b_p, 0.0)
        b_dp = tl.dot(b_grad, tl.trans(b_v), input_precision="ieee")
        b_ds = b_p * (b_dp - b_delta[:, None])  # dS = P * (dO V^T - delta)
        b_dq = add_product(b_dq, b_ds, b_k, "ieee")  # dQ = dS K; its scale comes with the store
    _store_rows(dq_ptr + (i_b * T * L + i_h) * D, b_dq * scale, m0, L * D, T, D, DP, BM)


# --- memory


@triton.jit
def _store_rows(pointer, value, start, stride, T, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr):
    """Store [ROWS, DP] as rows of a [T, D] matrix from a start."""
    row = start + tl.arange(0, ROWS)
    o_d = tl.arange(0, DP)
    mask = (row < T)[:, None] & (o_d < D)[None, :]
    p = pointer + row.to(tl.int64)[:, None] * stride + o_d[None, :]
    tl.store(p, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def band_width(covered, PAD: tl.constexpr):
    """Return the length of one copy of rho in `band`, for patterns that cover so many positions."""
    return PAD + tl.cdiv(covered, PAD) * PAD


@triton.jit
def band_tile(p_band, band_stride, query, key, start):
    """Load rho at distances start + query - key as aligned vectors over queries; -inf at future keys.

    Key k reads copy k mod 4 of the band, so that the vectors of all keys are aligned alike.
    """
    return tl.load(p_band + start + (key % 4) * band_stride + (query - (key // 4) * 4))
