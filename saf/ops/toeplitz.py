"""Frozen heads as a causal convolution that the whole batch shares, `P V = diag(1/Z) G diag(exp alpha) V` (S.13).

    y[i] = after[i] sum_{j<=i} g(i - j) before[j] x[j],    g = exp(rho),  before = exp(alpha),  after = 1/Z

G(i, j) = g(i - j) is the same for every sequence and channel, so that one tile of it multiplies them all. Its transpose
gives the gradient dV = P^T dO. Here are the product in plain PyTorch, the tables, the operator and the backend, then
patterns that are trained; the product in Triton is in toeplitz_kernels.py. A pattern that the values' dtype cannot hold
in this form, or a dense one, is executed as a stored matrix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from saf.errors import UnsupportedError
from saf.ops.backend import Backend, Tables, ValueHeads, has_triton, operator, uses_triton
from saf.ops.flash_decode import decode_maps
from saf.ops.fused import few_tables
from saf.ops.tensors import dense_product, heads_like, merge_slots, take_heads, unit_stride, unpadded
from saf.patterns import CompactPattern, Pattern

# Positions of a block in PyTorch: on a CPU, whose cache holds a tile of float64; on a GPU, which needs large products
# even when a layer has few frozen heads. The GPU's size is chosen, not measured against others.
BLOCK, GPU_BLOCK = 128, 512
# Rows and columns of the kernels' Toeplitz tiles: 99 us forward and transposed for 3 heads of 8 x 4,096, where shifted
# copies of exp(rho) took 195 (docs/log.md).
TILE = 128
# Zeros in front of g, and the multiple its length is rounded up to: two tiles, the most that one program computes.
PAD = 256

# --- the product in plain PyTorch


def blocked_product(x: Tensor, distance: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return `y[i] = after[i] sum_{j<=i} distance[i-j] before[j] x[j]`, `[B, F, T, D]`, stored as `[B, T, F, D]`.

    `x [B, F, T, D]`; `distance`, `before`, `after` `[F, >=T]`. Positions are cut into n blocks of C. All pairs of
    blocks d apart have the same tile of G, so that they are one product of `[C, C]` with `[C, (n - d) * B * D]` (S.14).
    16-bit inputs are scaled in float32, rounded, and summed in float32.
    """
    batch, heads, length, dim = x.shape
    block = _block(length, BLOCK)
    count = -(-length // block)
    width, beyond = batch * dim, count * block - length
    wide = torch.promote_types(x.dtype, torch.float32)
    # Rounded to the values' dtype and back, as the kernels' operands are.
    u = (x.to(wide) * before[:, :length, None].to(wide)).to(x.dtype).to(wide)
    u = pad(u, (0, 0, 0, beyond)).view(batch, heads, count, block, dim)
    # [F, C, n * B * D]: columns of consecutive blocks are consecutive, so that all pairs d apart are two slices.
    u = u.permute(1, 3, 2, 0, 4).reshape(heads, block, -1)
    g = pad(distance[:, :length].to(wide), (block - 1, beyond))  # g(d) at C - 1 + d, zeros before
    position = torch.arange(block, device=x.device)
    index = position[:, None] - position + block - 1  # [C, C]
    y = torch.zeros_like(u)
    for offset in range(count):
        # Output block n takes input block n - offset.
        y[:, :, offset * width :].baddbmm_(g[:, index + offset * block], u[:, :, : (count - offset) * width])
    y = y.view(heads, block, count, batch, dim).permute(3, 2, 1, 0, 4)
    y = y.reshape(batch, count * block, heads, dim)[:, :length]
    output = heads_like(x, heads)
    output.transpose(1, 2).copy_(y * after[:, :length].t()[:, :, None].to(wide))
    return output


def reversed_product(x: Tensor, distance: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return the transposed product (S.15): `y[j] = after[j] sum_{i>=j} distance[i-j] before[i] x[i]`."""
    # With time reversed, later rows are earlier ones, and G^T is G.
    length = x.shape[-2]
    flipped = blocked_product(x.flip(2), distance, before[:, :length].flip(1), after[:, :length].flip(1))
    return flipped.transpose(1, 2).flip(1).contiguous().transpose(1, 2)  # stored as [B, T, F, D], as the fake says


def _block(length: int, largest: int) -> int:
    """Return the positions of a block: the power of two that holds the sequence, from 16 to `largest`."""
    return min(largest, max(16, 1 << (length - 1).bit_length()))


def causal_convolution(left: Tensor, right: Tensor) -> Tensor:
    """Return `sum_{j<=k} left_j right_{k-j}` for every k: `left [F, T]` or `[N, F, T]`, `right [F, T]`, any signs.

    No T x T array is formed: on CUDA it is one launch, elsewhere `blocked_product` with one column.
    """
    # No FFT: its error is relative to the largest sums, and rows with a small Z drown in it.
    # On CUDA a launch of its own: the many products of `blocked_product` take a GPU's host longer than the device. It
    # brought a micro-batch with trained patterns from 134 to 81 ms (docs/log.md).
    if left.is_cuda and has_triton():
        from saf.ops.toeplitz_kernels import convolve

        return convolve(left.flatten(0, -2), right.expand_as(left).flatten(0, -2)).view_as(left)
    ones = torch.ones_like(right)
    sums = blocked_product(left.reshape(-1, *right.shape, 1), right, ones, ones)
    return sums.squeeze(3).contiguous().view_as(left)


# --- tables

# The smallest value that a pattern must still mix with values of size one: times a small exp(alpha), it underflows
# first. It is the rounding of bfloat16 at one; chosen, not measured.
SMALL_VALUE = 2.0**-8
# How far the sum of a row's executed weights may be from one: five times the largest error of rounding both factors to
# bfloat16, 2**-9 each, so that only underflow exceeds it. Chosen, not measured.
ROW_SUM_TOLERANCE = 0.02
# Largest logarithm of 1/Z. exp overflows at 88.7 in float32 and at 709.8 in float64; the margin is for gradients, which
# are multiplied by 1/Z.
MAX_LOG_ROW_SCALE = {torch.float64: 600.0, torch.float32: 64.0}


def level_logits(alpha: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits `[F, T]` of the same pattern in the gauge of `CompactPattern.level`, float64.

    In it log Z has no slope, and the maxima of both are 0 (S.6). Logits may come in any gauge, without their Z. NaN
    where float64 cannot hold a row's Z.
    """
    position = torch.arange(alpha.shape[1], dtype=torch.float64, device=alpha.device)
    # First a rough slope, so that float64 can hold Z at all. Z(i) is at least its terms of key 0 and of key i, and the
    # larger one has this slope. Then the slope of log Z itself.
    alpha, rho = alpha.double(), rho.double()
    logits = torch.stack([alpha, rho])
    logits = logits - _slope(torch.maximum(alpha + rho[:, :1], rho + alpha[:, :1])) * position
    logits = logits - logits.amax(-1, keepdim=True)
    log_z = causal_convolution(*logits.exp()).log()
    # Both logits lose the same slope: i - j and j add up to i, so that only Z(i) changes (S.6).
    alpha, rho = logits - _slope(log_z) * position
    return alpha - alpha.amax(-1, keepdim=True), rho - rho.amax(-1, keepdim=True)


def _slope(x: Tensor) -> Tensor:
    """Return the least-squares slope of `x [F, T]` over positions, `[F, 1]`; 0 for a single position."""
    length = x.shape[1]
    position = torch.arange(length, dtype=x.dtype, device=x.device) - (length - 1) / 2
    return (x * position).sum(1, keepdim=True) / max(0.5, length * (length * length - 1) / 12)


def compact_tables(alpha: Tensor, rho: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return `exp(rho)` in `dtype`, `exp(alpha)` and `1/Z`, each `[F, T]`, from logits in the level gauge.

    Z is summed in float64 from the rounded tables that are executed; the scalings are float32, float64 for float64.
    `1/Z` is NaN for a head that tables of `dtype` cannot hold: one whose rows no longer sum to 1 when values of size 1
    or 2**-8, scaled and rounded, underflow.
    """
    wide = torch.promote_types(dtype, torch.float32)
    distance, key_scale = rho.exp().to(dtype), alpha.exp().to(wide)
    # Three sums in one convolution: Z, and what values of size 1 and 2**-8 become once they are scaled and rounded.
    scaled = [(key_scale * size).to(dtype).double() / size for size in (1.0, SMALL_VALUE)]
    total, *rounded = causal_convolution(torch.stack([key_scale.double(), *scaled]), distance.double())
    row_scale = (1 / total).to(wide)
    # Written so that NaN does not fit: comparisons with it are false.
    fits = (row_scale > 0) & (row_scale.double().log() <= MAX_LOG_ROW_SCALE[wide])
    for sums in rounded:
        fits &= (sums * row_scale.double() - 1).abs() <= ROW_SUM_TOLERANCE
    return distance, key_scale, row_scale.where(fits.all(1, keepdim=True), torch.nan)


def distance_table(distance: Tensor) -> Tensor:
    """Return what the operator reads g from: tiles for the kernel, `distance [F, T]` itself for PyTorch."""
    return make_tiles(distance) if uses_triton(distance.device, distance.dtype) else distance


def make_tiles(g: Tensor) -> Tensor:
    """Return the tiles `[F, W / TILE, TILE, TILE]` of weights by distance, `g [F, L]`; W is L rounded up to PAD.

    Tile t holds g(t TILE + row - column), 0 where that is negative.
    """
    # Tiles instead of g itself: a program then reads aligned rows of 128 weights, and a descriptor can describe them.
    heads, length = g.shape
    width = -(-length // PAD) * PAD
    padded = g.new_zeros(heads, PAD + width)
    padded[:, PAD : PAD + length] = g
    starts = torch.arange(width // TILE, device=g.device).view(-1, 1, 1) * TILE
    offsets = torch.arange(TILE, device=g.device)
    return padded[:, PAD + starts + offsets.view(1, -1, 1) - offsets.view(1, 1, -1)]


# --- the operator and its gradient


def _save_tables(ctx, inputs, output) -> None:
    """Save the tables alone: the gradient does not depend on the values."""
    _, table, before, after, ctx.transpose = inputs
    ctx.save_for_backward(table, before, after)


def value_gradient(ctx, gradient: Tensor):
    """Return dV = P^T dO (section 3.3 of the paper).

    P = diag(1/Z) G diag(e^alpha), so P^T = diag(e^alpha) G^T diag(1/Z): G transposed, the scalings exchanged (S.15).
    """
    table, before, after = ctx.saved_tensors
    return toeplitz_product(gradient, table, after, before, not ctx.transpose), None, None, None, None


@operator("toeplitz", fake=lambda x, *_: heads_like(x, x.shape[1]), gradient=value_gradient, context=_save_tables)
def toeplitz_product(x: Tensor, table: Tensor, before: Tensor, after: Tensor, transpose: bool) -> Tensor:
    """Return `diag(after) G diag(before) x` (S.13), `[B, F, T, D]`, or with `transpose` by G^T; stored `[B, T, F, D]`.

    `x [B, F, T, D]`, `table` from `distance_table`, scalings `[F, >=T]`.
    """
    if uses_triton(x.device, x.dtype):
        from saf.ops.toeplitz_kernels import toeplitz_matmul

        return toeplitz_matmul(unit_stride(x), table, before, after, transpose=transpose)
    return (reversed_product if transpose else blocked_product)(x, table, before, after)


class Toeplitz(Backend):
    """Execute frozen heads as a block-Toeplitz product.

    Tables of the `C` slots in `convolved`: `distance [C, T]` exp(rho) in the values' dtype, `table` from
    `distance_table`, `key_scale` exp(alpha) and `row_scale` 1/Z `[C, T]` in float32 (float64 for float64 values).
    Slots in `stored` have `weights [F - C, T, T]`. Where none is stored, `few_tables` and `decode_maps` are added.
    """

    how = (
        f"block-Toeplitz matrix products in {{}}, {BLOCK} x {BLOCK} tiles shared by the batch; on Hopper few tokens "
        "without gradients take one launch with live heads"
    )
    trains = True

    def prepare(
        self, patterns: Sequence[Pattern], dtypes: Sequence[torch.dtype], device: torch.device,
        kv_head: ValueHeads = None,
    ) -> dict[torch.dtype, Tables]:  # fmt: skip
        forms = {slot: one.compact() for slot, one in enumerate(patterns)}
        compact = {slot: form for slot, form in forms.items() if form is not None}
        # In the level gauge entries are products of two factors in [0, 1], over a Z that stays level from row to row.
        if compact:
            level = CompactPattern.stack(
                [form.to(dtype=torch.float64, device=device) for form in compact.values()]
            ).level()
        prepared: dict[torch.dtype, Tables] = {}
        for dtype in dtypes:
            tables: Tables = {"convolved": ()}
            if compact:
                distance, key_scale, row_scale = compact_tables(level.alpha, level.rho, dtype)
                fits = row_scale.isfinite().all(1)  # NaN for patterns that the dtype cannot hold
                tables = {"distance": distance[fits], "key_scale": key_scale[fits], "row_scale": row_scale[fits]}
                tables["table"] = distance_table(tables["distance"])
                tables["convolved"] = tuple(slot for slot, fit in zip(compact, fits.tolist(), strict=True) if fit)
            stored = tuple(slot for slot in range(len(patterns)) if slot not in tables["convolved"])
            # The kernels for few tokens and few queries need every frozen head in compact tables.
            if stored:
                weights = [patterns[slot].dense().to(device=device, dtype=dtype) for slot in stored]
                tables["weights"] = torch.stack(weights)
            else:
                tables |= few_tables(patterns, dtype, device, kv_head)
                tables |= decode_maps(kv_head, len(patterns), device) if uses_triton(device, dtype) else {}
            prepared[dtype] = tables | {"stored": stored}
        return prepared

    def forward(self, value: Tensor, tables: Tables, left_pad: Tensor | None = None) -> Tensor:
        def product(x: Tensor) -> Tensor:
            stored, convolved, parts = tables["stored"], tables["convolved"], []
            if stored:
                parts.append((stored, dense_product(tables["weights"], take_heads(x, stored))))
            if convolved:
                scales = tables["key_scale"], tables["row_scale"]
                result = toeplitz_product(take_heads(x, convolved), tables["table"], *scales, False)
                parts.append((convolved, result))
            return merge_slots(parts)

        return unpadded(product, value, left_pad)

    def untrainable_reason(self, alpha: Tensor, rho: Tensor, dtype: torch.dtype) -> str | None:
        if dtype == torch.float16:
            return "float16 has too little range for a pattern that moves; train in bfloat16 or float32"
        if compact_tables(*level_logits(alpha, rho), dtype)[2].isfinite().all():
            return None
        return f"{dtype} cannot hold a pattern as exp(rho) times exp(alpha); train it with backend='reference'"

    def forward_trainable(self, value: Tensor, alpha: Tensor, rho: Tensor) -> Tensor:
        return trainable_product(value, alpha, rho)[0]


# --- patterns that are trained: tables from the logits in every call, gradients by Eq. (S.17)


def _save_trainable(ctx, inputs, output) -> None:
    value, alpha, _ = inputs
    ctx.save_for_backward(value, *output[1:])
    ctx.dtype, ctx.positions = alpha.dtype, alpha.shape[1]


def logit_gradients(ctx, gradient: Tensor, *_):
    """Return the gradients of values, alpha and rho."""
    grad_value, grad_alpha, grad_rho = pattern_gradient(gradient, *ctx.saved_tensors, ctx.positions)
    return grad_value, grad_alpha.to(ctx.dtype), grad_rho.to(ctx.dtype)


def _trainable_like(value, alpha, rho) -> tuple[Tensor, ...]:
    shape, wide = (alpha.shape[0], value.shape[2]), torch.promote_types(value.dtype, torch.float32)
    scales = value.new_empty(shape, dtype=wide), value.new_empty(shape, dtype=wide)
    return heads_like(value, value.shape[1]), value.new_empty(shape), *scales


@operator("trainable", fake=_trainable_like, gradient=logit_gradients, context=_save_trainable)
def trainable_product(value: Tensor, alpha: Tensor, rho: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `P V [B, F, T, D]` of patterns with logits `[F, >=T]`, and the tables of `compact_tables` it executes.

    Tables are computed anew in every call, so they never lag behind an update; logits may drift along the gauge (S.6)
    without bound. The operator takes prefixes itself, so that one graph serves every length. A pattern that tables of
    the dtype can no longer hold raises UnsupportedError on a CPU; on a device, where the host does not wait to look,
    its outputs and gradients are NaN.
    """
    # Not a slice of longer tables: Z of a prefix is the prefix of Z, but the level gauge depends on the length.
    length = value.shape[2]
    distance, key_scale, row_scale = compact_tables(*level_logits(alpha[:, :length], rho[:, :length]), value.dtype)
    if value.device.type == "cpu" and row_scale.isnan().any():
        raise UnsupportedError(
            f"{value.dtype} cannot hold a trained pattern that has drifted, or is not finite; use backend='reference'"
        )
    output = toeplitz_product(value, distance_table(distance), key_scale, row_scale, False)
    return output, distance, key_scale, row_scale


def _gradients_like(gradient, value, distance, key_scale, row_scale, positions) -> tuple[Tensor, ...]:
    shape = (key_scale.shape[0], positions)
    return heads_like(value, value.shape[1]), key_scale.new_empty(shape), key_scale.new_empty(shape)


@operator("pattern_gradient", fake=_gradients_like)
def pattern_gradient(
    gradient: Tensor, value: Tensor, distance: Tensor, key_scale: Tensor, row_scale: Tensor, positions: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of values, and of alpha and rho in the scalings' dtype, Eq. (S.17).

    `gradient` and `value` are `[B, F, T, D]`; the logits' gradients are `[F, positions]`, summed over B and D, zero
    beyond T. Terms `dO_i V_j` and `dO_i O_i` nearly cancel, so both are computed from the same unrounded `dO/Z` and
    `exp(alpha) V`, a precision above that of the values: float32 for 16 bits and float64 for float32. The work is two
    forward products and a correlation, each two to four times where 16-bit operands are split in halves; the memory is
    some twenty float32 copies of `value`, and no T x T array.
    """
    wide = torch.float32 if value.dtype.itemsize == 2 else torch.float64
    left, right = gradient.to(wide) * row_scale[:, :, None], value.to(wide) * key_scale[:, :, None]
    if uses_triton(value.device, value.dtype) and value.dtype.itemsize == 2:
        left_halves, right_halves = split_halves(left, value.dtype), split_halves(right, value.dtype)
        table = make_tiles(distance)
        product, transposed = product_of_halves(right_halves, table, False), product_of_halves(left_halves, table, True)
        # What the halves add up to, so that both terms of a difference come from the same operands.
        left, right = left_halves.float().sum(0), right_halves.float().sum(0)
        # All four products of a half of one operand with a half of the other: (a + b)(c + d).
        columns = left_halves.repeat(2, 1, 1, 1, 1), right_halves.repeat_interleave(2, 0)
        by_lag = cross_correlation(*(x.permute(2, 3, 0, 1, 4) for x in columns)).double()
    else:
        # Float32 has no kernel a precision above itself: float64, in plain PyTorch on any device.
        g, one = distance.to(wide), torch.ones_like(key_scale)
        product, transposed = blocked_product(right, g, one, one), reversed_product(left, g, one, one)
        by_lag = cross_correlation(*(x.permute(1, 2, 0, 3) for x in (left, right))).double()
    keys, g, rows = key_scale.double(), distance.double(), row_scale.double()
    row_terms = (left * product).sum((0, 3)).double() * rows  # D_i / Z_i of (S.17)
    key_terms = (right * transposed).sum((0, 3)).double()  # <dV_j, V_j>
    # The upper line of (S.17): <dV_j, V_j> less (P^T D)_j.
    grad_alpha = key_terms - keys * causal_convolution(row_terms.flip(1), g).flip(1)
    # The lower line of (S.17). Where exp(rho) is 0 the other factor may be infinite.
    grad_rho = torch.where(g == 0, 0, g * (by_lag - causal_convolution(keys, row_terms.flip(1)).flip(1)))
    beyond = (0, positions - grad_alpha.shape[1])
    grad_alpha, grad_rho = (pad(x.to(key_scale.dtype), beyond) for x in (grad_alpha, grad_rho))
    grad_value = heads_like(value, value.shape[1]).copy_(transposed * key_scale[:, :, None])
    return grad_value, grad_alpha, grad_rho


def split_halves(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 `x` as two halves of a 16-bit `dtype`, `[2, ...]`: rounded, and what rounding left over."""
    high = x.to(dtype)  # their sum has twice the digits of a half: 16 of bfloat16, where one has 8
    return torch.stack([high, (x - high).to(dtype)])


def product_of_halves(halves: Tensor, table: Tensor, transpose: bool) -> Tensor:
    """Return the float32 product, without scalings, of the sum of `halves [2, B, F, T, D]`.

    The kernel takes the halves as twice the batch: matrix units multiply 16-bit numbers exactly, and add in float32.
    """
    from saf.ops.toeplitz_kernels import toeplitz_matmul

    _, batch, heads, length, dim = halves.shape
    one = torch.ones(heads, length, device=halves.device)
    sums = halves.new_empty(2 * batch, length, heads, dim, dtype=torch.float32).transpose(1, 2)
    toeplitz_matmul(halves.flatten(0, 1), table, one, one, transpose=transpose, out=sums)
    return sums[:batch] + sums[batch:]


def cross_correlation(left: Tensor, right: Tensor) -> Tensor:
    """Return `sum_i <left_i, right_{i-lag}>` for every lag from 0: `[F, T, ...]` twice to `[F, T]`, at least float32.

    Row r of block a and row s of block a - n are n C + r - s apart. One matrix product sums the pairs (r, s) of all
    blocks n apart, `[C, C]`; its diagonals are then summed. The work is that of a causal convolution of as many
    columns.
    """
    length = left.shape[1]
    block = _block(length, GPU_BLOCK if left.is_cuda else BLOCK)
    count = -(-length // block)
    later, earlier = (_columns_by_row(x, count, block) for x in (left, right))
    earlier = earlier.flip(1)  # s becomes C - 1 - s: pairs of one lag then lie on one antidiagonal
    width = later.shape[2] // count
    # Entry C - 1 + lag; negative lags are those of pairs in one block whose second row is the later one.
    result = left.new_zeros(
        left.shape[0], (count + 1) * block - 1, dtype=torch.promote_types(left.dtype, torch.float32)
    )
    for offset in range(count):
        pairs = _matmul(later[:, :, offset * width :], earlier[:, :, : (count - offset) * width].mT)
        result[:, offset * block : (offset + 2) * block - 1] += antidiagonal_sums(pairs)
    return result[:, block - 1 : block - 1 + length]


def antidiagonal_sums(x: Tensor) -> Tensor:
    """Return the sums of `x [..., R, M]` over equal row + column index, `[..., R + M - 1]`.

    >>> antidiagonal_sums(torch.tensor([[1, 2, 3], [10, 20, 30]]))
    tensor([ 1, 12, 23, 30])
    """
    rows, columns = x.shape[-2:]
    width = rows + columns - 1
    # Rows stored R + M long and read as R + M - 1 long: each row begins one column to the right of the one above.
    return pad(x, (0, rows)).flatten(-2)[..., : rows * width].unflatten(-1, (rows, width)).sum(-2)


def _columns_by_row(x: Tensor, count: int, block: int) -> Tensor:
    """Return `x [F, T, ...]` as `[F, C, count * ...]`: row c holds position c of every block, zeros beyond T."""
    if missing := count * block - x.shape[1]:
        x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], 1)
    return x.unflatten(1, (count, block)).transpose(1, 2).reshape(x.shape[0], block, -1)


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right` of 16-bit inputs in float32, of others in their own dtype."""
    if left.dtype in (torch.float32, torch.float64):
        return torch.bmm(left, right)
    return torch.bmm(left, right, out_dtype=torch.float32) if left.is_cuda else torch.bmm(left.float(), right.float())
