"""What calibration measures of every head; `score`, `select`, patterns and fitters read nothing else."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from saf.errors import CheckpointError, InputError

SCHEMA = "saf.statistics/1"
FLOOR = 1e-9
"""Causal entries of a mean pattern are raised to this before its rows are normalised again (paper, Algorithm 1)."""


@dataclass(frozen=True, kw_only=True)
class AttentionStatistics:
    """Statistics of the attention patterns of `N` calibration sequences of `T` tokens; NaN for frozen heads.

    The mean pattern is floored at 1e-9 and row-normalised before the last three are taken. Statistics of different
    sequences cannot be merged (the variance of a union is not a sum); those of different heads can, see `join`.
    """

    variance: Tensor
    """`[L, H]` attention variance, paper Eq. (1)."""
    forward_kl: Tensor
    """`[L, H]` row-averaged KL from each sequence's pattern to the mean, in nats, paper Eq. (2)."""
    eta_abs: Tensor
    """`[L, H, T]` weight of each key position in the mean pattern, summed over queries (paper Eq. 4)."""
    eta_rel: Tensor
    """`[L, H, T]` weight of each distance, summed over queries (paper Eq. 4)."""
    row_entropy: Tensor
    """`[L, H]` row-averaged entropy of the mean pattern, in nats."""
    length: int
    num_sequences: int
    sequences_hash: str
    """SHA-256 of the calibration tokens."""

    @property
    def measured(self) -> Tensor:
        """`[L, H]` whether a head was measured."""
        return ~self.variance.isnan()

    @classmethod
    def join(cls, parts: Sequence["AttentionStatistics"]) -> "AttentionStatistics":
        """Merge statistics of different heads of the same sequences; raise InputError when they overlap or differ."""
        first = parts[0]
        for part in parts[1:]:
            same = ("length", "num_sequences", "sequences_hash")
            if differing := [name for name in same if getattr(part, name) != getattr(first, name)]:
                raise InputError(f"statistics of different calibration inputs cannot be joined; differ in {differing}")
        if (torch.stack([part.measured.int() for part in parts]).sum(0) > 1).any():
            raise InputError("statistics to join measure some heads twice; give each head to one part")
        merged = {name: getattr(first, name).clone() for name in _TENSORS}
        for part in parts[1:]:
            for name, tensor in merged.items():
                tensor[part.measured] = getattr(part, name)[part.measured]
        return cls(
            **merged, length=first.length, num_sequences=first.num_sequences, sequences_hash=first.sequences_hash
        )

    def save(self, path: str | Path) -> None:
        """Write one safetensors file."""
        meta = {"schema": SCHEMA, "length": self.length, "num_sequences": self.num_sequences}
        meta["sequences_hash"] = self.sequences_hash
        tensors = {name: getattr(self, name).contiguous() for name in _TENSORS}
        save_file(tensors, path, metadata={"saf": json.dumps(meta)})

    @classmethod
    def load(cls, path: str | Path) -> "AttentionStatistics":
        """Read a file written by `save`; raise CheckpointError when it is another kind of file."""
        with safe_open(path, "pt") as file:
            meta = json.loads((file.metadata() or {}).get("saf", "{}"))
            if meta.pop("schema", None) != SCHEMA:
                raise CheckpointError(f"{path} does not hold attention statistics of schema {SCHEMA!r}")
            return cls(**{name: file.get_tensor(name) for name in _TENSORS}, **meta)


_TENSORS = tuple(field.name for field in fields(AttentionStatistics) if field.type is Tensor)
