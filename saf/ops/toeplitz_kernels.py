"""The Toeplitz product of frozen heads in Triton: how it is cut into programs, its kernels, and their launches.

`toeplitz_matmul` multiplies values `[B, F, T, D]` by every head's Toeplitz matrix between two scalings: one kernel
scales the input, another multiplies, reading through addresses or Hopper's bulk copy engine ("descriptors").
`convolve` convolves sequences of one channel, as normalisers need it. Times are of an H200 (docs/log.md).
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from saf.ops.launch import add_product, cdiv, launch, product_precision, shared_memory, strides
from saf.ops.tensors import heads_like

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# The device language's constants and ranges are not what their annotations say.

# Most bytes of input that programs running together share: half of a data-centre GPU's second-level cache.
CACHED = 32 << 20
# Positions beyond which blocks are 256 columns wide: there they gained 4% with four heads and lost with fewer.
WIDE_FROM = 4096


class ToeplitzConfig(NamedTuple):
    """How the product is cut into programs."""

    block_m: int = 128  # output positions of a program, at most those of a tile
    block_n: int = 128  # columns of a program, of B x D
    block_k: int = 64  # positions summed over in a step, at most those of a tile
    num_warps: int = 4
    num_stages: int = 3  # depth of the software pipeline
    # Whether operands are read through the bulk copy engine: Hopper and later, 16 bits, B x D a multiple of 8.
    descriptors: bool = False
    # Column blocks of a head that are computed before the next ones begin, so that the input they share stays in the
    # second-level cache; 0 for all at once. With 64 sequences that saves 10 to 25% of the product.
    slabs: int = 0


@cache
def choose_config(
    *, length: int, columns: int, heads: int, dtype: torch.dtype, hopper: bool = False, shared: int = 227 << 10
) -> ToeplitzConfig:
    """Choose blocks for `heads` frozen heads of `length` positions and `columns` = B x D.

    `hopper` says whether the device has the bulk copy engine, `shared` how many bytes of shared memory a program may
    take: the pipeline gets as many stages as fit.
    """
    # Written rules, not tuning at run time: every candidate timed on 15 shapes gained 2% at best, which is noise, but
    # for four stages at 16K, which the rule has since.
    if dtype == torch.float32:  # without matrix units
        return ToeplitzConfig(block_m=64, block_n=64, block_k=32, num_stages=2)
    config = _by_shape(length, columns, heads)
    stage_bytes = (config.block_m + config.block_n) * config.block_k * dtype.itemsize
    all_slabs = cdiv(columns, config.block_n) * heads
    # With 64 sequences the input exceeds the cache: 6 heads at 8K take 3,532 us at once, 2,634 slab by slab.
    cached_slabs = max(1, CACHED // (max(1, length) * config.block_n * dtype.itemsize))
    return config._replace(
        descriptors=hopper and columns % config.block_n == 0,
        num_stages=min(config.num_stages, max(2, shared // stage_bytes)),
        slabs=cached_slabs if cached_slabs < all_slabs else 0,
    )


def _by_shape(length: int, columns: int, heads: int) -> ToeplitzConfig:
    """Return blocks and the depth of the pipeline for 16-bit operands: 128 x 128, wider or narrower.

    Each limit lies somewhere between a measured shape for which one choice was faster and one for which the other was.
    """
    rows = cdiv(length, 128)
    programs = rows * cdiv(columns, 128) * heads
    # Blocks of 64 columns: there are no more, or wider ones would not occupy 132 multiprocessors.
    if (columns <= 64 and length > 2048 and rows * heads > 96) or (columns > 128 and length <= 2048 and programs < 132):
        return ToeplitzConfig(block_n=64, num_stages=5)
    if columns <= 64 or (columns <= 128 and length <= 4096):
        return ToeplitzConfig(block_m=64, block_n=64, block_k=128)  # 128 x 128 would leave multiprocessors without work
    if columns > 128 and length > WIDE_FROM and rows * cdiv(columns, 256) * heads >= 256:
        return ToeplitzConfig(block_n=256, num_warps=8)
    # Four stages leave room for one program a multiprocessor, three for two. Few programs take four; long sums of a
    # single column block, too: 6 heads of 16,384 positions and 128 columns took 324 us with four, 354 with three.
    return ToeplitzConfig(num_stages=4 if programs < 400 or (columns <= 128 and length >= 16384) else 3)


def toeplitz_matmul(
    x: Tensor, tiles: Tensor, before: Tensor, after: Tensor, *, transpose: bool, out: Tensor | None = None,
    config: ToeplitzConfig | None = None,
) -> Tensor:  # fmt: skip
    """Do `toeplitz_product`, whose arguments these are, head by head; deterministic.

    `x` has unit stride in D and any others, `tiles` are from `make_tiles`, `before` and `after` are float32. `out` may
    be memory of x's dtype or float32 to write into; by default it is new, stored as `[B, T, F, D]`. `config` is
    `choose_config`'s by default. Memory and scalings beyond the T positions of x are not used.
    """
    assert (x.stride(3), tiles.dtype) == (1, x.dtype)
    batch, heads, length, dim = x.shape
    columns = batch * dim
    if out is None:
        out = heads_like(x, heads)
    if not out.numel():
        return out
    if config is None:
        hopper = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
        config = choose_config(
            length=length, columns=columns, heads=heads, dtype=x.dtype, hopper=hopper, shared=shared_memory(x.device)
        )
    # A pass by itself: with it 3 heads at 4K take 99 us, scaled within the product 128; below 2K the pass loses 4 us.
    scaled = x.new_empty(heads, length, columns)
    launch(
        prescale_kernel, (cdiv(length, 32), cdiv(columns, 128), heads), x, before, scaled, length, columns,
        *strides(x), before.stride(0), D=dim, BT=32, BN=128, num_warps=4, device=x.device,
    )  # fmt: skip
    operands, size = (scaled, tiles), tiles.shape[-1]
    if config.descriptors:  # all tiles stacked as [-, TILE]
        # Built on the host: device code would need scratch memory for them, which a CUDA graph would have to keep.
        tile = [config.block_k, config.block_m] if transpose else [config.block_m, config.block_k]
        operands = (
            TensorDescriptor.from_tensor(scaled, [1, config.block_k, config.block_n]),
            TensorDescriptor.from_tensor(tiles.view(-1, size), tile),
        )
    num_m, num_n = cdiv(length, config.block_m), cdiv(columns, config.block_n)
    launch(
        toeplitz_kernel, (num_m * num_n * heads,), *operands, after, out, length, columns, *strides(out),
        after.stride(0), num_m, num_n, heads, min(config.slabs or num_n * heads, num_n * heads), tiles.shape[1],
        D=dim, BM=config.block_m, BN=config.block_n, BK=config.block_k, TRANSPOSE=transpose, TILE=size,
        EVEN_T=length % max(config.block_m, config.block_k) == 0, EVEN_N=columns % config.block_n == 0,
        DESCRIPTORS=config.descriptors, PRECISION=product_precision(x.dtype), STAGES=config.num_stages,
        num_warps=config.num_warps, num_stages=config.num_stages, device=x.device,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["T"])
def prescale_kernel(
    x_ptr, before_ptr, out_ptr, T, N, x_stride_b, x_stride_h, x_stride_t, before_stride_h,
    D: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write x * before, rounded to x's dtype, as contiguous [F, T, N]."""
    i_h = tl.program_id(2).to(tl.int64)
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (o_t < T)[:, None] & (o_n < N)[None, :]
    p_out = out_ptr + (i_h * T + o_t.to(tl.int64)[:, None]) * N + o_n[None, :]
    row = o_t.to(tl.int64)
    column = (o_n // D).to(tl.int64) * x_stride_b + o_n % D
    b_x = tl.load(x_ptr + i_h * x_stride_h + row[:, None] * x_stride_t + column[None, :], mask=mask, other=0.0)
    b_before = tl.load(before_ptr + i_h * before_stride_h + o_t, mask=o_t < T, other=0.0)[:, None]
    tl.store(p_out, (b_x.to(tl.float32) * b_before).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "num_m", "num_n", "num_h", "slabs", "tiles_per_head"])
