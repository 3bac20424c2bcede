"""The tables that execute a compact pattern: exp(rho), exp(alpha) and 1/Z in a gauge that a dtype can hold.

First the convolution and correlation of sequences by which normalisers and gradients are computed without ever forming
a T x T array, then the gauge, then the tables, then exp(rho) as the tiles that kernels read.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from saf.ops.operator import has_triton
from saf.patterns import CompactPattern

BLOCK = 128
GPU_BLOCK = 512
"""Positions a block on a CPU, and on a GPU, which wants large products even when a layer has few frozen heads.

A CPU's tile of 128 x 128 float64 numbers, 128 KiB, stays in a core's cache. The GPU's size is chosen, not measured
against others.
"""
# Elements of tiles held at once, 16 MiB in float32; block offsets beyond that wait their turn.
_HELD_ELEMENTS = 1 << 22


def causal_convolution(left: Tensor, right: Tensor) -> Tensor:
    """Return `sum_{j<=k} left_j right_{k-j}` for every k; inputs `[F, T]` of one dtype, any signs, and result.

    One product makes the tiles of many block offsets meet all blocks of `left`; what lies on one anti-diagonal of
    (offset, block) belongs to one block of the result. Offsets are taken in groups of tiles of at most 2**22 elements.
    On CUDA it is one launch of a Triton kernel: the host takes longer over the products than the device.
    """
    if left.is_cuda and has_triton():
        from saf.ops.toeplitz.kernels import convolve

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
    """Return the positions a block: the power of two that holds the sequence, from 16 to `largest`."""
    return min(largest, max(16, 1 << (length - 1).bit_length()))


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Of values that patterns can be held for."""
REACH = {torch.float64: 600.0, torch.float32: 64.0, torch.bfloat16: 64.0}
"""Nats by which factors and normalisers may differ from 1; the rest of the range is left to values and gradients.

That is 87 nats on either side of 1 in float32 and bfloat16, 708 in float64.
"""
LARGEST = {torch.float64: 690.0, torch.float32: 80.0, torch.bfloat16: 80.0}
"""Logarithm of the largest sum over rows, before it is multiplied with a key's factor, which may be 0.

Numbers end at 88.7 in float32 and bfloat16 and at 709.8 in float64; what is left is for the size of values.
"""
NEGLIGIBLE = {torch.float64: -56.0, torch.float32: -28.0, torch.bfloat16: -28.0}
"""Logarithm of all the weight of a key, or of a distance, below which its factor may be 0.

exp(-28) is 7e-13, where float32 rounds weights by 6e-8; exp(-56) is 5e-25, where float64 rounds by 1e-16.
"""
TILTS, STRETCHES = 65, 256
"""How many tilts are tried where the balanced gauge does not do, and on how many stretches of positions.

So many that neighbouring tilts differ by an eighth of the reach needed; both chosen, not measured against others.
"""


