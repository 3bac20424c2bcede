"""Frozen heads as a batch-shared causal convolution: `P V = diag(1/Z) Toeplitz(exp rho) diag(exp alpha) V`.

One Toeplitz tile serves every batch element and every channel, so the product is a plain matrix product. Weights
are non-negative: each row's error is bounded whatever the range of alpha and rho (docs/method.md). A pattern
that the value dtype cannot hold in this form, or a dense one, is executed as a stored matrix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from saf.ops.backend import Backend, Call, Tables
from saf.ops.heads import (
    dense_product,
    join_heads,
    projected,
    put_together,
    read_heads,
    row_product,
    stored_rows,
    take_heads,
)
from saf.ops.inference.one_launch import FEW, OneLaunch, compiled_launch, few_tables, serves
from saf.ops.inference.operator import inference
from saf.ops.operator import uses_triton
from saf.ops.positions import Rows
from saf.ops.rows.frozen import compact_rows, few_rows, row_tables
from saf.ops.toeplitz.operator import distance_table, implementation, toeplitz_product
from saf.ops.toeplitz.tables import compact_tables, convolution_tables, tables_hold
from saf.ops.toeplitz.trained import NOT_HELD, trainable_product
from saf.patterns import CompactPattern, Pattern

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of values that `toeplitz.tables` has limits for."""


class Toeplitz(Backend):
    """Execute frozen heads as a block-Toeplitz product; its tables are those that `prepare` names."""

    infers = True
    decodes = True
    trains = True

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why values of `dtype` cannot be mixed; None when they can."""
        return None if dtype in DTYPES else f"values must be one of {[str(d) for d in DTYPES]}, got {dtype}"

    def describe(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return in words how the product runs on a device, and few tokens with it."""
        return implementation(device, dtype) + (FEW if serves(device, dtype) else "")

    def prepare(
        self,
        patterns: Sequence[Pattern],
        dtype: torch.dtype,
        device: torch.device,
        kv_head: tuple[int, ...] | None = None,
    ) -> Tables:
        """Return the tables of one pattern per head.

        `distance [C, T]` exp(rho) in `dtype`; `key_scale [C, T]` exp(alpha) and `row_scale [C, T]` 1/Z in float32
        (float64 for float64 values) and `table` from `distance_table`, for the `C` heads of `convolved`;
        `weights [F - C, T, T]` for those of `stored`; and, where none is stored, what one launch of few tokens and the
        kernel of few rows read.
        """
        compact = {slot: own for slot, one in enumerate(patterns) if (own := one.compact()) is not None}
        made: Tables = {}
        convolved: tuple[int, ...] = ()
        if compact:
            stacked = [pattern.to(dtype=torch.float64, device=device) for pattern in compact.values()]
            tables, holds = convolution_tables(CompactPattern.stack(stacked), dtype)
            convolved = tuple(slot for slot, held in zip(compact, holds.tolist(), strict=True) if held)
            if convolved:
                made |= {name: table[holds] for name, table in tables.items()}
                made["table"] = distance_table(tables["distance"][holds])
        stored = tuple(slot for slot in range(len(patterns)) if slot not in convolved)
        if stored:
            dense = [patterns[slot].dense().to(device=device, dtype=dtype) for slot in stored]
            made["weights"] = torch.stack(dense)
        else:
            made |= few_tables(patterns, dtype, device, kv_head)
            made |= row_tables(kv_head, len(patterns), device) if uses_triton(device, dtype) else {}
        return made | {"convolved": convolved, "stored": stored}

    def forward(self, value: Tensor, tables: Tables, rows: int) -> Tensor:
        """Return `P V` of the last `rows` positions: `value [B, F, T, D]` to `[B, F, rows, D]`."""
        if not tables["stored"]:
            return _convolve(value, tables, rows)
        stored, convolved = tables["stored"], tables["convolved"]
        parts = [(stored, dense_product(tables["weights"], take_heads(value, stored), rows))]
        if convolved:
            parts.append((convolved, _convolve(take_heads(value, convolved), tables, rows)))
        return put_together(parts)

    def can_infer(self, device: torch.device, dtype: torch.dtype, tables: Tables) -> bool:
        """Return whether every head is convolved, by a kernel: elsewhere one operator gains nothing."""
        return uses_triton(device, dtype) and not tables["stored"]

    def infer(self, call: Call, tables: Tables) -> Tensor:
        """Return all heads of a layer, projected where asked: from `saf::inference`, or a launch compiled in."""
        assert call.frozen is not None
        value, replayed = call.value, call.frozen.replayed
        query, key = (
            call.query.to(value.dtype),
            call.key.to(value.dtype),
        )  # they may be wider, as for SDPA
        launch = OneLaunch.of(tables if call.kernel == "auto" else {})
        read = read_heads(value, call.live_slots, call.frozen_slots)
        heads = compiled_launch(query, key, read, launch, call.scale, replayed=replayed)
        if heads is not None:
            return projected(heads, call.projection)
        slots = list(call.live_slots), list(call.frozen_slots)
        own = tables["table"], tables["key_scale"], tables["row_scale"]
        how = call.scale, call.kernel, call.projection, replayed
        return inference(query, key, value, *slots, *own, *launch, *how)

    def forward_rows(
        self, value: Tensor, heads: tuple[int, ...], tables: Tables, rows: Rows, live: Tensor | None
    ) -> Tensor:
        """Return live heads and rows of frozen ones, `[B, L + F, rows.count, D]`: by a kernel that reads values once.

        Elsewhere, and where a gradient is needed or a pattern is stored, as products with the rows' weights.
        """
        convolved, stored = tables["convolved"], tables["stored"]
        gradient = torch.is_grad_enabled() and value.requires_grad
        if uses_triton(value.device, value.dtype) and not stored and not gradient:
            return few_rows(value, heads, tables, rows, live)
        parts = []
        for slots, weights_of in ((stored, stored_rows), (convolved, compact_rows)):
            if slots:
                read = tuple(heads[slot] for slot in slots)
                parts.append((slots, row_product(weights_of(tables), value, read, rows)))
        mixed = parts[0][1] if len(parts) == 1 else put_together(parts)
        return mixed if live is None else join_heads(live, mixed)

    def untrainable(self, alpha: Tensor, rho: Tensor, dtype: torch.dtype) -> str | None:
        """Return why logits `[F, T]` cannot be trained here; None when they can."""
        if dtype == torch.float16:
            return "float16 has too little range for a pattern that moves; train in bfloat16 or float32"
        if tables_hold(*compact_tables(alpha, rho, dtype)).all():
            return None
        return NOT_HELD.format(dtype=dtype)

    def forward_trainable(self, value: Tensor, alpha: Tensor, rho: Tensor, rows: int) -> Tensor:
        """Return `P V` of trainable patterns for the last `rows` positions, with gradients to their logits `[F, >=T]`.

        What becomes of patterns that tables cannot hold is said at `trainable_product`.
        """
        return trainable_product(value, alpha, rho)[:, :, value.shape[-2] - rows :]


def _convolve(value: Tensor, tables: Tables, rows: int) -> Tensor:
    """Return `P V` of convolved heads for the last `rows` positions."""
    full = toeplitz_product(value, tables["table"], tables["key_scale"], tables["row_scale"], False)
    return full[:, :, value.shape[-2] - rows :]