def toeplitz_kernel(
    x, tiles, after_ptr, out_ptr, T, N, out_stride_b, out_stride_h, out_stride_t, after_stride_h,
    num_m, num_n, num_h, slabs, tiles_per_head,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TRANSPOSE: tl.constexpr, TILE: tl.constexpr,
    EVEN_T: tl.constexpr, EVEN_N: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute one [BM, BN] block of one head's output from the scaled input [F, T, N] and tiles [F, -, TILE, TILE].

    Both are read through addresses, or as DESCRIPTORS, the tiles then stacked as [-, TILE].
    """
    i_m, i_h, i_n = block_of(tl.program_id(0), num_m, num_n, num_h, slabs)
    # Forward the last rows sum over most keys, transposed the first ones do.
    if not TRANSPOSE:
        i_m = num_m - 1 - i_m
    m0 = i_m * BM
    o_n = i_n * BN + tl.arange(0, BN)
    # Only blocks that reach the diagonal or lie beyond it; within a tile on the diagonal the table itself holds zeros.
    if TRANSPOSE:
        lo = (m0 // BK) * BK
        hi = T
    else:
        lo = m0 * 0  # a tensor, for `.to` below; Triton 3.7 makes one of a plain 0 too
        hi = tl.minimum(m0 + BM, T)

    if DESCRIPTORS:
        first = i_h * tiles_per_head * TILE
    else:
        p_tiles = tiles + i_h.to(tl.int64) * tiles_per_head * (TILE * TILE)
        o_k = tl.arange(0, BK)
        p_x = x + (i_h.to(tl.int64) * T + lo.to(tl.int64)) * N
        o_x = o_k[:, None] * N + o_n[None, :]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k0 in tl.range(lo, hi, BK, num_stages=STAGES):
        if DESCRIPTORS:
            if TRANSPOSE:
                # The tile is read as it lies and turned here: both directions share one table.
                b_g = tl.trans(tiles.load([first + (k0 // TILE - m0 // TILE) * TILE + k0 % TILE, m0 % TILE]))
            else:
                b_g = tiles.load([first + (m0 // TILE - k0 // TILE) * TILE + m0 % TILE, k0 % TILE])
            b_x = x.load([i_h, k0, i_n * BN]).reshape(BK, BN)
        else:
            b_g = _load_tile(p_tiles, m0, k0, TRANSPOSE, TILE, BM, BK)
            b_x = _load_input(p_x + o_x, k0 + o_k < T, o_n < N, EVEN_T, EVEN_N)
            p_x += BK * N
        acc = add_product(acc, b_g, b_x, PRECISION)  # sum_j g(i - j) u[j] (S.13); transposed g(j - i) (S.15)

    o_m = m0 + tl.arange(0, BM)
    i_h = i_h.to(tl.int64)
    b_after = tl.load(after_ptr + i_h * after_stride_h + o_m, mask=o_m < T, other=0.0)
    column = (o_n // D).to(tl.int64) * out_stride_b + o_n % D
    p_out = out_ptr + i_h * out_stride_h + o_m.to(tl.int64)[:, None] * out_stride_t + column[None, :]
    b_out = (acc * b_after[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(p_out, b_out, mask=(o_m < T)[:, None] & (o_n < N)[None, :])


@triton.jit
def block_of(program, num_m, num_n, num_h, slabs):
    """Return the row block, counted from the longest sum, the head and the column block that a program computes.

    A slab is a column block of one head: all its row blocks read the same input. `slabs` of them are computed before
    the next ones begin, so that their input stays in the second-level cache. Among these, row blocks with the longest
    sum come first, so that the last wave has short ones.
    """
    # The last group may have fewer slabs than the others.
    first = program // (num_m * slabs) * slabs
    together = tl.minimum(num_n * num_h - first, slabs)
    inside = program - first * num_m
    slab = first + inside % together
    return inside // together, slab // num_n, slab % num_n


@triton.jit
def _load_tile(table_ptr, m0, k0, TRANSPOSE: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """Load one [BM, BK] tile of the Toeplitz matrix (or of its transpose)."""
    # BM and BK divide TILE, so that a block lies within one tile; `multiple_of` allows wide loads.
    o_m = tl.multiple_of(m0 % TILE, BM) + tl.arange(0, BM)
    o_k = tl.multiple_of(k0 % TILE, BK) + tl.arange(0, BK)
    if TRANSPOSE:
        index = k0 // TILE - m0 // TILE
        offset = o_k[None, :] * TILE + o_m[:, None]
    else:
        index = m0 // TILE - k0 // TILE
        offset = o_m[:, None] * TILE + o_k[None, :]
    return tl.load(table_ptr + index * (TILE * TILE) + offset)


@triton.jit
def _load_input(p_x, m_k, m_n, EVEN_T: tl.constexpr, EVEN_N: tl.constexpr):
    """Load one [BK, BN] block of the input, zero beyond T and N."""
    if EVEN_T and EVEN_N:
        return tl.load(p_x)
    if EVEN_N:
        return tl.load(p_x, mask=m_k[:, None], other=0.0)
    return tl.load(p_x, mask=m_k[:, None] & m_n[None, :], other=0.0)


# --- convolutions of one channel

# Positions whose sums a program computes, positions that it reads at once, and its warps: the 32 float64 numbers of a
# thread stay in registers, and few frozen heads still give a GPU enough programs. Chosen, not measured against others.
ROWS, COLUMNS, WARPS = 32, 128, 4


def convolve(left: Tensor, right: Tensor) -> Tensor:
    """Return `sum_{j<=k} left_j right_{k-j}`, float32 or float64 `[F, T]` of one dtype, summed in that dtype."""
    left, right = left.contiguous(), right.contiguous()
    out = left.new_empty(left.shape)
    heads, length = left.shape
    launch(
        causal_convolution_kernel, (cdiv(length, ROWS), heads), left, right, out, length,
        BM=ROWS, BK=COLUMNS, num_warps=WARPS, device=left.device,
    )  # fmt: skip
    return out


@triton.jit
def causal_convolution_kernel(left_ptr, right_ptr, out_ptr, T, BM: tl.constexpr, BK: tl.constexpr):
    """Store the sums of one block of positions of one head."""
    o_h = tl.program_id(1).to(tl.int64) * T
    m0 = tl.program_id(0) * BM
    o_m = m0 + tl.arange(0, BM)
    b_sum = tl.zeros([BM], dtype=out_ptr.dtype.element_ty)
    for k0 in range(0, m0 + BM, BK):
        o_k = k0 + tl.arange(0, BK)
        b_left = tl.load(left_ptr + o_h + o_k, mask=o_k < T, other=0.0)
        lag = o_m[:, None] - o_k[None, :]
        # Blocks of sums, then their sum: a few roundings where T additions to one number would round T times.
        b_right = tl.load(right_ptr + o_h + lag, mask=(lag >= 0) & (o_m[:, None] < T), other=0.0)
        b_sum += tl.sum(b_left[None, :] * b_right, 1)
    tl.store(out_ptr + o_h + o_m, b_sum, mask=o_m < T)
