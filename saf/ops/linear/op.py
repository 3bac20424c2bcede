"""Frozen heads with exponential patterns in linear time: a band of tiles and a state (`saf.ops.linear.tables`).

Other patterns of a layer are executed beside them, by the product of `toeplitz`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from saf.ops.backend import Backend, Slots, Tables, shifted_product
from saf.ops.decode.op import compact_rows, decode_tables
from saf.ops.heads import heads_like, merge_slots, row_product, take_heads, unit_stride
from saf.ops.linear.recurrent import RecurrentState
from saf.ops.linear.tables import LinearTables, chunked_product, linear_tables
from saf.ops.operator import operator, product_precision, uses_triton
from saf.ops.positions import QueryRows
from saf.ops.toeplitz.op import Toeplitz
from saf.patterns import Pattern

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
"""Dtypes of values. Sums of poles in float16 would need a range that it does not have."""
_REST = "rest_"
"""Prefix of the names of the tables of other patterns."""
_TOEPLITZ = Toeplitz()


class Linear(Backend):
    """Execute exponential patterns in linear time."""

    decodes = True
    pads = True

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why values of `dtype` cannot be mixed; None when they can."""
        return None if dtype in DTYPES else f"values must be one of {[str(d) for d in DTYPES]}, got {dtype}"

    def describe(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return in words how it runs."""
        how = "in Triton" if uses_triton(device, dtype) else "as matrix products in PyTorch"
        return f"chunks with a state {how}, time linear in length, for exponential patterns"

    def prepare(
        self, patterns: Sequence[Pattern], dtype: torch.dtype, device: torch.device, kv_head: Slots = None
    ) -> Tables:
        """Return the tables of one pattern per head.

        Of exponential patterns, in `linear`, those of `LinearTables`, and for single rows the vectors that `Toeplitz`
        has; of others, in `rest`, those of `Toeplitz`, by names that begin with `rest_`.
        """
        linear = tuple(slot for slot, one in enumerate(patterns) if one.kind == "exponential")
        rest = tuple(slot for slot in range(len(patterns)) if slot not in linear)
        tables: Tables = {"linear": linear, "rest": rest, "stored": ()}
        if linear:
            own: list[Any] = [patterns[slot] for slot in linear]
            chunked, before, after = linear_tables(own, dtype, device)
            weights = torch.stack([one.distance_weights() for one in own]).to(device)
            tables |= chunked._asdict() | {"key_scale": before, "row_scale": after}
            slots = tuple(range(len(patterns))) if kv_head is None else kv_head[len(kv_head) - len(patterns) :]
            tables["heads"] = tuple(slots[slot] for slot in linear)
            tables["sources"] = torch.tensor(tables["heads"], dtype=torch.int32, device=device)
            tables["distance"] = (weights / weights.amax(-1, keepdim=True)).to(dtype)
        if rest:
            inner = _TOEPLITZ.prepare([patterns[slot] for slot in rest], dtype, device)
            tables |= {_REST + name: table for name, table in inner.items()}
            tables["stored"] = tuple(rest[slot] for slot in inner["stored"])
        if uses_triton(device, dtype):
            maps = decode_tables(kv_head, len(patterns), device)
            tables |= {name: maps[name] for name in maps if not rest or name.startswith("row_live")}
        return tables

    def forward(self, value: Tensor, heads: tuple[int, ...], tables: Tables) -> Tensor:
        """Return `P V`."""
        return self.padded(value, heads, tables, None)

    def padded(self, value: Tensor, heads: tuple[int, ...], tables: Tables, left_pad: Tensor | None) -> Tensor:
        """Return `P V` of sequences that begin at `left_pad [B]`."""
        return _both(
            heads,
            tables,
            lambda read, own: _product(value, read, own, left_pad),
            lambda read, own: shifted_product(_TOEPLITZ, value, read, own, left_pad),
        )

    def rows(self, value: Tensor, heads: tuple[int, ...], tables: Tables, rows: QueryRows) -> Tensor:
        """Return rows of `P V`, as products with these rows' weights."""
        return _both(
            heads,
            tables,
            lambda read, own: row_product(compact_rows(own), value, read, rows),
            lambda read, own: _TOEPLITZ.rows(value, read, own, rows),
        )

    def recur(
        self, state: RecurrentState, value: Tensor, heads: tuple[int, ...], tables: Tables, rows: QueryRows, whole: bool
    ) -> Tensor:
        """Return rows of `P V`: of exponential patterns by a state, of others from `value`, which `heads` index.

        `whole` sequences fill the state; later rows go on from it.
        """
        if not whole:
            return _both(
                heads,
                tables,
                lambda _, own: state.step(own, rows),
                lambda read, own: _TOEPLITZ.rows(value, read, own, rows),
            )
        left_pad = rows.left_pad
        state.fill(tables, left_pad)
        return _both(
            heads,
            tables,
            lambda _, own: _product(state.value, own["heads"], own, left_pad),
            lambda read, own: shifted_product(_TOEPLITZ, value, read, own, left_pad),
        )


Part = Callable[[tuple[int, ...], Tables], Tensor]


def _both(heads: tuple[int, ...], tables: Tables, linear: Part, rest: Part) -> Tensor:
    """Return the outputs of both kinds of patterns, each from the value heads that it reads and its own tables."""
    inner = {name.removeprefix(_REST): table for name, table in tables.items() if name.startswith(_REST)}
    parts = []
    for slots, compute, own in ((tables["linear"], linear, tables), (tables["rest"], rest, inner)):
        if slots:
            parts.append((slots, compute(tuple(heads[slot] for slot in slots), own)))
    return merge_slots(parts)


def _product(value: Tensor, read: tuple[int, ...], tables: Tables, left_pad: Tensor | None) -> Tensor:
    """Return `P V` of exponential patterns; each value head that several slots read is read in place."""
    sources = tables["sources"]
    if read != tables["heads"] or read == tuple(range(read[0], read[0] + len(read))):
        value, read = take_heads(value, read), tuple(range(len(read)))
    own = [tables[name] for name in LinearTables._fields]
    scalings = tables["key_scale"], tables["row_scale"]
    return linear_product(value, list(read), sources, own, *scalings, left_pad, value.shape[1], False)


def _sum_by_head(x: Tensor, heads: list[int], count: int) -> Tensor:
    """Return the sums of `x [B, F, T, D]` over the slots that read each of `count` heads, stored as `[B, T, H, D]`."""
    if heads == list(range(count)):
        return x
    total = heads_like(x, count).zero_()
    for head in set(heads):
        readers = [slot for slot, own in enumerate(heads) if own == head]
        total[:, head] = torch.stack([x[:, slot] for slot in readers]).sum(0) if len(readers) > 1 else x[:, readers[0]]
    return total


@operator("saf::linear")
def linear_product(
    x: Tensor, heads: list[int], sources: Tensor, tables: list[Tensor], before: Tensor, after: Tensor,
    left_pad: Tensor | None, count: int, transpose: bool,
) -> Tensor:  # fmt: skip
    """Return frozen heads `[B, F, T, D]` of values `x [B, count, T, D]`, or with `transpose` the adjoint.

    Frozen head f reads `heads[f]` of the values, which `sources [F]` holds as int32 on their device. The adjoint takes
    `[B, F, T, D]` and sums over the frozen heads that read a value head: `[B, count, T, D]`. `tables` are those of
    `LinearTables`, scalings `[F, >=T]`, of the direction asked for; these count from `left_pad [B]`, contiguous, the
    first real position of each sequence, before which results are zero. Results are stored as `[B, T, ., D]`.
    """
    own = LinearTables(*tables)
    if uses_triton(x.device, x.dtype):
        from saf.ops.linear.kernels import linear_matmul

        x = unit_stride(x)
        mapped = None if transpose or heads == list(range(x.shape[1])) else sources
        options = {"left_pad": left_pad, "precision": product_precision(x.dtype)}
        result = linear_matmul(x, own, before, after, mapped, transpose=transpose, **options)
        return _sum_by_head(result, heads, count) if transpose else result
    x = x if transpose or heads == list(range(x.shape[1])) else x[:, heads]
    result = chunked_product(x, own, before, after, left_pad, reverse=transpose)
    return _sum_by_head(result, heads, count) if transpose else result


@torch.library.register_fake("saf::linear")
def _(x, heads, sources, tables, before, after, left_pad, count, transpose) -> Tensor:
    return heads_like(x, count if transpose else len(heads))


def _setup(ctx, inputs, output) -> None:
    """Keep the tables: a gradient does not depend on the values."""
    _, ctx.heads, sources, tables, before, after, left_pad, ctx.count, ctx.transpose = inputs
    ctx.save_for_backward(sources, before, after, left_pad, *tables)


def _backward(ctx, gradient: Tensor):
    """Return the gradient to the values: the transposed product, its scalings swapped."""
    sources, before, after, left_pad, *tables = ctx.saved_tensors
    rest = ctx.heads, sources, tables, after, before, left_pad, ctx.count, not ctx.transpose
    return linear_product(gradient, *rest), None, None, [None] * len(tables), None, None, None, None, None


torch.library.register_autograd("saf::linear", _backward, setup_context=_setup)
