"""The bound of what freezing can save: a backend whose frozen heads return their values unmixed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from saf.bench.arms import FREE
from saf.ops import BACKENDS
from saf.ops.backend import Backend, Tables
from saf.patterns import Pattern


class Free(Backend):
    """A backend that computes nothing: a bound for measurements, not a model."""

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return None: nothing is computed."""
        return None

    def describe(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return in words how it runs."""
        return "values pass through unmixed (a bound for measurements, not a model)"

    def prepare(
        self,
        patterns: Sequence[Pattern],
        dtype: torch.dtype,
        device: torch.device,
        kv_head: tuple[int, ...] | None = None,
    ) -> Tables:
        """Return no tables."""
        return {}

    def forward(self, value: Tensor, tables: Tables, rows: int) -> Tensor:
        """Return the last `rows` positions of `value [B, F, T, D]`, a view."""
        return value[:, :, value.shape[-2] - rows :]


@contextmanager
def free_backend() -> Iterator[None]:
    """Make `Free` known as the backend "free" for the time of a measurement; "auto" never takes it."""
    before = BACKENDS.get(FREE)
    BACKENDS[FREE] = Free()
    try:
        yield
    finally:
        if before is None:
            del BACKENDS[FREE]
        else:
            BACKENDS[FREE] = before
