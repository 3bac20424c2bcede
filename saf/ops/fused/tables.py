"""The tables of the fused kernels: which kind each head is (`HeadMaps`), and patterns (`FusedPatterns`)."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saf.patterns import Pattern

LIVE, COMPACT, DENSE = 0, 1, 2
"""States of a head: ordinary attention, a compact pattern rebuilt in registers, a stored dense pattern."""
PAD = 256
"""Entries of minus infinity in front of rho, and the multiple its length is rounded up to: twice the largest block of
128 positions, so that a tile on the diagonal reads no further back."""
BAND_SHIFTS = 4
"""Shifted copies of rho: four float32 elements make one aligned 16-byte load."""


class HeadMaps(NamedTuple):
    """Where each of H heads finds its parts, int32 tensors on the operands' device.

    Attributes:
        state: [H] LIVE, COMPACT or DENSE.
        query: [H] slot in the query; heads that are not live hold 0, which is never read.
        key: [H] slot in the key, for live heads.
        value: [H] slot in the value.
        pattern: [H] slot among the patterns of the head's own kind.
        live: [L] head by query slot.
        group_start: [H_kv + 1] first entry of each value head in `group_heads`.
        group_heads: [H] heads sorted by value slot.
        counts: numbers of live, compact and dense heads.
        grouped: whether some value head serves no head or several.
    """

    state: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    pattern: Tensor
    live: Tensor
    group_start: Tensor
    group_heads: Tensor
    counts: tuple[int, int, int]
    grouped: bool

    @classmethod
    def build(cls, state: Sequence[int], value: Sequence[int], device: torch.device | str) -> "HeadMaps":
        """Return the maps of heads with these states and value slots; keys lie in the order of their value heads."""
        heads, num_value_heads = range(len(state)), max(value) + 1
        rank = [state[:head].count(state[head]) for head in heads]  # the slot among heads of its kind
        live = [head for head in heads if state[head] == LIVE]
        used = sorted({value[head] for head in live})
        maps = {
            "state": state,
            "query": [rank[head] if state[head] == LIVE else 0 for head in heads],
            "key": [used.index(value[head]) if state[head] == LIVE else 0 for head in heads],
            "value": value,
            "pattern": rank,
            "live": live,
            "group_start": [sum(slot < bound for slot in value) for bound in range(num_value_heads + 1)],
            "group_heads": sorted(heads, key=lambda head: value[head]),
        }
        return cls(
            **{name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in maps.items()},
            counts=(len(live), list(state).count(COMPACT), list(state).count(DENSE)),
            grouped=sorted(value) != list(range(num_value_heads)),
        )


class FusedPatterns(NamedTuple):
    """Patterns of a layer's frozen heads in the form the kernels read, for up to L positions.

    Attributes:
        alpha: [F, L] float32, in powers of two.
        band: [F, 4, PAD + W] float32 copies of rho in powers of two, copy s shifted by s, -inf before distance 0;
            W is L rounded up to PAD.
        log_z: [F, L] float32, in powers of two.
        dense: [F_dense, L, L] bfloat16, float16 or float32; zero heads if there are none.
    """

    alpha: Tensor
    band: Tensor
    log_z: Tensor
    dense: Tensor

    @classmethod
    def build(cls, alpha: Tensor, rho: Tensor, log_z: Tensor, dense: Tensor) -> "FusedPatterns":
        """Build from natural logarithms alpha, rho, log_z [F, L] and dense weights [F_dense, L, L]."""
        log2e = 1 / math.log(2)
        heads, length = rho.shape
        width = PAD + -(-length // PAD) * PAD
        padded = torch.full((heads, width), -math.inf, dtype=torch.float64, device=rho.device)
        padded[:, PAD : PAD + length] = rho.double() * log2e
        band = torch.full((heads, BAND_SHIFTS, width), -math.inf, device=rho.device)
        for shift in range(BAND_SHIFTS):
            band[:, shift, shift:] = padded[:, : width - shift].float()
        return cls(
            alpha=(alpha.double() * log2e).float(),
            band=band,
            log_z=(log_z.double() * log2e).float(),
            dense=dense.contiguous(),
        )


MAPS, PATTERNS = HeadMaps._fields[:8], FusedPatterns._fields
"""Names of the tensors of either, in the order in which operators take them."""


def read_tables(
    maps: Sequence[Tensor], patterns: Sequence[Tensor], counts: Sequence[int], grouped: bool
) -> tuple[HeadMaps, FusedPatterns]:
    """Return maps and patterns as launchers take them, from lists as operators take them, see `MAPS`, `PATTERNS`."""
    live, compact, dense = counts
    return HeadMaps(*maps, counts=(live, compact, dense), grouped=grouped), FusedPatterns(*patterns)


def fused_tables(
    patterns: Sequence[Pattern], dtype: torch.dtype, device: torch.device, kv_head: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Return patterns for the kernels and head maps: `alone_*` of the frozen heads, `mixed_*` of all slots.

    Patterns that are not compact are stored entry by entry. Mixed maps need `kv_head`, the value head of every slot.
    """
    length = patterns[0].length
    forms = [pattern.compact() for pattern in patterns]
    compact = [form.to(device=device, dtype=torch.float64).balanced() for form in forms if form is not None]
    dense = [p.dense().to(device=device, dtype=dtype) for p, form in zip(patterns, forms, strict=True) if form is None]
    empty = torch.zeros(0, length, dtype=torch.float64, device=device)
    alpha, rho, log_z = (
        torch.stack([getattr(p, name) for p in compact]) if compact else empty for name in ("alpha", "rho", "log_z")
    )
    stored = torch.stack(dense) if dense else torch.zeros(0, length, length, dtype=dtype, device=device)
    tables: dict[str, Any] = FusedPatterns.build(alpha, rho, log_z, stored)._asdict()
    kinds = [DENSE if form is None else COMPACT for form in forms]
    slots = {"alone": (kinds, tuple(range(len(kinds))))}
    if kv_head is not None:
        slots["mixed"] = ([LIVE] * (len(kv_head) - len(kinds)) + kinds, kv_head)
    for name, (state, value) in slots.items():
        maps = HeadMaps.build(state, value, device)
        tables |= {f"{name}_{part}": getattr(maps, part) for part in MAPS}
        tables |= {f"{name}_counts": maps.counts, f"{name}_grouped": (maps.grouped,)}
    return tables
