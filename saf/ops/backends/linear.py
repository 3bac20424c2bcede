"""Frozen heads with exponential patterns in linear time: a band of tiles and a state, see `saf.ops.linear`.

Other patterns of a layer are executed beside them, by the product of `toeplitz`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saf.ops.backend import Backend, Tables
from saf.ops.backends.toeplitz import Toeplitz
from saf.ops.heads import join_heads, put_together, row_product, stored_rows, take_heads
from saf.ops.linear.operator import DTYPES, LinearTables, linear_product, linear_tables
from saf.ops.operator import uses_triton
from saf.ops.positions import Rows
from saf.ops.rows.frozen import compact_rows, few_rows, row_tables
from saf.patterns import Pattern

_REST = "rest_"
"""What the names of the tables of other patterns begin with."""
_TOEPLITZ = Toeplitz()


class Linear(Backend):
    """Execute exponential patterns in linear time."""

    decodes = True

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why values of `dtype` cannot be mixed; None when they can."""
        return None if dtype in DTYPES else f"values must be one of {[str(d) for d in DTYPES]}, got {dtype}"

    def describe(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return in words how it runs."""
        how = "in Triton" if uses_triton(device, dtype) else "as matrix products in PyTorch"
        return f"chunks with a state {how}, time linear in length, for exponential patterns"

    def prepare(
        self,
        patterns: Sequence[Pattern],
        dtype: torch.dtype,
        device: torch.device,
        kv_head: tuple[int, ...] | None = None,
    ) -> Tables:
        """Return the tables of one pattern per head.

        Of exponential patterns, in `linear`, those of `LinearTables`, and for single rows the vectors that `Toeplitz`
        has; of others, in `rest`, those of `Toeplitz`, by names that begin with `rest_`.
        """
        linear = tuple(slot for slot, one in enumerate(patterns) if one.kind == "exponential")
        rest = tuple(slot for slot in range(len(patterns)) if slot not in linear)
        made: Tables = {"linear": linear, "rest": rest, "stored": ()}
        if linear:
            own: list[Any] = [patterns[slot] for slot in linear]
            tables, before, after = linear_tables(own, dtype, device)
            weights = torch.stack([one.distance_weights() for one in own]).to(device)
            made |= tables._asdict() | {"key_scale": before, "row_scale": after}
            made["distance"] = (weights / weights.amax(-1, keepdim=True)).to(dtype)
            made["sources"] = torch.arange(len(linear), dtype=torch.int32, device=device)
        if rest:
            inner = _TOEPLITZ.prepare([patterns[slot] for slot in rest], dtype, device)
            made |= {_REST + name: table for name, table in inner.items()}
            made["stored"] = tuple(rest[slot] for slot in inner["stored"])
        elif uses_triton(device, dtype):
            made |= row_tables(kv_head, len(patterns), device)
        return made

    def forward(self, value: Tensor, tables: Tables, rows: int) -> Tensor:
        """Return `P V` of the last `rows` positions: `value [B, F, T, D]` to `[B, F, rows, D]`."""
        linear, rest, parts = tables["linear"], tables["rest"], []
        if linear:
            own = take_heads(value, linear)
            names = [tables[name] for name in LinearTables._fields]
            scalings, count = (tables["key_scale"], tables["row_scale"]), len(linear)
            full = linear_product(own, list(range(count)), tables["sources"], names, *scalings, count, False)
            parts.append((linear, full[:, :, value.shape[-2] - rows :]))
        if rest:
            parts.append((rest, _TOEPLITZ.forward(take_heads(value, rest), _rest_of(tables), rows)))
        return parts[0][1] if len(parts) == 1 else put_together(parts)

    def forward_rows(
        self, value: Tensor, heads: tuple[int, ...], tables: Tables, rows: Rows, live: Tensor | None
    ) -> Tensor:
        """Return live heads and rows of frozen ones, `[B, L + F, rows.count, D]`, from rows of weights."""
        linear, rest = tables["linear"], tables["rest"]
        gradient = torch.is_grad_enabled() and value.requires_grad
        if not rest and uses_triton(value.device, value.dtype) and not gradient:
            return few_rows(value, heads, tables, rows, live)
        parts = []
        inner = _rest_of(tables)
        kinds = [(linear, compact_rows, tables)]
        kinds += [
            (tuple(rest[slot] for slot in inner[name]), weights_of, inner)
            for name, weights_of in (("stored", stored_rows), ("convolved", compact_rows))
            if rest
        ]
        for slots, weights_of, own in kinds:
            if slots:
                read = tuple(heads[slot] for slot in slots)
                parts.append((slots, row_product(weights_of(own), value, read, rows)))
        mixed = parts[0][1] if len(parts) == 1 else put_together(parts)
        return mixed if live is None else join_heads(live, mixed)


def _rest_of(tables: Tables) -> Tables:
    """Return the tables of other patterns by the names that `Toeplitz` gave them."""
    return {name.removeprefix(_REST): table for name, table in tables.items() if name.startswith(_REST)}
