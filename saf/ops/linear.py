"""Frozen heads with exponential patterns in linear time, by a chunked sum, and the state that decoding goes on from.

    y[i] = after[i] sum_{j<=i} g(i - j) before[j] x[j]

Positions are cut into chunks of C rows, u = before x. With N tiles, chunk c of the output is, by Eq. (S.32),

    y_c = after (G_0 u_c + G_1 u_{c-1} + ... + G_{N-1} u_{c-N+1} + L h_c),     h_c = M h_{c-1} + W u_{c-N}

Tiles G_n `[C, C]` of g (`near`) serve pairs of rows in one chunk, or in chunks so near that the band of g reaches them.
A state h serves all larger distances: for each pole of (S.31) it is the sum of `exp((-damping + i frequency) distance)
u` over the rows behind the tiles. W (`write`) adds a chunk to it, L (`read`) reads it, M (`turns`) rotates and decays
it by C positions. The gradient dV = P^T dO is the same product with time reversed.

Here are the sum in plain PyTorch, its tables, the operator, the state of decoding and the backend;
linear_kernels.py has the sum and the state in Triton.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from saf.errors import UnsupportedError
from saf.ops.backend import Backend, Tables, ValueHeads, operator, uses_triton
from saf.ops.flash_decode import decode_maps
from saf.ops.tensors import CachePosition, heads_like, take_heads, unit_stride
from saf.patterns import DampedCosines, ExponentialPattern

# Rows of a chunk: with a band of 128, 64 rows beat 128 at every length with 6 heads, by 9 to 20%.
CHUNK = 64
# Rows that the kernel of steps computes, one after another; more are computed chunk by chunk.
STEP_ROWS = 16
# Powers of two K of `turns`: the table moves a state by up to 2**18 - 1 chunks, 16 million positions.
TURNS = 18
# How far rounded tables may take a row's sum from that of exact ones: a quarter of what a cancellation of 4 does.
ROW_SUM_TOLERANCE = 0.02
# What executes F heads, in the order of the operators' `tables`, in the dtype of values unless stated.
TABLES = (
    "near",  # [F, N, C, C], g between the rows of a chunk and of those 0 to N - 1 chunks before it
    "write",  # [F, 2P, C], what each row of a chunk adds to the state at the chunk's end: cosines, then sines
    "read",  # [F, C, 2P], what each row of a chunk reads of the state at the end of N chunks before it
    "turns",  # [F, K, 2, P] float32 at least, by how much a state rotates and decays over 1, 2, 4, ... chunks
)


# --- the chunked sum in plain PyTorch


def chunked_product(
    x: Tensor, tables: Sequence[Tensor], before: Tensor, after: Tensor, left_pad: Tensor | None = None, *,
    reverse: bool = False,
) -> Tensor:  # fmt: skip
    """Return (S.32) for `x [B, F, T, D]`, stored as `[B, T, F, D]`, in reversed time with `reverse`.

    Scalings `[F, >=T]` are multiplied as `scale_rows` does; all else is float32 (float64 for float64 values).
    """
    near, write, read, turns = tables
    length, rows, num_tiles = x.shape[2], near.shape[-1], near.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    chunks = -(-length // rows)
    u = scale_rows(x, before, 0, left_pad)
    # P^T is P with time reversed, as g knows distances alone. Zeros fill up the last chunk: in either direction they
    # come after all other rows.
    u = pad(u.flip(2) if reverse else u, (0, 0, 0, chunks * rows - length))
    by_chunk = u.unflatten(2, (chunks, rows)).to(wide)  # [B, F, n, C, D]
    y = torch.zeros_like(by_chunk)
    for back in range(min(num_tiles, chunks)):  # G_back u_{c - back}
        earlier = by_chunk[:, :, : chunks - back]
        y[:, :, back:] += torch.einsum("fts,bfnsd->bfntd", near[:, back].to(wide), earlier)
    if chunks > num_tiles:  # L h_c, where chunk c reads the state at the end of chunk c - N
        states = chunk_sums(u[:, :, : (chunks - num_tiles) * rows], write, turns)
        y[:, :, num_tiles:] += torch.einsum("ftp,bfnpd->bfntd", read.to(wide), states)
    y = y.flatten(2, 3)[:, :, :length]
    return heads_like(x, x.shape[1]).copy_(scale_rows(y.flip(2) if reverse else y, after, 0, left_pad))


def scale_rows(x: Tensor, scale: Tensor, first: int, left_pad: Tensor | None) -> Tensor:
    """Return `x [B, F, T, D]`, whose rows stand from `first` on, times `scale [F, >=T]`.

    They are multiplied in float32 at least, then rounded to x's dtype. With `left_pad [B]` scalings count from there,
    and rows before it are zero.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    position = torch.arange(first, first + x.shape[2], device=x.device)
    if left_pad is None:
        factor = scale[:, position][None]
    else:
        position = position - left_pad[:, None]
        factor = (scale[:, position.clamp(min=0)] * (position >= 0)).transpose(0, 1)
    return (x.to(wide) * factor[..., None].to(wide)).to(x.dtype)


