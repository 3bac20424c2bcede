"""Frozen heads with exponential patterns in linear time, by the chunked sum (S.32), see `saf.ops.linear.tables`.

`linear_product` is P V; its gradient `dV = P^T dO` is the same operator with time reversed, see `value_gradient`.
Decoding goes on from a `RecurrentState` in place of all earlier values.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saf.ops.backend import Backend, Tables, ValueHeads
from saf.ops.decode.op import decode_tables
from saf.ops.heads import heads_like, take_heads, unit_stride
from saf.ops.linear.tables import (
    LinearTables,
    chunk_sums,
    chunked_product,
    exact_tables,
    linear_tables,
    scale_rows,
    turn,
)
from saf.ops.operator import operator, product_precision, uses_triton
from saf.ops.positions import CachePosition

STEP_ROWS = 16
"""Rows that the kernel of steps computes, one after another; more are computed chunk by chunk."""


class Linear(Backend):
    """Execute exponential patterns in linear time.

    Its tables: those of `LinearTables`; `key_scale` exp(alpha), `row_scale` 1/Z and, for single rows, `distance` g,
    `[F, T]`.
    """

    # Sums of poles in float16 would need a range that it does not have.
    dtypes = (torch.float64, torch.float32, torch.bfloat16)

    def describe(self, device: torch.device, dtype: torch.dtype) -> str:
        how = "in Triton" if uses_triton(device, dtype) else "as matrix products in PyTorch"
        return f"chunks with a state {how}, time linear in length, for exponential patterns"

    def prepare(
        self, patterns: Sequence[Any], dtypes: Sequence[torch.dtype], device: torch.device, kv_head: ValueHeads = None
    ) -> dict[torch.dtype, Tables]:
        exact, count = exact_tables(patterns, device), len(patterns)
        prepared = {}
        for dtype in dtypes:
            chunked, keys, rows = linear_tables(exact, dtype)
            tables: Tables = {**chunked._asdict(), "key_scale": keys, "row_scale": rows}
            tables |= {"distance": exact.distance.to(dtype), "stored": (), "convolved": tuple(range(count))}
            tables |= decode_tables(kv_head, count, device) if uses_triton(device, dtype) else {}
            prepared[dtype] = tables
        return prepared

    def forward(self, value: Tensor, heads: tuple[int, ...], tables: Tables, left_pad: Tensor | None = None) -> Tensor:
        scalings = tables["key_scale"], tables["row_scale"]
        return linear_product(take_heads(value, heads), _chunked(tables), *scalings, left_pad, False)


def _chunked(tables: Tables) -> list[Tensor]:
    return [tables[name] for name in LinearTables._fields]


# --- the product and its gradient


def _keep_tables(ctx, inputs, output) -> None:
    """Keep the tables alone: the gradient does not depend on the values."""
    _, tables, before, after, left_pad, ctx.transpose = inputs
    ctx.save_for_backward(before, after, left_pad, *tables)


def value_gradient(ctx, gradient: Tensor):
    """Return dV = P^T dO (section 3.3 of the paper).

    P = diag(1/Z) G diag(e^alpha), so P^T = diag(e^alpha) G^T diag(1/Z): time reversed, the scalings exchanged (S.15).
    """
    before, after, left_pad, *tables = ctx.saved_tensors
    result = linear_product(gradient, tables, after, before, left_pad, not ctx.transpose)
    return result, [None] * len(tables), None, None, None, None


def _product_like(x, tables, before, after, left_pad, transpose) -> Tensor:
    return heads_like(x, x.shape[1])


@operator("linear", fake=_product_like, gradient=value_gradient, context=_keep_tables)
def linear_product(
    x: Tensor, tables: list[Tensor], before: Tensor, after: Tensor, left_pad: Tensor | None, transpose: bool
) -> Tensor:
    """Return P x of frozen heads, `[B, F, T, D]` like x, or with `transpose` P^T x; stored as `[B, T, F, D]`.

    P is diag(after) G diag(before), where G(i, j) = g(i - j); scalings `[F, >=T]` are those of the direction asked for,
    `tables` those of `LinearTables`. Sequences begin at `left_pad [B]`, contiguous: scalings count from there, values
    stay where they are, since g knows distances alone; results before it are zero.
    """
    chunked = LinearTables(*tables)
    if uses_triton(x.device, x.dtype):
        from saf.ops.linear.kernels import linear_matmul

        options = {"left_pad": left_pad, "precision": product_precision(x.dtype)}
        return linear_matmul(unit_stride(x), chunked, before, after, transpose=transpose, **options)
    return chunked_product(x, chunked, before, after, left_pad, reverse=transpose)


# --- decoding


class RecurrentState(NamedTuple):
    """What decoding reads in place of all earlier values of a layer's F linear heads, and the values that come next.

    With N tiles, row i of chunk c reads u of chunks c - N + 1 to c, and the state h_c of (S.32). Kept are u of the last
    N + 1 chunks in a ring, h_c and h_{c-1}: so up to C positions can be taken back. A step is the same sum as a whole
    pass and takes the same time wherever it stands.

    Attributes:
        ring: `[B, F, N + 1, C, D]`, u = exp(alpha) V, chunk c at c modulo N + 1.
        sums: `[B, F, 2, 2P, D]` float32 (float64 for float64 values), h_c at c modulo 2.
        value: `[B, H_kv, rows, D]`, the new rows of every value head, in the layer's own order.
    """

    ring: Tensor
    sums: Tensor
    value: Tensor

    @classmethod
    def empty(cls, value: Tensor, sizes: tuple[int, int, int, int]) -> "RecurrentState":
        """Return the state before the first of `value [B, H_kv, rows, D]`; `sizes` are F, N, C and 2P."""
        heads, reach, rows, poles = sizes
        batch, _, _, dim = value.shape
        wide = torch.float64 if value.dtype == torch.float64 else torch.float32
        ring = value.new_zeros(batch, heads, reach + 1, rows, dim)
        return cls(ring, value.new_zeros(batch, heads, 2, poles, dim, dtype=wide), value)

    def mix(self, heads: tuple[int, ...], tables: Tables, position: CachePosition, whole: bool) -> Tensor:
        """Return rows of `P V`, `[B, F, rows, D]`: `whole` sequences fill the state, later rows go on from it.

        Slot f reads `heads[f]` of the values.
        """
        value, first, left_pad = take_heads(self.value, heads), position.first, position.left_pad
        chunked, before, after = _chunked(tables), tables["key_scale"], tables["row_scale"]
        if whole:
            fill_state(value, chunked, before, left_pad, self.ring, self.sums)
            return linear_product(value, chunked, before, after, left_pad, False)
        where = (first, 0) if isinstance(first, Tensor) else (None, first)
        return step_state(value, chunked, before, after, *where, left_pad, self.ring, self.sums)


def _nothing(x, tables, before, left_pad, ring, sums) -> None:
    return None


@operator("linear_fill", fake=_nothing, mutates=("ring", "sums"))
def fill_state(
    x: Tensor, tables: list[Tensor], before: Tensor, left_pad: Tensor | None, ring: Tensor, sums: Tensor
) -> None:
    """Fill the state after values `x [B, F, T, D]` of whole sequences; arguments are those of `linear_product`."""
    chunked = LinearTables(*tables)
    if uses_triton(x.device, x.dtype):
        from saf.ops.linear.kernels import fill

        if ring.numel():
            fill(unit_stride(x), chunked, before, left_pad, ring, sums, precision=product_precision(x.dtype))
        return
    reach, rows = chunked.near.shape[1], chunked.near.shape[-1]
    ring.zero_()
    sums.zero_()
    scaled, last = scale_rows(x, before, 0, left_pad), (x.shape[2] - 1) // rows
    for back in range(min(reach, last) + 1):
        chunk = scaled[:, :, (last - back) * rows : (last - back + 1) * rows]
        ring[:, :, (last - back) % (reach + 1), : chunk.shape[2]] = chunk
    if last >= reach:
        states = chunk_sums(scaled[:, :, : (last - reach + 1) * rows], chunked)
        sums[:, :, last % 2] = states[:, :, -1]
        if last > reach:
            sums[:, :, (last + 1) % 2] = states[:, :, -2]


def _step_like(x, tables, before, after, first, place, left_pad, ring, sums) -> Tensor:
    return heads_like(x, x.shape[1])


@operator("linear_step", fake=_step_like, mutates=("ring", "sums"))
def step_state(
    x: Tensor, tables: list[Tensor], before: Tensor, after: Tensor, first: Tensor | None, place: int,
    left_pad: Tensor | None, ring: Tensor, sums: Tensor,
) -> Tensor:  # fmt: skip
    """Return frozen heads `[B, F, rows, D]` of the next values `x`, and take these into the state.

    They stand from position `first` (`[]`, on the device) or else `place` on. Other arguments are those of
    `linear_product`. More than `STEP_ROWS` rows wait for the device.
    """
    chunked, out = LinearTables(*tables), heads_like(x, x.shape[1])
    if uses_triton(x.device, x.dtype) and x.shape[2] <= STEP_ROWS:
        from saf.ops.linear.kernels import step

        if out.numel():
            at = place if first is None else first
            exact = product_precision(x.dtype)
            step(unit_stride(x), chunked, before, after, left_pad, at, ring, sums, out, precision=exact)
        return out
    at = place if first is None else int(first)
    reach, rows = chunked.near.shape[1], chunked.near.shape[-1]
    scaled = scale_rows(x, before, at, left_pad)
    row = 0
    while row < x.shape[2]:
        chunk, begin = divmod(at + row, rows)
        count = min(rows - begin, x.shape[2] - row)
        within = slice(begin, begin + count)
        if not begin:  # h_c = M h_{c-1} + W u_{c-N}
            added = chunked.write.to(sums.dtype) @ ring[:, :, (chunk - reach) % (reach + 1)].to(sums.dtype)
            sums[:, :, chunk % 2] = turn(sums[:, :, (chunk - 1) % 2], chunked.turns[:, 0]) + added
        ring[:, :, chunk % (reach + 1), within] = scaled[:, :, row : row + count]
        total = chunked.read[:, within].to(sums.dtype) @ sums[:, :, chunk % 2]
        for back in range(reach):
            earlier = ring[:, :, (chunk - back) % (reach + 1)].to(sums.dtype)
            total += chunked.near[:, back, within].to(sums.dtype) @ earlier
        out[:, :, row : row + count] = scale_rows(total, after, at + row, left_pad)
        row += count
    return out