def table_gauge(alpha: Tensor, rho: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return alpha and rho `[F, T]` float64 in the gauge (S.6) for tables of `dtype`, and whether they hold each head.

    It is the balanced one while every factor that matters and every row's Z are at least exp(-REACH). Otherwise the
    tilt is the one that needs least reach, and a maximum is above 0. A head is held if all of them lie within `REACH`.
    Whatever gauge the logits come in, the result is the same up to rounding. For float16, with too little range for any
    choice, the gauge is balanced and the caller the judge.
    """
    logits, weights = _balanced(alpha.double(), rho.double())
    reach = REACH.get(dtype, torch.inf)
    # Every row matters.
    matters = pad(weights >= NEGLIGIBLE.get(dtype, -torch.inf), (0, 0, 0, 0, 0, 1), value=True)
    logits = logits + _tilt(logits, matters, reach) * _positions(logits)
    low, high = _ends(logits, matters)
    held = _needed(low, high) <= reach
    # Maxima of 0 where minima allow it; what rows then lack goes to the keys as far as they reach.
    by = torch.maximum(-high[:2], -reach - low[:2])
    lacking = (-reach - low[2] - by.sum(0)).clamp(min=0)
    to_key = torch.minimum(lacking, reach - high[0] - by[0])
    alpha, rho = logits[:2] + (by + torch.stack([to_key, lacking - to_key]))[..., None]
    held = held & ((weights[0] - alpha).amax(1) <= LARGEST.get(dtype, torch.inf))
    return alpha.clamp(max=reach), rho.clamp(max=reach), held


def _balanced(alpha: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """Return alpha, rho and log Z `[3, F, T]` with no slope in log Z, and P's sums over columns and over diagonals.

    The sums are logarithms, `[2, F, T]`; no gauge changes them. All are NaN where float64 cannot hold a row's Z.
    """
    position = _positions(alpha)
    # Z is at least its terms of the first key and of distance 0; without their slope the others are within range.
    logits = torch.stack([alpha, rho])
    logits = logits - _slope(torch.maximum(alpha + rho[:, :1], rho + alpha[:, :1])) * position
    logits = logits - logits.amax(-1, keepdim=True)
    keys, lags = logits.exp()
    log_z = causal_convolution(keys, lags).log()
    inverse = (-log_z).exp().flip(1)
    sums = causal_convolution(torch.cat([inverse, keys]), torch.cat([lags, inverse])).flip(1).log()
    weights = logits + sums.unflatten(0, (2, -1))
    return torch.cat([logits, log_z[None]]) - _slope(log_z) * position, weights


def _tilt(logits: Tensor, matters: Tensor, reach: float) -> Tensor:
    """Return the slope `[F, 1]` to add to alpha, rho and log Z, `logits [3, F, T]`, so that they need least reach."""
    length = logits.shape[-1]
    stretch = -(-length // STRETCHES)
    fill = (0, -length % stretch)
    low, high = _ends(*(pad(x, fill).unflatten(-1, (-1, stretch)) for x in (logits, matters)))
    needed = _needed(low.amin(-1), high.amax(-1))[:, None]
    # With a slope of more than four times that over all positions, rows alone need more.
    slopes = needed * torch.linspace(-4, 4, TILTS, dtype=logits.dtype, device=logits.device) / length
    added = slopes[..., None] * stretch * _positions(low)
    best = _needed((low[:, :, None] + added).amin(-1), (high[:, :, None] + added).amax(-1)).argmin(1, keepdim=True)
    return torch.where(needed <= reach, 0, slopes.gather(1, best))


def _needed(low: Tensor, high: Tensor) -> Tensor:
    """Return the least R such that shifts a and b exist with alpha + a, rho + b and log Z + a + b in [-R, R].

    `low` and `high` `[3, ...]` are the ends of the three. A shift each has its own interval, their sum a third one.
    """
    sums = torch.maximum(high[2] - low[0] - low[1], high[0] + high[1] - low[2])
    return torch.maximum((high - low).amax(0) / 2, sums / 3)


def _ends(logits: Tensor, matters: Tensor) -> tuple[Tensor, Tensor]:
    """Return minima and maxima over the last dimension of what matters."""
    return torch.where(matters, logits, torch.inf).amin(-1), torch.where(matters, logits, -torch.inf).amax(-1)


def _positions(x: Tensor) -> Tensor:
    """Return 0, 1, ... for the last dimension of `x`."""
    return torch.arange(x.shape[-1], dtype=x.dtype, device=x.device)


def _slope(x: Tensor) -> Tensor:
    """Return the least-squares slope of `x [F, T]` over positions, `[F, 1]`; 0 for a single position."""
    length = x.shape[1]
    position = _positions(x) - (length - 1) / 2
    return (x * position).sum(1, keepdim=True) / max(0.5, length * (length * length - 1) / 12)


ROW_SUM_TOLERANCE = 0.02
"""How far a row's executed weights may miss a sum of one: five times the most that rounding both factors to bfloat16,
2**-9 each, makes of a row, so that only lost weight exceeds it. Chosen, not measured."""
SMALL_VALUE = 2.0**-8
"""A value beside those of size one that a pattern must still mix: scaled by a small exp(alpha) it is the first to fall
below the dtype's range. As much smaller as bfloat16 resolves beside one; chosen, not measured."""


def compact_tables(alpha: Tensor, rho: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return `exp(rho)` in `dtype`, `exp(alpha)` and `1/Z`, each `[F, T]`, from logits in the gauge of `table_gauge`.

    Z is summed in float64 from the rounded tables that are executed; the scalings are float32, float64 for float64.
    `1/Z` is NaN for a head that tables of `dtype` cannot hold.
    """
    alpha, rho, held = table_gauge(alpha, rho, dtype)
    scale_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    distance, key_scale = rho.exp().to(dtype), alpha.exp().to(scale_dtype)
    total = causal_convolution(key_scale.double(), distance.double())
    return distance, key_scale, (1 / total).where(held[:, None], torch.nan).to(scale_dtype)


def holds(pattern: CompactPattern, dtype: torch.dtype) -> Tensor:
    """Return per head of `[C, T]` whether `dtype` can hold its pattern as tables; `prepare` stores the others."""
    return convolution_tables(pattern.to(dtype=torch.float64), dtype)[1]


def convolution_tables(pattern: CompactPattern, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tables of heads `[C, T]` in their balanced gauge and, per head, whether `dtype` can hold them."""
    balanced = pattern.balanced()
    distance, key_scale, row_scale = compact_tables(balanced.alpha, balanced.rho, dtype)
    tables = {"distance": distance, "key_scale": key_scale, "row_scale": row_scale}
    return tables, tables_hold(distance, key_scale, row_scale)


def tables_hold(distance: Tensor, key_scale: Tensor, row_scale: Tensor) -> Tensor:
    """Return per head whether nothing underflows that matters.

    The row sums that scaled and rounded values would give, for values of size 1 and of size 2**-8, show it.
    """
    holds = (row_scale.isfinite() & (row_scale > 0)).all(1)
    for size in (1.0, SMALL_VALUE):
        executed = causal_convolution((key_scale * size).to(distance.dtype).double() / size, distance.double())
        holds &= ((executed * row_scale.double() - 1).abs() <= ROW_SUM_TOLERANCE).all(1)
    return holds


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
