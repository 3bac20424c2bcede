"""Flash decoding of live and frozen heads in Triton: the keys are cut into parts, and the parts are merged.

    live    part p: o_p = sum_j 2^(s_ij - l_p) v_j,  l_p = log2 sum_j 2^s_ij;   merged: sum_p 2^(l_p - l) o_p
    frozen  part p: o_p = sum_j P(i, j) v_j;                                    merged: sum_p o_p

A program of `flash_decode_kernel` takes one part of the keys of one value head, for the live slots or for the frozen
slots that read it. Each row of its product is a query of one of these slots. `merge_kernel` takes one head of one
query. Names are those of launch.py; `kv_read` and `kv_readers` those of `decode_maps`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from saf.ops.launch import add_product, cdiv, launch, padded_channels, shared_memory, strides

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# The device language's constants and ranges are not what their annotations say.

# Fewest keys of a part: fewer would be read faster than their sums are written and added up.
PART_KEYS = 256
# Most parts of all heads together: four for each multiprocessor of an H200, so that all of them read memory.
PROGRAMS = 528
# Keys read at once, warps and stages of the pipeline, of which two wait in memory: 16 KiB of 64 channels in 16 bits
# each. Chosen, not measured against others.
KEYS, WARPS, STAGES = 128, 4, 3
# Fewest keys of a matrix product.
FEWEST_KEYS = 32
# Shared memory (bytes) that a program needs besides its stages, times the bytes of a value: at least what compiling for
# 9.0 shows.
RESERVED = 12 << 10
# Rows of one product, the fewest that tensor cores take; of 64, float32 weights spill (checked by compiling).
BLOCK_ROWS = 16
# Parts that a program of the merge reads at once.
PARTS = 32
# Scores times this are exponents of 2.
LOG2E = 1.4426950408889634


def decode(
    query: Tensor, key: Tensor, value: Tensor, maps: list[Tensor], patterns: list[Tensor], first: Tensor | int,
    left_pad: Tensor | None, scale: float, out: Tensor,
) -> None:  # fmt: skip
    """Write all heads into `out [B, L + F, rows, D]`, stored as `[B, rows, L + F, D]`; arguments of `decode_heads`."""
    (batch, live, rows, dim), kv, length = query.shape, key.shape[1], value.shape[-2]
    frozen = patterns[0].shape[0] if patterns else 0
    read, readers = maps or (value, value)  # absent tensors are never read
    group = readers.shape[1] if maps else max(1, live // max(1, kv))
    frozen_read = len(read) - kv if frozen else 0
    blocks = cdiv(rows * group, BLOCK_ROWS)
    keys = keys_at_once(dim, value.element_size(), shared_memory(value.device))
    # From the length of the tensors alone, the whole cache if it has a fixed size: the host does not know how much of
    # it is filled, and a captured graph keeps its grid.
    parts = max(1, min(cdiv(length, PART_KEYS), PROGRAMS // (batch * (kv + frozen_read))))
    sums = value.new_empty(parts, batch, live + frozen, rows, dim, dtype=torch.float32)
    logs = value.new_empty(parts, batch, live, rows, dtype=torch.float32)
    on_device = isinstance(first, Tensor)
    launch(
        flash_decode_kernel, (parts, kv + frozen_read * blocks, batch), query, key, value, read, readers,
        *(patterns or (value, value, value)), first if on_device else value, value if left_pad is None else left_pad,
        sums, logs, 0 if on_device else first, length, cdiv(cdiv(length, parts), keys) * keys, scale * LOG2E,
        *strides(query, key, value), patterns[0].stride(0) if patterns else 0,
        LIVE=live, FROZEN=frozen, KV=kv, GROUP=group, ROWS=rows, BLOCKS=blocks, D=dim, DP=padded_channels(dim),
        BM=BLOCK_ROWS, BK=keys, MAPPED=bool(maps), ON_DEVICE=on_device, PADDED=left_pad is not None, STAGES=STAGES,
        num_warps=WARPS, device=value.device,
    )  # fmt: skip
    merge(sums, logs, out)


def keys_at_once(dim: int, itemsize: int, shared: int) -> int:
    """Return how many keys a program reads at once: as many as two stages of keys and values leave room for.

    >>> [keys_at_once(dim, 2, 227 << 10) for dim in (64, 128, 192)], keys_at_once(128, 2, 99 << 10)
    ([128, 128, 64], 64)
    """
    keys = KEYS
    while keys > FEWEST_KEYS and (4 * keys * padded_channels(dim) + RESERVED) * itemsize > shared:
        keys //= 2
    return keys


@triton.jit(do_not_specialize=["host_first", "T", "part_keys"])
def flash_decode_kernel(
    q_ptr, k_ptr, v_ptr, read_ptr, readers_ptr, distance_ptr, key_scale_ptr, row_scale_ptr, first_ptr, pad_ptr,
    sums_ptr, logs_ptr, host_first, T, part_keys, scale,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t,
    table_stride,
    LIVE: tl.constexpr, FROZEN: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    MAPPED: tl.constexpr, ON_DEVICE: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum one part of the keys for the slots of one kind that read one value head of one sequence.

    The first query stands at `host_first`, or ON_DEVICE at the number in `first_ptr`. BLOCKS programs share the frozen
    slots of a value head, BM rows of the product each.
    """
    i_part = tl.program_id(0)
    i_g = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    first = host_first
    if ON_DEVICE:
        first = tl.load(first_ptr).to(tl.int32)
    pad = host_first * 0  # of the type that a load has: a plain 0 would be a compile-time constant
    if PADDED:
        pad = tl.load(pad_ptr + i_b).to(tl.int32)
    # Parts behind the last query, and those of the padding, have no keys: their sums are zero, their logarithms -inf.
    lo = tl.maximum(i_part * part_keys, pad // BK * BK)
    hi = tl.minimum(tl.minimum(i_part * part_keys + part_keys, first + ROWS), T)
    p_v = v_ptr + i_b * v_stride_b
    place = i_part * tl.num_programs(2) + i_b
    p_sums = sums_ptr + place * ((LIVE + FROZEN) * ROWS * D)
    # The first KV programs take live slots, by key head; the others frozen ones, BLOCKS for each value head.
    if i_g < KV:
        head = i_g
        if MAPPED:
            head = tl.load(read_ptr + i_g)
        _sum_live(
            q_ptr + i_b * q_stride_b, k_ptr + i_b * k_stride_b + i_g.to(tl.int64) * k_stride_h,
            p_v + head.to(tl.int64) * v_stride_h, readers_ptr, p_sums, logs_ptr + place * (LIVE * ROWS),
            i_g, lo, hi, first, pad, scale, q_stride_h, q_stride_t, k_stride_t, v_stride_t,
            GROUP, ROWS, D, DP, BM, BK, MAPPED, STAGES,
        )  # fmt: skip
    elif FROZEN > 0:
        i_block = i_g - KV
        i_read = KV + i_block // BLOCKS
        _sum_frozen(
            p_v + tl.load(read_ptr + i_read).to(tl.int64) * v_stride_h, readers_ptr, distance_ptr, key_scale_ptr,
            row_scale_ptr, p_sums, i_read, (i_block % BLOCKS) * BM, lo, hi, first, pad, v_stride_t, table_stride,
            LIVE, GROUP, ROWS, D, DP, BM, BK, STAGES,
        )  # fmt: skip


@triton.jit
def _sum_live(
    p_q, p_k, p_v, readers_ptr, p_sums, p_logs, i_g, lo, hi, first, pad, scale,
    q_stride_h, q_stride_t, k_stride_t, v_stride_t,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, MAPPED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend over the keys from `lo` to `hi` of KV head `i_g`.

    What is stored is normalised over the part, with the base-2 logarithm of its sum of exponentials, minus infinity
    where the part has no key for a query.
    """
    o_m = tl.arange(0, BM)
    slot = _find_slots(readers_ptr, i_g, o_m // ROWS, GROUP, MAPPED)
    real = slot >= 0
    row = o_m % ROWS
    query = first + row
    o_d = tl.arange(0, DP)
    p_q += (slot * q_stride_h + row.to(tl.int64) * q_stride_t)[:, None] + o_d[None, :]
    b_q = tl.load(p_q, mask=real[:, None] & (o_d < D)[None, :], other=0.0)

    acc = tl.zeros((BM, DP), dtype=tl.float32)
    peak = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    for k0 in tl.range(lo, hi, BK, num_stages=STAGES):
        o_k = k0 + tl.arange(0, BK)
        # Positions behind the last query may hold anything, NaN too: they are not even read.
        inside = (o_k >= pad) & (o_k < hi)
        readable = inside[:, None] & (o_d < D)[None, :]
        b_k = tl.load(p_k + o_k.to(tl.int64)[:, None] * k_stride_t + o_d[None, :], mask=readable, other=0.0)
        b_score = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        seen = inside[None, :] & (o_k[None, :] <= query[:, None])  # several queries: each sees keys up to its own
        b_score = tl.where(seen, b_score, float("-inf"))
        peak, base, shrink = _raise_peak(peak, tl.max(b_score, 1))
        b_weight = tl.exp2(b_score - base[:, None])
        b_v = tl.load(p_v + o_k.to(tl.int64)[:, None] * v_stride_t + o_d[None, :], mask=readable, other=0.0)
        acc = add_product(acc * shrink[:, None], b_weight, b_v, "ieee")
        total = total * shrink + tl.sum(b_weight, 1)

    empty = total == 0.0
    p_sums += (slot * ROWS + row)[:, None] * D + o_d[None, :]
    tl.store(p_sums, acc / tl.where(empty, 1.0, total)[:, None], mask=real[:, None] & (o_d < D)[None, :])
    b_log = tl.where(empty, float("-inf"), peak + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(p_logs + slot * ROWS + row, b_log, mask=real)


@triton.jit
def _sum_frozen(
    p_v, readers_ptr, distance_ptr, key_scale_ptr, row_scale_ptr, p_sums, i_read, m0, lo, hi, first, pad,
    v_stride_t, table_stride,
    LIVE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum P(i - s, j - s) v_j over the keys from `lo` to `hi`, where s is the sequence's first real position.

    Weights are rounded to the values' dtype.
    """
    o_m = m0 + tl.arange(0, BM)
    slot = _find_slots(readers_ptr, i_read, o_m // ROWS, GROUP, True)
    row = o_m % ROWS
    query = first + row
    real = (slot >= 0) & (query >= pad)
    o_table = (slot - LIVE) * table_stride  # tables have frozen slots alone, in slot order
    b_row_scale = tl.load(row_scale_ptr + o_table + query - pad, mask=real, other=0.0).to(tl.float32)

    o_d = tl.arange(0, DP)
    acc = tl.zeros((BM, DP), dtype=tl.float32)
    for k0 in tl.range(lo, hi, BK, num_stages=STAGES):
        o_k = k0 + tl.arange(0, BK)
        inside = (o_k >= pad) & (o_k < hi)
        lag = query[:, None] - o_k[None, :]
        seen = real[:, None] & inside[None, :] & (lag >= 0)
        # Gathers from tables of T numbers: one head's are read by all sequences, so that they come from the cache.
        b_distance = tl.load(distance_ptr + o_table[:, None] + lag, mask=seen, other=0.0).to(tl.float32)
        b_key_scale = tl.load(key_scale_ptr + o_table[:, None] + (o_k - pad)[None, :], mask=seen, other=0.0)
        b_weight = b_distance * b_key_scale * b_row_scale[:, None]  # P(i, j) of Eq. (3)
        p_k = p_v + o_k.to(tl.int64)[:, None] * v_stride_t + o_d[None, :]
        b_v = tl.load(p_k, mask=inside[:, None] & (o_d < D)[None, :], other=0.0)
        acc = add_product(acc, b_weight, b_v, "ieee")

    p_sums += (slot * ROWS + row)[:, None] * D + o_d[None, :]
    tl.store(p_sums, acc, mask=(slot >= 0)[:, None] & (o_d < D)[None, :])


@triton.jit
def _find_slots(readers_ptr, i_read, member, GROUP: tl.constexpr, MAPPED: tl.constexpr):
    """Return the slots with these numbers among the readers of a value head, int64; -1 beyond the last of them."""
    if MAPPED:
        slot = tl.load(readers_ptr + i_read * GROUP + member, mask=member < GROUP, other=-1)
    else:
        slot = tl.where(member < GROUP, i_read * GROUP + member, -1)
    return slot.to(tl.int64)


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
