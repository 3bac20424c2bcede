"""Flash decoding of live and frozen heads in Triton: few queries, the keys cut into parts, and how parts are merged.

    live    part p: o_p = sum_j 2^(s_ij - l_p) v_j,  l_p = log2 sum_j 2^s_ij;   merged: sum_p 2^(l_p - l) o_p
    frozen  part p: o_p = sum_j P(i, j) v_j;                                    merged: sum_p o_p

Pointers are called as the arguments of `decode_heads` in op.py. EVEN says that equally many consecutive live slots read
each KV head; ORDERED that these are the first value heads; ON_DEVICE that `first_ptr` holds the position of the first
query, which `host_first` is otherwise; PADDED that sequences begin at `pad_ptr`. Names are those of launch.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from saf.ops.launch import add_product, cdiv, launch, padded_channels, shared_memory, strides

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# The device language's constants and ranges are not what their annotations say.

KEYS, WARPS, STAGES = 128, 4, 3
"""Keys read at once, warps and stages of the pipeline, of which two wait in memory: 16 KiB of 64 channels in 16 bits
each. Chosen, not measured against others."""
FEWEST_KEYS = 32
"""Fewest keys of a matrix product."""
RESERVED = {2: 24 << 10, 4: 48 << 10}
"""Shared memory (bytes) that a program needs besides its stages, by the bytes of a value: at least what compiling for
9.0 shows."""
BLOCK_ROWS = 16
"""Rows of one product, the fewest that tensor cores take; of 64, float32 weights spill (checked by compiling)."""
PARTS = 32
"""Parts that a program of the merge reads at once."""
LOG2E = 1.4426950408889634
"""Scores times this are exponents of 2."""


def decode(
    query: Tensor, key: Tensor, value: Tensor, live_read: Tensor | None, live_readers: Tensor | None, group: int,
    frozen_read: Tensor | None, frozen_readers: Tensor | None, lowest: int, distance: Tensor | None,
    key_scale: Tensor | None, row_scale: Tensor | None, first: Tensor | None, host_first: int, left_pad: Tensor | None,
    parts: int, scale: float, out: Tensor, *, precision: str,
) -> None:  # fmt: skip
    """Write all heads into `out [B, L + F, rows, D]`, stored as `[B, rows, L + F, D]`; arguments of `decode_heads`."""
    (batch, live, rows, dim), kv, length = query.shape, key.shape[1], value.shape[-2]
    frozen = 0 if distance is None else distance.shape[0]
    sums = value.new_empty(parts, batch, live + frozen, rows, dim, dtype=torch.float32)
    logs = value.new_empty(parts, batch, live, rows, dtype=torch.float32)
    keys = keys_at_once(dim, value.element_size(), shared_memory(value.device))
    readers = 1 if frozen_readers is None else frozen_readers.shape[1]
    blocks = cdiv(rows * readers, BLOCK_ROWS)
    groups = 0 if frozen_read is None else frozen_read.shape[0] * blocks
    part_keys = cdiv(cdiv(length, parts), keys) * keys
    optional = live_read, live_readers, frozen_read, frozen_readers, distance, key_scale, row_scale, first, left_pad
    launch(
        flash_decode_kernel, (parts, kv + groups, batch), query, key, value,
        *[value if one is None else one for one in optional],  # absent ones are never read
        sums, logs, host_first, length, part_keys, lowest, scale * LOG2E, *strides(query, key, value),
        0 if distance is None else distance.stride(0), *sums.stride()[:2], *logs.stride()[:2],
        LIVE=live, KV=kv, LIVE_GROUP=group, EVEN=live_readers is None, ORDERED=live_read is None, FROZEN=frozen,
        ROWS=rows, GROUP=readers, BLOCKS=blocks, D=dim, DP=padded_channels(dim), BM=BLOCK_ROWS, BK=keys,
        ON_DEVICE=first is not None, PADDED=left_pad is not None, PRECISION=precision, STAGES=STAGES, num_warps=WARPS,
        device=value.device,
    )  # fmt: skip
    merge(sums, logs, out)


def keys_at_once(dim: int, itemsize: int, shared: int) -> int:
    """Return how many keys a program reads at once: as many as two stages of keys and values leave room for.

    >>> [keys_at_once(dim, 2, 227 << 10) for dim in (64, 128, 192)], keys_at_once(128, 2, 99 << 10)
    ([128, 128, 64], 64)
    """
    keys = KEYS
    while keys > FEWEST_KEYS and 4 * keys * padded_channels(dim) * itemsize + RESERVED[itemsize] > shared:
        keys //= 2
    return keys


@triton.jit(do_not_specialize=["host_first", "T", "part_keys", "lowest"])
def flash_decode_kernel(
    q_ptr, k_ptr, v_ptr, live_read_ptr, live_readers_ptr, frozen_read_ptr, frozen_readers_ptr, distance_ptr,
    key_scale_ptr, row_scale_ptr, first_ptr, pad_ptr, sums_ptr, logs_ptr, host_first, T, part_keys, lowest, scale,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t,
    table_stride, sums_stride_part, sums_stride_b, logs_stride_part, logs_stride_b,
    LIVE: tl.constexpr, KV: tl.constexpr, LIVE_GROUP: tl.constexpr, EVEN: tl.constexpr, ORDERED: tl.constexpr,
    FROZEN: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, ON_DEVICE: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take one part of the keys of one KV head that live slots read, or of one value head that frozen slots read."""
    i_part = tl.program_id(0)
    i_g = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    first = host_first
    if ON_DEVICE:
        first = tl.load(first_ptr).to(tl.int32)
    pad = host_first * 0  # of the type that a load has: a plain 0 would be a compile-time constant
    if PADDED:
        pad = tl.load(pad_ptr + i_b).to(tl.int32)
    p_v = v_ptr + i_b * v_stride_b
    p_sums = sums_ptr + i_part * sums_stride_part + i_b * sums_stride_b
    if i_g < KV:
        own = i_g
        if not ORDERED:
            own = tl.load(live_read_ptr + i_g)
        _sum_live(
            q_ptr + i_b * q_stride_b, k_ptr + i_b * k_stride_b + i_g.to(tl.int64) * k_stride_h,
            p_v + own.to(tl.int64) * v_stride_h, live_readers_ptr, p_sums,
            logs_ptr + i_part * logs_stride_part + i_b * logs_stride_b, first, pad, i_part, i_g, T, part_keys,
            q_stride_h, q_stride_t, k_stride_t, v_stride_t, scale,
            ROWS, LIVE_GROUP, EVEN, D, DP, BM, BK, PRECISION, STAGES,
        )  # fmt: skip
    elif FROZEN > 0:
        _sum_frozen(
            p_v + lowest.to(tl.int64) * v_stride_h, frozen_read_ptr, frozen_readers_ptr, distance_ptr, key_scale_ptr,
            row_scale_ptr, p_sums + LIVE * ROWS * D, first, pad, i_part, i_g - KV, T, part_keys,
            v_stride_h, v_stride_t, table_stride,
            ROWS, GROUP, BLOCKS, D, DP, BM, BK, PRECISION, STAGES,
        )  # fmt: skip


