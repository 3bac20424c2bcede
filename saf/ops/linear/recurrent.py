"""Recurrent state of frozen heads with exponential patterns: what decoding reads in place of all earlier values.

With N tiles, row i of chunk c reads the scaled values of chunks c - N + 1 to c, and the sums of poles over chunks up to
c - N. The state holds the last N + 1 chunks in a ring, and these sums for chunk c and for c - 1: so up to C positions
can be taken back. A step is the same sum as a whole pass, (S.32), and takes the same time wherever it stands.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from saf.ops.heads import heads_like, unit_stride
from saf.ops.linear.tables import LinearTables, chunk_sums, scale_rows, turn
from saf.ops.operator import operator, product_precision, uses_triton
from saf.ops.positions import QueryRows

MOST_ROWS = 16
"""Rows that the kernel of steps computes, one after another; more are computed chunk by chunk."""


class RecurrentState(NamedTuple):
    """The state of a layer's F linear heads, and the values that come next.

    Attributes:
        ring: `[B, F, N + 1, C, D]`, values times exp(alpha), chunk c at c modulo N + 1.
        sums: `[B, F, 2, 2P, D]` float32 (float64 for float64 values), those of chunk c at c modulo 2.
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

    def fill(self, tables: dict[str, Tensor], left_pad: Tensor | None) -> None:
        """Take the first `value` of sequences in."""
        own = [tables[name] for name in LinearTables._fields]
        fill_state(self.value, list(tables["heads"]), tables["sources"], own, tables["key_scale"], left_pad, *self[:2])

    def step(self, tables: dict[str, Tensor], rows: QueryRows) -> Tensor:
        """Take `value` in and return its rows, `[B, F, rows, D]`."""
        own = [tables[name] for name in LinearTables._fields]
        moves = isinstance(rows.first, Tensor)
        return step_state(
            self.value, list(tables["heads"]), tables["sources"], own, tables["key_scale"], tables["row_scale"],
            rows.first if moves else None, 0 if moves else rows.first, rows.left_pad, *self[:2],
        )  # fmt: skip


@operator("saf::linear_fill", mutates=("ring", "sums"))
def fill_state(
    x: Tensor, heads: list[int], sources: Tensor, tables: list[Tensor], before: Tensor, left_pad: Tensor | None,
    ring: Tensor, sums: Tensor,
) -> None:  # fmt: skip
    """Fill the state after values `x [B, H, T, D]` of whole sequences; arguments are those of `linear_product`."""
    own = LinearTables(*tables)
    if uses_triton(x.device, x.dtype):
        from saf.ops.linear.recurrent_kernels import fill

        if ring.numel():
            fill(unit_stride(x), own, before, sources, left_pad, ring, sums, precision=product_precision(x.dtype))
        return
    reach, rows = own.near.shape[1], own.near.shape[-1]
    ring.zero_()
    sums.zero_()
    scaled, last = scale_rows(x[:, heads], before, 0, left_pad), (x.shape[2] - 1) // rows
    for back in range(min(reach, last) + 1):
        chunk = scaled[:, :, (last - back) * rows : (last - back + 1) * rows]
        ring[:, :, (last - back) % (reach + 1), : chunk.shape[2]] = chunk
    if last >= reach:
        states = chunk_sums(scaled[:, :, : (last - reach + 1) * rows], own)
        sums[:, :, last % 2] = states[:, :, -1]
        if last > reach:
            sums[:, :, (last + 1) % 2] = states[:, :, -2]


@operator("saf::linear_step", mutates=("ring", "sums"))
def step_state(
    x: Tensor, heads: list[int], sources: Tensor, tables: list[Tensor], before: Tensor, after: Tensor,
    first: Tensor | None, place: int, left_pad: Tensor | None, ring: Tensor, sums: Tensor,
) -> Tensor:  # fmt: skip
    """Return frozen heads `[B, F, rows, D]` of the next values `x [B, H, rows, D]`, and take these into the state.

    They stand from position `first` (`[]`, on the device) or else `place` on. Other arguments are those of
    `linear_product`. More than `MOST_ROWS` rows wait for the device.
    """
    own, out = LinearTables(*tables), heads_like(x, len(heads))
    if uses_triton(x.device, x.dtype) and x.shape[2] <= MOST_ROWS:
        from saf.ops.linear.recurrent_kernels import step

        if out.numel():
            at = place if first is None else first
            exact = product_precision(x.dtype)
            step(unit_stride(x), own, before, after, sources, left_pad, at, ring, sums, out, precision=exact)
        return out
    at = place if first is None else int(first)
    reach, rows = own.near.shape[1], own.near.shape[-1]
    scaled = scale_rows(x[:, heads], before, at, left_pad)
    row = 0
    while row < x.shape[2]:
        chunk, begin = divmod(at + row, rows)
        count = min(rows - begin, x.shape[2] - row)
        within = slice(begin, begin + count)
        if not begin:
            added = own.write.to(sums.dtype) @ ring[:, :, (chunk - reach) % (reach + 1)].to(sums.dtype)
            sums[:, :, chunk % 2] = turn(sums[:, :, (chunk - 1) % 2], own.turns[:, 0]) + added
        ring[:, :, chunk % (reach + 1), within] = scaled[:, :, row : row + count]
        total = own.read[:, within].to(sums.dtype) @ sums[:, :, chunk % 2]
        for back in range(reach):
            total += own.near[:, back, within].to(sums.dtype) @ ring[:, :, (chunk - back) % (reach + 1)].to(sums.dtype)
        out[:, :, row : row + count] = scale_rows(total, after, at + row, left_pad)
        row += count
    return out


@torch.library.register_fake("saf::linear_fill")
def _(x, heads, sources, tables, before, left_pad, ring, sums) -> None:
    return None


@torch.library.register_fake("saf::linear_step")
def _(x, heads, sources, tables, before, after, first, place, left_pad, ring, sums) -> Tensor:
    return heads_like(x, len(heads))
