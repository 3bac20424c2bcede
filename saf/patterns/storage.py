"""How many bytes the fixed patterns of a model take, dense and compact."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from saf.errors import InputError
from saf.heads import Head, HeadSet


@dataclass(frozen=True)
class StorageReport:
    """Hold the bytes of one set of patterns in each form; printed in GB (1e9 bytes)."""

    dense_by_layer: int
    """A `[H, T, T]` buffer in every layer with a frozen head, as the paper's dense implementation has it."""
    dense_packed: int
    """The frozen heads' matrices alone."""
    compact: int
    """Key logits, distance logits and normalisers of the frozen heads."""

    @property
    def ratio(self) -> float:
        """Return how many times smaller compact is than packed dense."""
        return self.dense_packed / self.compact if self.compact else 1.0

    def __str__(self) -> str:
        sizes = ((name, size / 1e9) for name, size in vars(self).items())
        return ", ".join(f"{name.replace('_', ' ')} {size:.3g} GB" for name, size in sizes)


def storage_report(
    heads: Iterable[Head], *, length: int, num_heads: int, dtype: torch.dtype = torch.float32
) -> StorageReport:
    """Return the storage of patterns over `length` tokens of `heads` in layers of `num_heads` heads.

    >>> storage_report([(0, 1), (0, 2), (3, 0)], length=1024, num_heads=12).dense_packed
    12582912
    """
    heads = HeadSet(heads)
    if length < 1 or any(head >= num_heads for _, head in heads):
        raise InputError(f"expected length >= 1 and heads below {num_heads}; got {length} and {heads.to_list()}")
    layers = {layer for layer, _ in heads}
    matrix = length * length * dtype.itemsize
    return StorageReport(
        dense_by_layer=len(layers) * num_heads * matrix,
        dense_packed=len(heads) * matrix,
        compact=len(heads) * 3 * length * dtype.itemsize,
    )
