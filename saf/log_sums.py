"""Sums over a compact pattern's causal entries, in the log domain, without ever forming a T x T array.

Row, column and diagonal sums of `exp(log_row_i + alpha_j + rho_{i-j})`, where `log_row` scales the rows (-log Z makes
them the pattern's), are one operation: a causal convolution of exponentials, read in different orders. It takes
T**2 / 2 products a head, in T / C steps of blocks of C positions. Of its second operand, `right`, the tile at block
offset d serves every pair of blocks (I, I - d), so each offset is one small matrix product per head. Terms are
non-negative, so nothing cancels: with block maxima factored out, each result is accurate in itself.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

# Positions a block: a tile of 128 x 128 float64 numbers, 128 KiB, stays in a CPU core's cache.
_BLOCK = 128
# Block offsets that a GPU takes in one product: enough to fill it.
_GPU_OFFSETS = 32
# Share of a dtype's range, in nats, that a tile may span; its sums need the rest. A round number.
_SHARE_OF_RANGE = 0.95
# Tile elements held at once; further heads follow in turn.
_HELD_ELEMENTS = 1 << 27
# How `pad` fills the ends: with logarithms of zero, or with the first and last value.
_ZERO: dict[str, Any] = {"value": -math.inf}
_EDGE: dict[str, Any] = {"mode": "replicate"}


def log_row_sums(alpha: Tensor, rho: Tensor) -> Tensor:
    """Return `log Z(i) = logsumexp_{j<=i}(alpha_j + rho_{i-j})`, Eq. (3); inputs and result `[..., T]`."""
    return log_causal_convolution(alpha, rho)


def log_column_sums(log_row: Tensor, rho: Tensor) -> Tensor:
    """Return `logsumexp_{i>=j}(log_row_i + rho_{i-j})` for every key j; inputs and result `[..., T]`."""
    return log_causal_convolution(log_row.flip(-1), rho).flip(-1)


def log_diagonal_sums(log_row: Tensor, alpha: Tensor) -> Tensor:
    """Return `logsumexp_j(log_row_{j+δ} + alpha_j)` for every distance δ; inputs and result `[..., T]`."""
    return log_causal_convolution(alpha, log_row.flip(-1)).flip(-1)


def log_causal_convolution(left: Tensor, right: Tensor, *, block: int = _BLOCK) -> Tensor:
    """Return `logsumexp_{j<=k}(left_j + right_{k-j})` for every k; inputs and result `[..., T]` float64.

    Any T, any leading dimensions, any finite values: the block shrinks when the inputs vary so much inside one that a
    sum could underflow.
    """
    length = left.shape[-1]
    block = _safe_block(left, right, max(1, min(block, length)))
    # A GPU takes many offsets in one product; a CPU is fastest with one offset's tiles in cache. Neither choice
    # depends on the number of heads, so a head's result does not depend on the batch it is in.
    num_blocks = -(-length // block)
    group = 1 if left.device.type == "cpu" else min(num_blocks, _GPU_OFFSETS)
    chunk = max(1, _HELD_ELEMENTS // (group * block * max(block, num_blocks)))
    pairs = zip(left.reshape(-1, length).split(chunk), right.reshape(-1, length).split(chunk), strict=True)
    return torch.cat([_convolve(*pair, block, group) for pair in pairs]).reshape(left.shape)


def _safe_block(left: Tensor, right: Tensor, block: int) -> int:
    """Halve the block until no row of a tile lies so far below the tile's maximum that it underflows."""
    limit = -_SHARE_OF_RANGE * math.log(torch.finfo(left.dtype).tiny)
    left, right = (values.reshape(-1, values.shape[-1]) for values in (left, right))
    while block > 1 and len(left):
        # Filled with the last value, the ends do not widen a range.
        blocks, windows = _blocks(left, block, **_EDGE), _windows(right, block, **_EDGE)
        spread = (blocks.amax(-1) - blocks.amin(-1)).amax(-1) + (windows.amax(-1) - windows.amin(-1)).amax(-1)
        if spread.max().item() <= limit:
            break
        block //= 2
    return block


def _blocks(values: Tensor, block: int, **filling: Any) -> Tensor:
    """Cut `[heads, T]` into `[heads, n, C]`, with a filled end."""
    return pad(values, (0, -values.shape[-1] % block), **filling).unflatten(-1, (-1, block))


def _windows(values: Tensor, block: int, **filling: Any) -> Tensor:
    """Return for each block offset d the values at distances `dC-C+1 .. dC+C-1`: `[heads, n, 2C-1]`."""
    return pad(values, (block - 1, -values.shape[-1] % block), **filling).unfold(-1, 2 * block - 1, block)


def _convolve(left: Tensor, right: Tensor, block: int, group: int) -> Tensor:
    """Convolve `[heads, T]`, `group` block offsets at once.

    A distance below 0 or above T-1 has weight exp(-inf) = 0, which also makes the diagonal tiles causal.
    """
    heads, length = left.shape
    keys = _blocks(left, block, **_ZERO)
    windows = _windows(right, block, **_ZERO)
    num_blocks = keys.shape[1]
    key_max, window_max = keys.amax(-1), windows.amax(-1)
    # Flipped: the distance from key C - 1 - m of a block to query q is at place m + q of its window, so that row m of a
    # tile is the window from m on, as `unfold` cuts it.
    keys = (keys - key_max[..., None]).exp().flip(-1)
    windows = (windows - window_max[..., None]).exp()

    # offsets[d, I]: the key block I - d of query block I at offset d; scale[h, d, I]: the largest term of this pair of
    # blocks, relative to the largest of all pairs of I.
    index = torch.arange(num_blocks, device=left.device)
    offsets = index[None, :] - index[:, None]
    scale = (window_max[:, :, None] + key_max[:, offsets.clamp(min=0)]).masked_fill(offsets < 0, -torch.inf)
    largest = scale.amax(1)
    scale = (scale - largest[:, None]).exp()

    sums = left.new_zeros(heads, num_blocks, block)
    for start in range(0, num_blocks, group):
        stop = min(start + group, num_blocks)
        # [heads, queries, offsets, C]: the scaled keys of each query block at these offsets.
        scaled = keys[:, offsets[start:stop, start:].clamp(min=0).T] * scale[:, start:stop, start:].mT[..., None]
        tiles = windows[:, start:stop].unfold(-1, block, 1).reshape(heads, (stop - start) * block, block)
        sums[:, start:] += scaled.flatten(2) @ tiles
    return (sums.log_() + largest[..., None]).flatten(1)[:, :length]
