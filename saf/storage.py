"""`storage_report` counts the bytes of frozen heads' patterns: as vectors, as matrices, and as a backend holds them."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from saf.errors import InputError
from saf.heads import Head, HeadSet
from saf.models.adapter import adapter_for


@dataclass(frozen=True)
class StorageReport:
    """The bytes of one set of patterns in each form; printed in GB (1e9 bytes)."""

    dense_by_layer: int
    """A `[H, T, T]` buffer in every layer with a frozen head, as the paper's dense implementation has it."""
    dense_packed: int
    """The frozen heads' matrices alone."""
    compact: int
    """Key logits, distance logits and normalisers of the frozen heads."""
    parameters: int | None = None
    """The saved tensors of a model's patterns: of exponential ones alpha, the band and the poles."""
    allocated: int | None = None
    """Tables of a model's layers for every dtype of values, and trained logits. The patterns and the rows for undoing
    are on the CPU and not counted."""

    @property
    def ratio(self) -> float:
        """Packed dense over compact."""
        return self.dense_packed / self.compact if self.compact else 1.0

    def __str__(self) -> str:
        sizes = ((name, size / 1e9) for name, size in vars(self).items() if size is not None)
        return ", ".join(f"{name.replace('_', ' ')} {size:.3g} GB" for name, size in sizes)


def storage_report(
    heads: nn.Module | Iterable[Head],
    *,
    length: int | None = None,
    num_heads: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> StorageReport:
    """Return the storage of the patterns of a model's frozen heads.

    Instead of a model, `heads` are counted with patterns over `length` tokens, in layers of `num_heads` heads; then
    `parameters` and `allocated` are None. `dtype` is that of the forms that are only counted.

    >>> storage_report([(0, 1), (0, 2), (3, 0)], length=1024, num_heads=12).dense_packed
    12582912
    """
    parameters = allocated = None
    if isinstance(heads, nn.Module):
        if length is not None or num_heads is not None:
            raise InputError("length and num_heads must be left out with a model, which has its own")
        adapter = adapter_for(heads)
        sites = adapter.sites()
        frozen = [site.frozen for site in sites if site.frozen is not None]
        length = max((one.max_length for one in frozen), default=1)
        num_heads = sites[0].layout.num_heads
        heads, allocated = adapter.frozen_heads(), sum(one.allocated for one in frozen)
        parameters = sum(
            tensor.nbytes for one in frozen for pattern in one.patterns for tensor in pattern.state().values()
        )
    heads = HeadSet(heads)
    if length is None or num_heads is None or length < 1 or any(head >= num_heads for _, head in heads):
        raise InputError(
            f"heads must go with a length and lie below num_heads, or be a model, got {length}, {num_heads}"
        )
    matrix = length * length * dtype.itemsize
    return StorageReport(
        dense_by_layer=len({layer for layer, _ in heads}) * num_heads * matrix,
        dense_packed=len(heads) * matrix,
        compact=len(heads) * 3 * length * dtype.itemsize,
        parameters=parameters,
        allocated=allocated,
    )
