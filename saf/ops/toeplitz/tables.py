"""The tables that execute a compact pattern, exp(rho), exp(alpha) and 1/Z, and the product that reads them in PyTorch.

`blocked_product` is (S.14), a matrix product a block diagonal; with one column it is a convolution of sequences, by
which normalisers and gradients are computed without ever forming a T x T array.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from saf.ops.heads import heads_like
from saf.ops.operator import has_triton, uses_triton

BLOCK = 128
GPU_BLOCK = 512
"""Positions a block on a CPU, and on a GPU, which wants large products even when a layer has few frozen heads.

A CPU's tile of 128 x 128 float64 numbers, 128 KiB, stays in a core's cache. The GPU's size is chosen, not measured
against others.
"""


def blocked_product(x: Tensor, distance: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return `y[b,f,i] = after[f,i] * sum_{j<=i} distance[f,i-j] * before[f,j] * x[b,f,j]`, a block diagonal at a time.

    `x [B, F, T, D]`; `distance`, `before`, `after` `[F, >=T]`. Block diagonal `d` of the Toeplitz matrix is one
    `C x C` tile for the whole batch: a product of `[C, C]` with `[C, (T/C - d) * B * D]` (S.14). 16-bit inputs are
    scaled in their own dtype and accumulated in float32. Memory order of the result is `[B, T, F, D]`.
    """
    batch, heads, length, dim = x.shape
    block = _block(length, BLOCK)
    count = -(-length // block)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    scaled = (x.to(compute) * before[:, :length, None].to(compute)).to(x.dtype).to(compute)
    scaled = pad(scaled, (0, 0, 0, count * block - length))
    columns = scaled.view(batch, heads, count, block, dim).permute(1, 3, 2, 0, 4).reshape(heads, block, -1)
    width = batch * dim
    padded = pad(distance[:, :length].to(compute), (block - 1, count * block - length))
    lags = torch.arange(block, device=x.device)[:, None] - torch.arange(block, device=x.device) + block - 1
    total = torch.zeros_like(columns)
    for offset in range(count):
        tile = padded[:, lags + offset * block]
        total[:, :, offset * width :].baddbmm_(tile, columns[:, :, : (count - offset) * width])
    total = total.view(heads, block, count, batch, dim).permute(3, 2, 1, 0, 4)
    total = total.reshape(batch, count * block, heads, dim)[:, :length]
    output = heads_like(x, heads).transpose(1, 2)
    output.copy_(total * after[:, :length].t()[:, :, None].to(compute))
    return output.transpose(1, 2)


def reversed_product(x: Tensor, distance: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return the adjoint's product (S.15): `y[j] = after[j] * sum_{i>=j} distance[i-j] * before[i] * x[i]`."""
    length = x.shape[-2]
    flipped = blocked_product(x.flip(2), distance, before[:, :length].flip(1), after[:, :length].flip(1))
    return flipped.transpose(1, 2).flip(1).contiguous().transpose(1, 2)


def causal_convolution(left: Tensor, right: Tensor) -> Tensor:
    """Return `sum_{j<=k} left_j right_{k-j}` for every k: `left [F, T]` or `[N, F, T]`, `right [F, T]`, any signs.

    On CUDA it is one launch of a Triton kernel: the host takes longer over the products than the device.
    """
    if left.is_cuda and has_triton():
        from saf.ops.toeplitz.kernels import convolve

        return convolve(left.flatten(0, -2), right.expand_as(left).flatten(0, -2)).view_as(left)
    one = torch.ones_like(right)
    sums = blocked_product(left.reshape(-1, *right.shape, 1), right, one, one)
    return sums.squeeze(3).contiguous().view_as(left)


def cross_correlation(left: Tensor, right: Tensor) -> Tensor:
    """Return `sum_i <left_i, right_{i-lag}>` for every lag from 0: `[F, T, ...]` twice to `[F, T]`, at least float32.

    Pairs of blocks at the same offset are summed inside one matrix product, so the work is that of one causal
    convolution of as many columns.
    """
    length = left.shape[1]
    block = _block(length, GPU_BLOCK if left.is_cuda else BLOCK)
    count = -(-length // block)
    queries, keys = _by_place(left, count, block), _by_place(right, count, block).flip(1)
    width = queries.shape[2] // count
    # Of the 2C - 1 lags of the pairs at one offset the first C - 1 lie in the block of lags before.
    pairs = (_product(queries[:, :, n * width :], keys[:, :, : (count - n) * width].mT) for n in range(count))
    lags = torch.stack([antidiagonal_sums(each) for each in pairs], 1)
    result = lags[:, :, block - 1 :].clone()
    result[:, :-1, 1:] += lags[:, 1:, : block - 1]
    return result.flatten(1)[:, :length]


def antidiagonal_sums(x: Tensor) -> Tensor:
    """Return the sums of `x [..., R, M]` over equal row + column index, `[..., R + M - 1]`.

    >>> antidiagonal_sums(torch.tensor([[1, 2, 3], [10, 20, 30]]))
    tensor([ 1, 12, 23, 30])
    """
    rows, columns = x.shape[-2:]
    width = rows + columns - 1
    # Read with rows one shorter than they are stored, each row moves one to the right of that above.
    return pad(x, (0, rows)).flatten(-2)[..., : rows * width].unflatten(-1, (rows, width)).sum(-2)


def _by_place(x: Tensor, count: int, block: int) -> Tensor:
    """Return `x [F, T, ...]` as `[F, C, blocks * ...]`: a row holds one place of every block, zeros beyond T."""
    if missing := count * block - x.shape[1]:
        x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], 1)
    return x.unflatten(1, (count, block)).transpose(1, 2).reshape(x.shape[0], block, -1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right` of 16-bit inputs in float32, of others in their own dtype."""
    if left.dtype in (torch.float32, torch.float64):
        return torch.bmm(left, right)
    return torch.bmm(left, right, out_dtype=torch.float32) if left.is_cuda else torch.bmm(left.float(), right.float())


def _block(length: int, largest: int) -> int:
    """Return the positions a block: the power of two that holds the sequence, from 16 to `largest`."""
    return min(largest, max(16, 1 << (length - 1).bit_length()))


SMALL_VALUE = 2.0**-8
"""A value beside those of size one that a pattern must still mix: scaled by a small exp(alpha) it is the first to fall
below the dtype's range. As much smaller as bfloat16 resolves beside one; chosen, not measured."""
ROW_SUM_TOLERANCE = 0.02
"""How far a row's executed weights may miss a sum of one: five times the most that rounding both factors to bfloat16,
2**-9 each, makes of a row, so that only lost weight exceeds it. Chosen, not measured."""
LARGEST = {torch.float64: 600.0, torch.float32: 64.0}
"""Largest logarithm of 1/Z. Numbers end at 88.7 in float32 and at 709.8 in float64; gradients take the rest."""


def balance(alpha: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits `[F, T]` float64 of the same pattern in the gauge (S.6) without slope in log Z, maxima 0.

    Logits may come in any gauge. NaN where float64 cannot hold a row's Z.
    """
    position = torch.arange(alpha.shape[1], dtype=torch.float64, device=alpha.device)
    # Z is at least its terms of the first key and of distance 0; without their slope the others are within range.
    alpha, rho = alpha.double(), rho.double()
    logits = torch.stack([alpha, rho])
    logits = logits - _slope(torch.maximum(alpha + rho[:, :1], rho + alpha[:, :1])) * position
    logits = logits - logits.amax(-1, keepdim=True)
    log_z = causal_convolution(*logits.exp()).log()
    alpha, rho = logits - _slope(log_z) * position
    return alpha - alpha.amax(-1, keepdim=True), rho - rho.amax(-1, keepdim=True)


def _slope(x: Tensor) -> Tensor:
    """Return the least-squares slope of `x [F, T]` over positions, `[F, 1]`; 0 for a single position."""
    length = x.shape[1]
    position = torch.arange(length, dtype=x.dtype, device=x.device) - (length - 1) / 2
    return (x * position).sum(1, keepdim=True) / max(0.5, length * (length * length - 1) / 12)


def compact_tables(alpha: Tensor, rho: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return `exp(rho)` in `dtype`, `exp(alpha)` and `1/Z`, each `[F, T]`, from logits in the gauge of `balance`.

    Z is summed in float64 from the rounded tables that are executed; the scalings are float32, float64 for float64.
    `1/Z` is NaN for a head that tables of `dtype` cannot hold: where the row sums that scaled and rounded values of
    size 1 and of size 2**-8 would give show that something underflows that matters.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    distance, key_scale = rho.exp().to(dtype), alpha.exp().to(wide)
    scaled = [(key_scale * size).to(dtype).double() / size for size in (1.0, SMALL_VALUE)]
    total, *executed = causal_convolution(torch.stack([key_scale.double(), *scaled]), distance.double())
    row_scale = (1 / total).to(wide)
    held = (row_scale > 0) & (row_scale.double().log() <= LARGEST[wide])
    for sums in executed:
        held &= (sums * row_scale.double() - 1).abs() <= ROW_SUM_TOLERANCE
    return distance, key_scale, row_scale.where(held.all(1, keepdim=True), torch.nan)


TILE = 128
"""Rows and columns of a materialised Toeplitz tile."""
PAD = 256
"""Zeros in front of g, and the multiple its length is rounded up to: two tiles, the most that one program computes."""


def make_tiles(g: Tensor) -> Tensor:
    """Return the tiles `[F, W / TILE, TILE, TILE]` of weights by distance, `g [F, L]`; W is L rounded up to PAD.

    Tile t holds g(t TILE + row - column), 0 where that is negative.
    """
    heads, length = g.shape
    width = -(-length // PAD) * PAD
    padded = g.new_zeros(heads, PAD + width)
    padded[:, PAD : PAD + length] = g
    starts = torch.arange(width // TILE, device=g.device).view(-1, 1, 1) * TILE
    offsets = torch.arange(TILE, device=g.device)
    return padded[:, PAD + starts + offsets.view(1, -1, 1) - offsets.view(1, 1, -1)]


def distance_table(distance: Tensor) -> Tensor:
    """Return what the operator reads exp(rho) from: tiles for the kernel, `distance [F, T]` itself for PyTorch."""
    return make_tiles(distance) if uses_triton(distance.device, distance.dtype) else distance