@triton.jit
def _sum_live(
    q_ptr, k_ptr, v_ptr, live_readers_ptr, sums_ptr, logs_ptr, first, pad, i_part, i_g, T, part_keys,
    q_stride_h, q_stride_t, k_stride_t, v_stride_t, scale,
    ROWS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend over one part of the keys with the live slots that read one KV head of one sequence.

    A row is a query of one of these slots. What is stored is normalised over the part, with the base-2 logarithm of its
    sum of exponentials, minus infinity where the part has no key for a query.
    """
    o_m = tl.arange(0, BM)
    member = o_m // ROWS
    if EVEN:
        slot = tl.where(member < GROUP, i_g * GROUP + member, -1).to(tl.int64)
    else:
        slot = tl.load(live_readers_ptr + i_g * GROUP + member, mask=member < GROUP, other=-1).to(tl.int64)
    real = slot >= 0
    row = o_m % ROWS
    query = first + row
    o_d = tl.arange(0, DP)
    p_q = q_ptr + (slot * q_stride_h + row.to(tl.int64) * q_stride_t)[:, None] + o_d[None, :]
    b_q = tl.load(p_q, mask=real[:, None] & (o_d < D)[None, :], other=0.0)

    acc = tl.zeros((BM, DP), dtype=tl.float32)
    peak = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    lo = tl.maximum(i_part * part_keys, pad // BK * BK)
    hi = tl.minimum(tl.minimum(i_part * part_keys + part_keys, first + ROWS), T)
    for k0 in tl.range(lo, hi, BK, num_stages=STAGES):
        o_k = k0 + tl.arange(0, BK)
        inside = (o_k >= pad) & (o_k < hi)
        readable = inside[:, None] & (o_d < D)[None, :]
        b_k = tl.load(k_ptr + o_k.to(tl.int64)[:, None] * k_stride_t + o_d[None, :], mask=readable, other=0.0)
        b_score = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
        seen = inside[None, :] & (o_k[None, :] <= query[:, None])
        b_score = tl.where(seen, b_score, float("-inf"))
        peak, base, shrink = _raise_peak(peak, tl.max(b_score, 1))
        b_weight = tl.exp2(b_score - base[:, None])
        b_v = tl.load(v_ptr + o_k.to(tl.int64)[:, None] * v_stride_t + o_d[None, :], mask=readable, other=0.0)
        acc = add_product(acc * shrink[:, None], b_weight, b_v, PRECISION)
        total = total * shrink + tl.sum(b_weight, 1)

    empty = total == 0.0
    p_sums = sums_ptr + (slot * ROWS + row)[:, None] * D + o_d[None, :]
    tl.store(p_sums, acc / tl.where(empty, 1.0, total)[:, None], mask=real[:, None] & (o_d < D)[None, :])
    b_log = tl.where(empty, float("-inf"), peak + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(logs_ptr + slot * ROWS + row, b_log, mask=real)


@triton.jit
def _sum_frozen(
    v_ptr, frozen_read_ptr, frozen_readers_ptr, distance_ptr, key_scale_ptr, row_scale_ptr, sums_ptr, first, pad,
    i_part, i_block, T, part_keys, v_stride_h, v_stride_t, table_stride,
    ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum the values of one part of the keys for the frozen slots that read one value head of one sequence.

    A row of the product is a query of one of these slots: P(i - s, j - s), rounded to the values' dtype, where s is the
    sequence's first real position. Values and sums begin with those of the sequence, sums with the first frozen slot.
    """
    i_g = i_block // BLOCKS
    o_m = (i_block % BLOCKS) * BM + tl.arange(0, BM)
    slot = tl.load(frozen_readers_ptr + i_g * GROUP + o_m // ROWS, mask=o_m < GROUP * ROWS, other=-1).to(tl.int64)
    query = first + o_m % ROWS
    real = (slot >= 0) & (query >= pad)
    b_row_scale = tl.load(row_scale_ptr + slot * table_stride + query - pad, mask=real, other=0.0).to(tl.float32)

    o_d = tl.arange(0, DP)
    head = tl.load(frozen_read_ptr + i_g).to(tl.int64)
    p_v = v_ptr + head * v_stride_h + o_d[None, :]
    acc = tl.zeros((BM, DP), dtype=tl.float32)
    lo = tl.maximum(i_part * part_keys, pad // BK * BK)
    hi = tl.minimum(tl.minimum(i_part * part_keys + part_keys, first + ROWS), T)
    for k0 in tl.range(lo, hi, BK, num_stages=STAGES):
        o_k = k0 + tl.arange(0, BK)
        inside = (o_k >= pad) & (o_k < hi)
        lag = query[:, None] - o_k[None, :]
        seen = real[:, None] & inside[None, :] & (lag >= 0)
        b_distance = tl.load(distance_ptr + slot[:, None] * table_stride + lag, mask=seen, other=0.0).to(tl.float32)
        p_key_scale = key_scale_ptr + slot[:, None] * table_stride + (o_k - pad)[None, :]
        b_key_scale = tl.load(p_key_scale, mask=seen, other=0.0)
        b_weight = b_distance * b_key_scale * b_row_scale[:, None]
        p_k = p_v + o_k.to(tl.int64)[:, None] * v_stride_t
        b_v = tl.load(p_k, mask=inside[:, None] & (o_d < D)[None, :], other=0.0)
        acc = add_product(acc, b_weight, b_v, PRECISION)

    p_sums = sums_ptr + (slot * ROWS + o_m % ROWS)[:, None] * D + o_d[None, :]
    tl.store(p_sums, acc, mask=(slot >= 0)[:, None] & (o_d < D)[None, :])


@triton.jit
def _raise_peak(peak, b_score):
    """Return the new peak of scores, a finite base for exponents, and the factor of sums relative to the old peak.

    Before the first key the peak is minus infinity, and a difference of infinities would be NaN; the base is 0 then.
    """
    higher = tl.maximum(peak, b_score)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, base, tl.exp2(peak - base)


# --- merging parts


def merge(sums: Tensor, logs: Tensor, out: Tensor) -> None:
    """Merge outputs of each part, `[parts, B, H, rows, D]`, by live heads' logarithms `[parts, B, L, rows]`."""
    parts, batch, heads, rows, dim = sums.shape
    live, width = logs.shape[2], padded_channels(dim)
    warps = 1 if dim <= 128 else width // 64  # of more channels one warp would spill
    launch(
        merge_kernel, (batch * rows, heads), sums, logs, out, parts, sums.stride(0), logs.stride(0),
        LIVE=live, FROZEN=heads - live, ROWS=rows, D=dim, DP=width, BP=PARTS, num_warps=warps, device=sums.device,
    )  # fmt: skip


@triton.jit(do_not_specialize=["parts"])
def merge_kernel(
    sums_ptr, logs_ptr, out_ptr, parts, sums_stride_part, logs_stride_part,
    LIVE: tl.constexpr, FROZEN: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Write one head of one query: a live head's parts weighed by their exponentials, a frozen one's added up."""
    i_b = (tl.program_id(0) // ROWS).to(tl.int64)
    i_row = tl.program_id(0) % ROWS
    i_h = tl.program_id(1)
    o_d = tl.arange(0, DP)
    p_sums = sums_ptr + ((i_b * (LIVE + FROZEN) + i_h) * ROWS + i_row) * D
    b_sum = tl.zeros((DP,), dtype=tl.float32)
    if i_h < LIVE:
        p_logs = logs_ptr + (i_b * LIVE + i_h) * ROWS + i_row
        peak = tl.full((), float("-inf"), dtype=tl.float32)
        total = tl.zeros((), dtype=tl.float32)
        for p0 in range(0, parts, BP):
            o_p = p0 + tl.arange(0, BP)
            b_log = tl.load(p_logs + o_p.to(tl.int64) * logs_stride_part, mask=o_p < parts, other=float("-inf"))
            peak, base, shrink = _raise_peak(peak, tl.max(b_log, 0))
            b_weight = tl.exp2(b_log - base)
            p_own = p_sums + o_p.to(tl.int64)[:, None] * sums_stride_part + o_d[None, :]
            b_part = tl.load(p_own, mask=(o_p < parts)[:, None] & (o_d < D)[None, :], other=0.0)
            b_sum = b_sum * shrink + tl.sum(b_part * b_weight[:, None], 0)
            total = total * shrink + tl.sum(b_weight, 0)
        b_sum = b_sum / tl.where(total == 0.0, 1.0, total)
    else:
        for p0 in range(0, parts, BP):
            o_p = p0 + tl.arange(0, BP)
            p_own = p_sums + o_p.to(tl.int64)[:, None] * sums_stride_part + o_d[None, :]
            b_sum += tl.sum(tl.load(p_own, mask=(o_p < parts)[:, None] & (o_d < D)[None, :], other=0.0), 0)
    p_out = out_ptr + ((i_b * ROWS + i_row) * (LIVE + FROZEN) + i_h) * D + o_d
    tl.store(p_out, b_sum.to(out_ptr.dtype.element_ty), mask=o_d < D)
