"""`measure_by_kernel` measures a layer in Triton: a program takes one tile of the pattern through all sequences.

A first kernel computes row log-sum-exps, a second one visits every causal tile once. Letters in names are those of
saf/ops/launch.py. The D channels are loaded in two parts, D0 and D1, padded to powers of two. Logarithms are to base 2.
docs/method.md, section 9, has the algorithm.
"""
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# The device language's constants and ranges are not what their annotations say.

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saf.ops.launch import SHARED_MEMORY, cdiv, launch, load_rows, padded_channels, shared_memory, strides
from saf.ops.live import score_scale
from saf.ops.tensors import unit_stride
from saf.statistics import FLOOR, LayerStatistics

SCRATCH_BYTES = 1 << 28  # memory for the sums of tiles; a band of row blocks is measured at a time, at least one block
FLOAT32_BYTES = 160 << 10  # shared memory of a program in float32 at 256 channels, the largest of all
PRECISION = "tf32x3"  # of float32 products: an eighth of the time of full precision, and statistics stay within 1e-6


def measure_by_kernel(
    query: Tensor,
    key: Tensor,
    *,
    kv_head: Sequence[int],
    scale: float | None = None,
    config: "TileConfig | None" = None,
    scratch_bytes: int = SCRATCH_BYTES,
) -> LayerStatistics:
    """Measure heads as `measure_layer` does, from queries and keys in float32 or 16 bits; D up to 256.

    Products are in the inputs' dtype, sums over a tile in float32, sums over tiles in float64 in a fixed order, so
    that equal inputs give equal bits. Variance and divergence accumulate deviations from the first sequence's pattern,
    not differences of large sums.

    The entropy takes each row's own normaliser r(i), the sum of its floored entries, from 1 to 1 + T * 1e-9. The
    marginals sum over rows before r(i) is known, so the rows of a block are divided by the middle of their
    normalisers: a relative error of at most T * 1e-9 / 2, which is 8e-6 at 16K and far less for most heads.
    """
    count, heads, length, dim = query.shape
    config = config or choose_tile_config(dim=dim, dtype=query.dtype, shared=shared_memory(query.device))
    query, key = unit_stride(query), unit_stride(key)
    blocks, ratio = cdiv(length, config.block_m), config.block_m // config.block_k  # R
    kv = torch.tensor(list(kv_head), dtype=torch.int32, device=query.device)
    operands = query, key, kv, query.new_empty(count, heads, length, dtype=torch.float32)
    sizes = heads, length, score_scale(scale, dim) / math.log(2), *strides(query, key)
    options = tile_constants(config, length, dim) | {"num_warps": config.num_warps, "device": query.device}
    launch(lse_kernel, (blocks * count * heads,), *operands, *sizes, **options)
    options |= {"maxnreg": config.max_registers} if config.max_registers else {}

    scores = query.new_zeros(2, heads, dtype=torch.float64)
    entropy = query.new_zeros(heads, dtype=torch.float64)
    etas = query.new_zeros(2, heads, blocks * config.block_m, dtype=torch.float64)
    # Row blocks of a band: each has 2RT sums of rows, T of columns and (R + 1)T of diagonals, in float32, a head.
    size = max(1, scratch_bytes // (4 * heads * length * (3 * ratio + 2)))
    for first in range(0, blocks, size):
        band = range(first, min(first + size, blocks))
        sums = _sum_tiles(band, operands, sizes, config, options)
        normaliser, plogp = sums.rows
        scores += sums.scores
        entropy += (normaliser.log2() - plogp / normaliser).sum(-1)
        # The kernel summed columns and diagonals over the rows of a block before their normalisers were known.
        weight = 1 / _midrange(normaliser, config.block_m)
        etas[0, :, :length] += (sums.columns * weight[..., None]).sum(1)
        diagonals = (sums.diagonals * weight[..., None, None, None]).sum(1)  # [heads, R + 1, J, block_k]
        # diagonals[:, turn, place] has the sums of block_k distances, from (place + turn - R) * block_k on. The first R
        # blocks of `by_distance` are of negative distances, beyond the diagonal: they are zero, and left out.
        by_distance = diagonals.new_zeros(heads, band.stop * ratio + ratio, config.block_k)
        for turn in range(ratio + 1):
            by_distance[:, turn : turn + band.stop * ratio] += diagonals[:, turn]
        etas[1, :, : band.stop * config.block_m] += by_distance[:, ratio:].flatten(1)
    return LayerStatistics(
        variance=scores[0] / (max(count - 1, 1) * length**2),  # Eq. (1)
        forward_kl=scores[1] * (math.log(2) / (count * length)),  # Eq. (2)
        eta_abs=etas[0, :, :length],  # Eq. (S.4)
        eta_rel=etas[1, :, :length],
        row_entropy=entropy * (math.log(2) / length),
    )


class BandSums(NamedTuple):
    """Sums over the tiles of a band of row blocks; F is the floored mean, R = block_m / block_k, J key blocks."""

    scores: Tensor  # squared deviations and A log2(A / mean), `[2, heads]` float64
    rows: Tensor  # F and F log2 F of each row, `[2, heads, rows]` float64
    columns: Tensor  # F over the rows of a block, `[heads, blocks, T]`
    diagonals: Tensor  # F over the rows of one distance, `[heads, blocks, R + 1, J, block_k]`


def _sum_tiles(
    band: range,
    operands: tuple[Tensor, ...],
    sizes: tuple[int | float, ...],
    config: "TileConfig",
    options: Mapping[str, Any],
) -> BandSums:
    """Sum the tiles below the diagonal, then those on it."""
    count, heads, length, _ = operands[0].shape
    block_m, ratio, blocks, device = config.block_m, config.block_m // config.block_k, len(band), operands[0].device
    num_k = ratio * band.stop  # key blocks up to the end of the band
    below, across = sum(ratio * block for block in band), ratio * blocks  # tiles below the diagonal, and on it
    scalar = torch.zeros(2, heads, below + across, device=device)
    row = torch.zeros(2, heads, num_k, blocks * block_m, device=device)
    column = torch.zeros(heads, blocks, length, device=device)
    diagonal = torch.zeros(heads, blocks, ratio + 1, num_k, config.block_k, device=device)
    # Two launches, since tiles on the diagonal compare positions and the many below it do not.
    for diagonals, tiles, offset in ((False, below, 0), (True, across, below)):
        if tiles:
            launch(
                tile_kernel, (tiles, heads), *operands, scalar, row, column, diagonal, count, FLOOR,
                band.start, blocks, num_k, offset, below + across, *sizes, **options, DIAGONAL=diagonals,
            )  # fmt: skip
    row = row[..., : length - band.start * block_m]
    return BandSums(scalar.sum(-1, dtype=torch.float64), row.sum(2, dtype=torch.float64), column, diagonal)


def _midrange(normaliser: Tensor, size: int) -> Tensor:
    """Return the middle of the normalisers `[heads, rows]` of each block of rows."""
    missing = -normaliser.shape[-1] % size
    edge = normaliser[:, -1:].expand(-1, missing)
    low, high = torch.cat([normaliser, edge], 1).unflatten(1, (-1, size)).aminmax(dim=-1)
    return (low + high) / 2


# --- sizes of programs


class TileConfig(NamedTuple):
    """The sizes of a kernel's programs, in tiles, warps and registers."""

    block_m: int = 64  # query rows of a tile, a power of two
    block_k: int = 64  # keys of a tile, a power of two of at most `block_m`
    num_warps: int = 4
    num_stages: int = 2  # depth of the software pipeline over sequences
    max_registers: int = 0  # most registers a thread of the tile kernel, 0 for no limit


def choose_tile_config(*, dim: int, dtype: torch.dtype, shared: int = SHARED_MEMORY) -> TileConfig:
    """Return the fastest configuration for `dim` channels, as measured on an H200.

    With less `shared` memory than float32 takes, tiles are smaller, to fit into 99 KiB.
    """
    if dtype == torch.float32 and shared < FLOAT32_BYTES:
        if dim <= 128:
            return TileConfig(block_k=32, num_stages=2 if dim <= 64 else 1)
        return TileConfig(block_m=32, block_k=16, num_stages=1)
    if dtype == torch.float32:
        if dim <= 64:
            return TileConfig(block_m=128, num_warps=8, num_stages=2)
        return TileConfig(block_k=32, num_stages=2 if dim <= 128 else 1)
    if dim <= 96:
        # At most 168 registers leave room for three programs on a multiprocessor.
        return TileConfig(num_stages=3, max_registers=168)
    return TileConfig(block_k=64 if dim <= 128 else 32)


def tile_constants(config: TileConfig, length: int, dim: int) -> dict[str, int | bool | str]:
    """Return the compile-time arguments of both kernels."""
    half = (padded := padded_channels(dim)) // 2
    rest = padded_channels(dim - half) if dim > half else 0
    # 96 channels are 64 and 32, not 128; and 256 at a time would not fit into registers.
    first, second = (half, rest) if dim > 16 and (half + rest < padded or padded > 128) else (padded, 0)
    return {
        "D": dim, "D0": first, "D1": second, "BM": config.block_m, "BK": config.block_k,
        "EVEN": length % config.block_m == 0, "PRECISION": PRECISION, "STAGES": config.num_stages,
    }  # fmt: skip


# --- device code

FAR = tl.constexpr(1e4)  # for minus infinity: exp2(-FAR) is zero in float32, and differences are numbers, not NaN
TINY = tl.constexpr(1e-37)  # lower bound of the arguments of logarithms, just above the smallest normal float32
LOG_TINY = tl.constexpr(-126.0)  # lower bound of logarithms, below that of TINY
UNSPECIALIZED = ["B", "H", "T", "scale", "floor", "first", "num_m", "num_k", "offset", "num_tiles"]
"""Arguments of either kernel whose values are not compiled in: Triton would compile 1 and multiples of 16 anew."""


@triton.jit
def _add_key_blocks(
    row_sum, row_max, b_q, b_q1, k_ptr, lo, hi, o_m, T, scale, k_stride_t,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BK: tl.constexpr, MASK: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add keys in [lo, hi) to running row sums of exp2(score - running row maximum); return sums and maxima."""
    for k0 in tl.range(lo, hi, BK, num_stages=STAGES):
        b_k = load_rows(k_ptr, k0, k_stride_t, T, BK, D, D0, EVEN)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if D1 > 0:
            b_k = load_rows(k_ptr + D0, k0, k_stride_t, T, BK, D - D0, D1, EVEN)
            b_s = tl.dot(b_q1, tl.trans(b_k), b_s, input_precision=PRECISION)
        b_s = b_s * scale
        if MASK:
            b_s = tl.where(o_m[:, None] >= (k0 + tl.arange(0, BK))[None, :], b_s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(b_s, 1))
        row_sum = row_sum * tl.exp2(row_max - new_max) + tl.sum(tl.exp2(b_s - new_max[:, None]), 1)
        row_max = new_max
    return row_sum, row_max


@triton.jit(do_not_specialize=UNSPECIALIZED)
def lse_kernel(
    q_ptr, k_ptr, kv_ptr, lse_ptr, H, T, scale,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_t,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the row log-sum-exps of one (sequence, head, query block), float32 [B, H, T]."""
    # Row blocks of one head and sequence follow one another, as they share its keys in cache, the longest ones first.
    blocks = tl.cdiv(T, BM)
    m0 = (blocks - 1 - tl.program_id(0) % blocks) * BM
    pattern = tl.program_id(0) // blocks
    i_b = (pattern // H).to(tl.int64)
    i_h = (pattern % H).to(tl.int64)
    q_ptr += i_b * q_stride_b + i_h * q_stride_h
    k_ptr += i_b * k_stride_b + tl.load(kv_ptr + i_h).to(tl.int64) * k_stride_h
    o_m = m0 + tl.arange(0, BM)
    b_q = load_rows(q_ptr, m0, q_stride_t, T, BM, D, D0, EVEN)
    b_q1 = b_q
    if D1 > 0:
        b_q1 = load_rows(q_ptr + D0, m0, q_stride_t, T, BM, D - D0, D1, EVEN)
    row_sum = tl.zeros((BM,), dtype=tl.float32)
    row_max = tl.full((BM,), float("-inf"), tl.float32)
    row_sum, row_max = _add_key_blocks(
        row_sum, row_max, b_q, b_q1, k_ptr, 0, m0, o_m, T, scale, k_stride_t,
        D, D0, D1, BK, False, True, PRECISION, STAGES,
    )  # fmt: skip
    row_sum, row_max = _add_key_blocks(
        row_sum, row_max, b_q, b_q1, k_ptr, m0, tl.minimum(m0 + BM, T), o_m, T, scale, k_stride_t,
        D, D0, D1, BK, True, EVEN, PRECISION, STAGES,
    )  # fmt: skip
    tl.store(lse_ptr + (i_b * H + i_h) * T + o_m, row_max + tl.log2(row_sum), mask=o_m < T)


@triton.jit
def _products(
    q_ptr, k_ptr, m0, k0, T, q_stride_t, k_stride_t,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply the queries and keys of one sequence: [BM, BK]."""
    b_q = load_rows(q_ptr, m0, q_stride_t, T, BM, D, D0, EVEN_Q)
    b_k = load_rows(k_ptr, k0, k_stride_t, T, BK, D, D0, EVEN_K)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    if D1 > 0:
        b_q = load_rows(q_ptr + D0, m0, q_stride_t, T, BM, D - D0, D1, EVEN_Q)
        b_k = load_rows(k_ptr + D0, k0, k_stride_t, T, BK, D - D0, D1, EVEN_K)
        b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision=PRECISION)
    return b_s


@triton.jit
def _blocks_of_tile(t, first, DIAGONAL: tl.constexpr, RATIO: tl.constexpr):
    """Return row and key block of tile t, from row block `first` on: on the diagonal, or else wholly below it."""
    if DIAGONAL:
        i_m = first + t // RATIO
        i_k = first * RATIO + t
    else:
        # Row block i has i * RATIO tiles below the diagonal: invert i (i - 1) / 2 <= pair, then correct the rounding.
        t += RATIO * (first * (first - 1) // 2)
        pair = t // RATIO
        i_m = ((1 + tl.sqrt(1 + 8 * pair.to(tl.float32))) / 2).to(tl.int32)
        i_m = tl.where(i_m * (i_m - 1) // 2 > pair, i_m - 1, i_m)
        i_m = tl.where(i_m * (i_m + 1) // 2 <= pair, i_m + 1, i_m)
        i_k = (pair - i_m * (i_m - 1) // 2) * RATIO + t % RATIO
    return i_m, i_k


@triton.jit
def _write_marginals(
    b_mean, inside, row_ptr, column_ptr, diagonal_ptr, H, T, floor, first, num_m, num_k,
    i_h, i_m, i_k, o_m, o_k, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write sums over rows, columns and diagonals of a tile of the floored mean."""
    RATIO: tl.constexpr = BM // BK
    i_band = i_m - first
    # Not tl.maximum, which would turn NaN into the floor.
    b_f = tl.where(b_mean < floor, floor, b_mean)
    p_row = row_ptr + (i_h * num_k + i_k) * (num_m * BM) + (o_m - first * BM)
    tl.store(p_row + tl.cast(H, tl.int64) * num_k * (num_m * BM), tl.sum(tl.where(inside, b_f * tl.log2(b_f), 0.0), 1))
    b_f = tl.where(inside, b_f, 0.0)
    tl.store(p_row, tl.sum(b_f, 1))
    tl.store(column_ptr + (i_h * num_m + i_band) * T + o_k, tl.sum(b_f, 0), mask=o_k < T)

    # Skew the tile: column c then holds entries whose distance is c modulo BK, `turn` says which multiple of BK to add.
    o_r = tl.arange(0, BM)[:, None]
    o_c = tl.arange(0, BK)[None, :]
    o_source = (o_r - o_c) & (BK - 1)
    b_f = tl.gather(b_f, o_source, 1)
    turn = (o_r - o_source - o_c) // BK + 1
    place = i_m * RATIO - i_k + RATIO - 1
    for at in tl.static_range(RATIO + 1):
        p = diagonal_ptr + (((i_h * num_m + i_band) * (RATIO + 1) + at) * num_k + place) * BK + tl.arange(0, BK)
        tl.store(p, tl.sum(tl.where(turn == at, b_f, 0.0), 0))


@triton.jit
def _write_scores(b_a0, b_l0, total, square, gain, B, p_scalar, stride):
    """Write a tile's sums of squared deviations from the mean and of A log2(A / mean); return the mean [BM, BK]."""
    count = tl.cast(B, tl.float32)
    b_shift = total / count
    b_mean = b_a0 + b_shift
    # log(mean / A_0), exactly zero if nothing deviates. Only where A_0 vanishes does it take the logarithms separately.
    b_ratio = tl.where(
        b_a0 > TINY, tl.log2(1 + b_shift / tl.maximum(b_a0, TINY)), tl.log2(tl.maximum(b_mean, TINY)) - b_l0
    )
    b_ratio = tl.where(total == 0, 0.0, b_ratio)
    # With d_n = A_n - A_0: sum (A_n - mean)^2 = sum d_n^2 - (sum d_n)^2 / N, and in the same way
    # sum A_n log(A_n / mean) = sum A_n log(A_n / A_0) - N mean log(mean / A_0). Equal A_n give exactly zero.
    deviation = square - tl.sum(total * b_shift, 1)
    divergence = gain - tl.sum(count * b_mean * b_ratio, 1)
    tl.store(p_scalar, tl.sum(deviation))
    tl.store(p_scalar + stride, tl.sum(divergence))
    return b_mean


@triton.jit(do_not_specialize=UNSPECIALIZED)
def tile_kernel(
    q_ptr, k_ptr, kv_ptr, lse_ptr, scalar_ptr, row_ptr, column_ptr, diagonal_ptr,
    B, floor, first, num_m, num_k, offset, num_tiles, H, T, scale,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_t,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    DIAGONAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum one tile of one head over all sequences; deviations are from the first one's pattern A_0, in registers.

    The tiles are those of the band of `num_m` row blocks from `first` on, with the `num_k` key blocks up to its end.
    Writes sums over the tile: of squared deviations from the mean and of A log(A / mean), `scalar [2, H, tiles]`;
    of rows F and F log F of the floored mean, `row [2, H, key blocks, rows]`; of its columns,
    `column [H, row blocks, T]`; and of its diagonals likewise, `diagonal [H, row blocks, RATIO + 1, key blocks, BK]`.
    """
    RATIO: tl.constexpr = BM // BK
    t = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    i_m, i_k = _blocks_of_tile(t, first, DIAGONAL, RATIO)
    m0 = i_m * BM
    k0 = i_k * BK
    o_m = m0 + tl.arange(0, BM)
    o_k = k0 + tl.arange(0, BK)
    q_ptr += i_h * q_stride_h
    k_ptr += tl.load(kv_ptr + i_h).to(tl.int64) * k_stride_h
    p_lse = lse_ptr + i_h * T + o_m
    lse_stride = tl.cast(H, tl.int64) * T
    causal = o_m[:, None] >= o_k[None, :]

    b_lse = tl.load(p_lse, mask=o_m < T, other=FAR)
    b_s = _products(q_ptr, k_ptr, m0, k0, T, q_stride_t, k_stride_t, D, D0, D1, BM, BK,
                    EVEN, EVEN or not DIAGONAL, PRECISION)  # fmt: skip
    b_l0 = b_s * scale - b_lse[:, None]  # log2 of the first sequence's pattern, A_0
    if DIAGONAL:
        b_l0 = tl.where(causal, b_l0, -FAR)
    b_a0 = tl.exp2(b_l0)
    # Where A_0 is zero, its logarithm cancels between `gain` and log(mean / A_0), so any value will do; a large one
    # would cost digits. Not tl.maximum, which would turn NaN into a number.
    b_l0 = tl.where(b_l0 < LOG_TINY, LOG_TINY, b_l0)
    total = tl.zeros((BM, BK), dtype=tl.float32)  # sum of A - A_0
    square = tl.zeros((BM,), dtype=tl.float32)  # sum of its square
    gain = tl.zeros((BM,), dtype=tl.float32)  # sum of A log2(A / A_0)
    for b in tl.range(1, B, num_stages=STAGES):
        i_b = tl.cast(b, tl.int64)
        b_lse = tl.load(p_lse + i_b * lse_stride, mask=o_m < T, other=FAR)
        b_s = _products(
            q_ptr + i_b * q_stride_b, k_ptr + i_b * k_stride_b, m0, k0, T, q_stride_t, k_stride_t,
            D, D0, D1, BM, BK, EVEN, EVEN or not DIAGONAL, PRECISION,
        )  # fmt: skip
        b_l = b_s * scale - b_lse[:, None]
        if DIAGONAL:
            b_l = tl.where(causal, b_l, -FAR)
        b_a = tl.exp2(b_l)
        b_d = b_a - b_a0
        total += b_d
        square += tl.sum(b_d * b_d, 1)
        gain += tl.sum(b_a * (b_l - b_l0), 1)

    p_scalar = scalar_ptr + i_h * num_tiles + offset + t
    b_mean = _write_scores(b_a0, b_l0, total, square, gain, B, p_scalar, tl.cast(H, tl.int64) * num_tiles)
    _write_marginals(
        b_mean, causal & (o_m < T)[:, None], row_ptr, column_ptr, diagonal_ptr, H, T, floor, first, num_m, num_k,
        i_h, i_m, i_k, o_m, o_k, BM, BK,
    )  # fmt: skip