def chunk_sums(u: Tensor, write: Tensor, turns: Tensor) -> Tensor:
    """Return the state `[B, F, n, 2P, D]` at the end of each of n whole chunks of `u [B, F, n * C, D]`."""
    wide = turns.dtype  # states are sums over a whole sequence: float32 at least
    chunks = u.unflatten(2, (-1, write.shape[-1])).to(wide)
    states = torch.einsum("fpt,bfntd->bfnpd", write.to(wide), chunks)
    # Hillis-Steele scan: after round k a state holds 2**k chunks. Few large operations in place of one a chunk.
    for power in range((states.shape[2] - 1).bit_length()):  # `turns` has M, M^2, M^4, ... for these rounds
        back = 1 << power
        later = states[:, :, back:] + turn(states[:, :, :-back], turns[:, None, power])
        states = torch.cat([states[:, :, :back], later], 2)
    return states


def turn(state: Tensor, factor: Tensor) -> Tensor:
    """Return states `[..., F, *, 2P, D]` rotated and decayed by `factor [F, *, 2, P]`: M h of (S.32)."""
    cosines, sines = state.chunk(2, -2)
    real, imaginary = factor[..., 0, :, None], factor[..., 1, :, None]
    return torch.cat([real * cosines - imaginary * sines, imaginary * cosines + real * sines], -2)


# --- tables


class ExactTables(NamedTuple):
    """Tables of F heads in float64: those of g, g itself and exp(alpha) `[F, T]` with largest 1, and Z `[F, T]`."""

    tables: Sequence[Tensor]
    distance: Tensor
    keys: Tensor
    sums: Tensor


