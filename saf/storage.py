"""`storage_report` counts the bytes of frozen heads' patterns: as matrices, as vectors, and as a backend holds them."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from torch import nn

from saf.heads import Head
from saf.models.adapter import adapter_for


@dataclass(frozen=True)
class StorageReport:
    """The bytes of one set of patterns in each form, in float32; printed in GB (1e9 bytes)."""

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


def storage_report(model: nn.Module) -> StorageReport:
    """Return the storage of the patterns of a model's frozen heads."""
    adapter = adapter_for(model)
    frozen = [site.frozen for site in adapter.sites() if site.frozen is not None]
    length = max((one.max_length for one in frozen), default=1)
    report = storage_of(list(adapter.heads("frozen")), length=length, num_heads=adapter.sites()[0].layout.num_heads)
    states = [pattern.state() for one in frozen for pattern in one.patterns]
    parameters = sum(tensor.nbytes for state in states for tensor in state.values())
    return replace(report, parameters=parameters, allocated=sum(one.allocated for one in frozen))


def storage_of(heads: Collection[Head], *, length: int, num_heads: int) -> StorageReport:
    """Return the storage of patterns over `length` tokens for these heads, in layers of `num_heads` heads.

    >>> storage_of([(0, 1), (0, 2), (3, 0)], length=1024, num_heads=12).dense_packed
    12582912
    """
    matrix = 4 * length * length
    return StorageReport(
        dense_by_layer=len({layer for layer, _ in heads}) * num_heads * matrix,
        dense_packed=len(heads) * matrix,
        compact=len(heads) * 3 * 4 * length,
    )
