"""Causal convolution and correlation of signed sequences by matrix products, without ever forming a T x T array."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from saf.ops.availability import has_triton

BLOCK = 128
# A GPU wants large products even when a layer has few frozen heads, a CPU tiles that stay in its cache.
GPU_BLOCK = 512
_HELD_ELEMENTS = 1 << 22


def causal_convolution(left: Tensor, right: Tensor) -> Tensor:
    """Return `sum_{j<=k} left_j right_{k-j}` for every k; inputs `[F, T]` of one dtype, any signs, and result.

    One product makes the tiles of many block offsets meet all blocks of `left`; what lies on one anti-diagonal of
    (offset, block) belongs to one block of the result. Offsets are taken in groups of tiles of at most 2**22 elements.
    On CUDA it is one launch of a Triton kernel: the host takes longer over the products than the device.
    """
    if left.is_cuda and has_triton():
        from saf.ops.triton.convolution import convolve

        return convolve(left, right)
    heads, length = left.shape
    block = _block(length, BLOCK)
    count = -(-length // block)
    fill = count * block - length
    blocks = pad(left, (0, fill)).view(heads, count, block).mT
    padded = pad(right, (block - 1, fill))
    lags = torch.arange(block, device=left.device)[:, None] - torch.arange(block, device=left.device) + block - 1
    total = left.new_zeros(heads, block, count)
    group = max(1, _HELD_ELEMENTS // (heads * block * max(block, count)))
    for first in range(0, count, group):
        offsets = torch.arange(first, min(first + group, count), device=left.device) * block
        tiles = padded[:, offsets[:, None, None] + lags]
        met = tiles.flatten(1, 2) @ blocks[:, :, : count - first]
        sums = antidiagonal_sums(met.unflatten(1, (len(offsets), block)).transpose(1, 2))
        total[:, :, first:] += sums[:, :, : count - first]
    return total.mT.flatten(1)[:, :length]


def cross_correlation(left: Tensor, right: Tensor) -> Tensor:
    """Return `sum_i <left_i, right_{i-lag}>` for every lag from 0: `[F, T, ...]` twice to `[F, T]`, at least float32.

    Pairs of blocks at the same offset are summed inside one matrix product, so the work is that of one causal
    convolution of as many columns; groups of at most 2**22 elements of their `C x C` tiles are held beside the inputs.
    """
    heads, length = left.shape[:2]
    block = _block(length, GPU_BLOCK if left.is_cuda else BLOCK)
    count = -(-length // block)
    queries, keys = _rows(left, count, block), _rows(right, count, block).flip(1)
    width = queries.shape[2] // count
    group = max(1, _HELD_ELEMENTS // (heads * block * block))
    sums = []
    for first in range(0, count, group):
        tiles = [
            _product(queries[:, :, offset * width :], keys[:, :, : (count - offset) * width].mT)
            for offset in range(first, min(first + group, count))
        ]
        sums.append(antidiagonal_sums(torch.stack(tiles, 1)))
    # Of the 2C - 1 lags of a tile the first C - 1 lie in the block of lags before.
    lags = torch.cat(sums, 1)
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


def _rows(x: Tensor, count: int, block: int) -> Tensor:
    """Return `x [F, T, ...]` as `[F, C, blocks * ...]`: a row holds one place of every block, zeros beyond T."""
    if missing := count * block - x.shape[1]:
        x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], 1)
    return x.unflatten(1, (count, block)).transpose(1, 2).reshape(x.shape[0], block, -1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right` of 16-bit inputs in float32, of others in their own dtype."""
    if left.dtype in (torch.float32, torch.float64):
        return torch.bmm(left, right)
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


def _block(length: int, largest: int) -> int:
    return min(largest, max(16, 1 << (length - 1).bit_length()))