def exact_tables(patterns: Sequence[ExponentialPattern], device: torch.device, *, chunk: int = CHUNK) -> ExactTables:
    """Return the tables of one pattern per head, before they are rounded to a dtype of values."""
    patterns = [one.to(dtype=torch.float64, device=device) for one in patterns]
    # The state serves distances from (N - 1) C + 1 on: N is the fewest tiles for which the band ends before that.
    num_tiles = 1 + -(-(max(one.band.shape[-1] for one in patterns) - 1) // chunk)
    # Kernels index powers of two and multiply 16 rows at least. Poles that are filled up have amplitudes of zero.
    most_poles = max(16, *(one.damping.shape[-1] for one in patterns))
    num_poles = 1 << (most_poles - 1).bit_length()
    # The largest weight and the largest key become 1, which keeps all sums in range; Z takes up both factors.
    weights = torch.stack([one.distance_weights() for one in patterns])
    largest = weights.amax(-1, keepdim=True)
    by_head = [_head_tables(*each, chunk, num_tiles, num_poles) for each in zip(patterns, largest, strict=True)]
    tables = [torch.stack(of_heads) for of_heads in zip(*by_head, strict=True)]
    keys = torch.stack([one.key_logits() for one in patterns])
    keys = (keys - keys.amax(-1, keepdim=True)).exp()
    return ExactTables(tables, weights / largest, keys, _row_sums(tables, keys))


def _head_tables(
    pattern: ExponentialPattern, largest: Tensor, chunk: int, num_tiles: int, num_poles: int
) -> tuple[Tensor, ...]:
    """Return the tables of one head, whose g is divided by its `largest` weight.

    Up to distance w - 1 g is the band, beyond it `g(d) = sum_p Re((cosine - i sine) e^{pole (d - w)})` (S.31) with
    `pole = -damping + i frequency`. Row s of a chunk is C - 1 - s positions before the chunk's end. The state that
    chunk c reads ends with chunk c - N, (N - 1) C + 1 + t positions before row t of chunk c.
    """
    missing = (0, num_poles - pattern.damping.shape[-1])
    damping, frequency = pad(pattern.damping, missing), pad(pattern.frequency, missing)
    cosine, sine = pad(pattern.cosine, missing), pad(pattern.sine, missing)
    width, reach = pattern.band.shape[-1], num_tiles * chunk
    row = torch.arange(chunk, device=damping.device)

    # g as fitted within all tiles, beyond the band too: then P depends on i - j alone, whatever chunk a row falls into.
    beyond_band = DampedCosines(damping, frequency, reach - width).sum(torch.cat([cosine, sine]))
    g = torch.cat([pattern.band.exp(), beyond_band]) / largest
    tile = torch.arange(num_tiles, device=damping.device)[:, None, None]
    lag = row[:, None] - row + chunk * tile  # [N, C, C]
    near = torch.where(lag >= 0, g[lag.clamp(min=0)], 0.0)

    pole = torch.complex(-damping, frequency)
    write = (pole[:, None] * (chunk - 1 - row)).exp()  # [P, C], W of (S.32)
    from_state = row[:, None] + (num_tiles - 1) * chunk + 1 - width
    read = (pole * from_state).exp() * torch.complex(cosine, -sine) / largest  # [C, P], L
    turns = (pole * chunk * 2 ** torch.arange(TURNS, device=damping.device)[:, None]).exp()  # [K, P], M^(2^k)
    return (
        near,
        torch.cat([write.real, write.imag]),
        torch.cat([read.real, -read.imag], -1),  # Re(r h) = Re r Re h - Im r Im h
        torch.stack([turns.real, turns.imag], 1),
    )


def _row_sums(tables: Sequence[Tensor], keys: Tensor) -> Tensor:
    """Return Z `[F, T]` float64: the product of the tables with a column of ones."""
    ones = torch.ones(1, *keys.shape, 1, dtype=torch.float64, device=keys.device)
    return chunked_product(ones, [x.double() for x in tables], keys, torch.ones_like(keys))[0, :, :, 0]


def linear_tables(exact: ExactTables, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the tables, exp(alpha) `[F, T]` and 1/Z `[F, T]`, for values of `dtype`.

    Scalings are float32, float64 for float64 values. Z is computed in float64 from the rounded tables, on the rounded
    exp(alpha): rows of what is executed sum to one. Raises UnsupportedError for a pattern whose sums `dtype` cannot
    hold.
    """
    wide = torch.promote_types(dtype, torch.float32)
    near, write, read, turns = exact.tables
    rounded = [near.to(dtype), write.to(dtype), read.to(dtype), turns.to(wide)]
    sums = _row_sums(rounded, exact.keys.to(dtype).double())
    # Poles of opposite amplitudes may cancel to a small g: what rounding does to each of them then shows in Z.
    inverse = (1 / sums).to(wide).contiguous()
    close = (sums / exact.sums - 1).abs() <= ROW_SUM_TOLERANCE
    if not bool((inverse.isfinite() & (inverse > 0) & close).all()):
        raise UnsupportedError(
            f"values of {dtype} cannot hold the sums of an exponential pattern: its poles cancel too much, or its keys "
            "range too far; use pattern.to_compact()"
        )
    return rounded, exact.keys.to(wide), inverse


# --- the operator and its gradient


def _save_tables(ctx, inputs, output) -> None:
    """Save the tables alone: the gradient does not depend on the values."""
    _, tables, before, after, left_pad, ctx.transpose = inputs
    ctx.save_for_backward(before, after, left_pad, *tables)


def value_gradient(ctx, gradient: Tensor):
    """Return dV = P^T dO (section 3.3 of the paper): time reversed, the scalings exchanged (S.15)."""
    before, after, left_pad, *tables = ctx.saved_tensors
    # With padding both scalings count from a sequence's first real position in either direction: values stay in place.
    result = linear_product(gradient, tables, after, before, left_pad, not ctx.transpose)
    return result, [None] * len(tables), None, None, None, None


@operator("linear", fake=lambda x, *_: heads_like(x, x.shape[1]), gradient=value_gradient, context=_save_tables)
def linear_product(
    x: Tensor, tables: list[Tensor], before: Tensor, after: Tensor, left_pad: Tensor | None, transpose: bool
) -> Tensor:
    """Return P x of frozen heads, `[B, F, T, D]` like x, or with `transpose` P^T x; stored as `[B, T, F, D]`.

    P is diag(after) G diag(before), where G(i, j) = g(i - j); scalings `[F, >=T]` are those of the direction, `tables`
    those of TABLES. Sequences begin at `left_pad [B]`, contiguous: scalings count from there, values
    stay where they are, since g knows distances alone; results before it are zero.
    """
    if uses_triton(x.device, x.dtype):
        from saf.ops.linear_kernels import linear_matmul

        return linear_matmul(unit_stride(x), tables, before, after, transpose=transpose, left_pad=left_pad)
    return chunked_product(x, tables, before, after, left_pad, reverse=transpose)


# --- the state of decoding


class RecurrentState(NamedTuple):
    """What decoding reads in place of all earlier values of a layer's F linear heads, and the values that come next.

    With N tiles, row i of chunk c reads u of chunks c - N + 1 to c, and the state h_c of (S.32). The state holds u of
    the last N + 1 chunks in a ring, h_c and h_{c-1}, so that up to C positions can be taken back. A step is the same
    sum as a whole pass and takes the same time wherever it stands.
    """

    # A row reads N chunks and one state. The ring has one chunk more and `sums` one state more, so that rows which are
    # taken back into the chunk before still find what they read.
    ring: Tensor  # `[B, F, N + 1, C, D]`, u = exp(alpha) V, chunk c at c modulo N + 1
    sums: Tensor  # `[B, F, 2, 2P, D]` float32 (float64 for float64 values), h_c at c modulo 2
    value: Tensor  # `[B, H_kv, rows, D]`, the new rows of every value head, in the layer's own order

    @classmethod
    def empty(cls, value: Tensor, sizes: tuple[int, int, int, int]) -> "RecurrentState":
        """Return the state before the first of `value [B, H_kv, rows, D]`; `sizes` are F, N, C and 2P."""
        heads, num_tiles, chunk, poles = sizes
        batch, _, _, dim = value.shape
        wide = torch.promote_types(value.dtype, torch.float32)
        ring = value.new_zeros(batch, heads, num_tiles + 1, chunk, dim)
        return cls(ring, value.new_zeros(batch, heads, 2, poles, dim, dtype=wide), value)

    def mix(self, heads: tuple[int, ...], tables: Tables, position: CachePosition, whole: bool) -> Tensor:
        """Return rows of `P V`, `[B, F, rows, D]`, and change the state; slot f reads `heads[f]` of the values.

        `whole` sequences fill the state, later rows go on from it.
        """
        value, left_pad = take_heads(self.value, heads), position.left_pad
        chunked, before, after = _chunked(tables), tables["key_scale"], tables["row_scale"]
        if whole:
            fill_state(value, chunked, before, left_pad, self.ring, self.sums)
            return linear_product(value, chunked, before, after, left_pad, False)
        return step_state(value, chunked, before, after, *position.first_operands, left_pad, self.ring, self.sums)


@operator("linear_fill", fake=lambda *_: None, mutates=("ring", "sums"))
def fill_state(
    x: Tensor, tables: list[Tensor], before: Tensor, left_pad: Tensor | None, ring: Tensor, sums: Tensor
) -> None:
    """Fill the state after values `x [B, F, T, D]` of whole sequences; arguments are those of `linear_product`."""
    if not uses_triton(x.device, x.dtype):
        _fill(x, tables, before, left_pad, ring, sums)
    elif ring.numel():
        from saf.ops.linear_kernels import fill

        fill(unit_stride(x), tables, before, left_pad, ring, sums)


def _fill(
    x: Tensor, tables: Sequence[Tensor], before: Tensor, left_pad: Tensor | None, ring: Tensor, sums: Tensor
) -> None:
    """Do `fill_state` in plain PyTorch."""
    near, write, _, turns = tables
    num_tiles, rows = near.shape[1], near.shape[-1]
    ring.zero_()  # it may hold an earlier sequence; chunks before the first count as zero
    sums.zero_()
    u, last = scale_rows(x, before, 0, left_pad), (x.shape[2] - 1) // rows
    for back in range(min(num_tiles, last) + 1):
        chunk = u[:, :, (last - back) * rows : (last - back + 1) * rows]
        ring[:, :, (last - back) % (num_tiles + 1), : chunk.shape[2]] = chunk
    if last >= num_tiles:
        states = chunk_sums(u[:, :, : (last - num_tiles + 1) * rows], write, turns)
        sums[:, :, last % 2] = states[:, :, -1]
        if last > num_tiles:
            sums[:, :, (last + 1) % 2] = states[:, :, -2]


@operator("linear_step", fake=lambda x, *_: heads_like(x, x.shape[1]), mutates=("ring", "sums"))
def step_state(
    x: Tensor, tables: list[Tensor], before: Tensor, after: Tensor, first: Tensor | None, host_first: int,
    left_pad: Tensor | None, ring: Tensor, sums: Tensor,
) -> Tensor:  # fmt: skip
    """Return frozen heads `[B, F, rows, D]` of the next values `x`, and add these to the state.

    The first of them stands at `first` (`[]`, on the device), at `host_first` where that is None. Other arguments are
    those of `linear_product`. For more than `STEP_ROWS` rows the host waits for the device.
    """
    if not uses_triton(x.device, x.dtype) or x.shape[2] > STEP_ROWS:
        # `int(first)` waits for the device: a graph cannot be captured of so many rows.
        at = host_first if first is None else int(first)
        return _step(x, tables, before, after, at, left_pad, ring, sums)
    from saf.ops.linear_kernels import step

    at = host_first if first is None else first
    return step(unit_stride(x), tables, before, after, at, left_pad, ring, sums)


def _step(
    x: Tensor, tables: Sequence[Tensor], before: Tensor, after: Tensor, first: int, left_pad: Tensor | None,
    ring: Tensor, sums: Tensor,
) -> Tensor:  # fmt: skip
    """Do `step_state` in plain PyTorch, chunk by chunk."""
    near, write, read, turns = tables
    num_tiles, rows, slots, wide = near.shape[1], near.shape[-1], ring.shape[2], sums.dtype
    u, y = scale_rows(x, before, first, left_pad), heads_like(x, x.shape[1])
    row = 0
    while row < x.shape[2]:
        chunk, begin = divmod(first + row, rows)
        count = min(rows - begin, x.shape[2] - row)
        within = slice(begin, begin + count)
        # Where a chunk's first row is taken back and computed again, so is this, with the same result: it reads the
        # other state, and a chunk that nothing has written over.
        if not begin:  # h_c = M h_{c-1} + W u_{c-N}
            added = write.to(wide) @ ring[:, :, (chunk - num_tiles) % slots].to(wide)
            sums[:, :, chunk % 2] = turn(sums[:, :, (chunk - 1) % 2], turns[:, 0]) + added
        ring[:, :, chunk % slots, within] = u[:, :, row : row + count]
        total = read[:, within].to(wide) @ sums[:, :, chunk % 2]
        for back in range(num_tiles):
            total += near[:, back, within].to(wide) @ ring[:, :, (chunk - back) % slots].to(wide)
        y[:, :, row : row + count] = scale_rows(total, after, first + row, left_pad)
        row += count
    return y


# --- the backend


class Linear(Backend):
    """Execute exponential patterns in linear time.

    Its tables: those of TABLES; `key_scale` exp(alpha), `row_scale` 1/Z and, for single rows, `distance` g,
    `[F, T]`.
    """

    how = "chunks with a state in {}, time linear in length, for exponential patterns"
    # Sums of poles in float16 would need a range that it does not have.
    dtypes = (torch.float64, torch.float32, torch.bfloat16)

    def prepare(
        self, patterns: Sequence[Any], dtypes: Sequence[torch.dtype], device: torch.device, kv_head: ValueHeads = None
    ) -> dict[torch.dtype, Tables]:
        exact, count = exact_tables(patterns, device), len(patterns)
        prepared = {}
        for dtype in dtypes:
            chunked, keys, rows = linear_tables(exact, dtype)
            tables: Tables = {**dict(zip(TABLES, chunked, strict=True)), "key_scale": keys, "row_scale": rows}
            tables |= {"distance": exact.distance.to(dtype), "stored": (), "convolved": tuple(range(count))}
            tables |= decode_maps(kv_head, count, device) if uses_triton(device, dtype) else {}
            prepared[dtype] = tables
        return prepared

    def forward(self, value: Tensor, tables: Tables, left_pad: Tensor | None = None) -> Tensor:
        scalings = tables["key_scale"], tables["row_scale"]
        return linear_product(value, _chunked(tables), *scalings, left_pad, False)


def _chunked(tables: Tables) -> list[Tensor]:
    return [tables[name] for name in TABLES]
