"""The bound of what freezing can save: a backend whose frozen heads return their values unmixed."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from saf.bench.arms import FREE
from saf.ops import BACKENDS


def supports(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return None: nothing is computed."""
    return None


def describe(device: torch.device, dtype: torch.dtype) -> str:
    """Say how this backend would run."""
    return "values pass through unmixed (a bound for measurements, not a model)"


def prepare(
    patterns: Sequence[Any], dtype: torch.dtype, device: torch.device, kv_head: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Return no tables."""
    return {}


def forward(value: Tensor, tables: dict[str, Any], rows: int) -> Tensor:
    """Return the last `rows` positions of `value [B, F, T, D]`, a view."""
    return value[:, :, value.shape[-2] - rows :]


@contextmanager
def free_backend() -> Iterator[None]:
    """Make this module known as the backend "free" for the time of a measurement; "auto" never takes it."""
    before = BACKENDS.get(FREE)
    BACKENDS[FREE] = sys.modules[__name__]
    try:
        yield
    finally:
        if before is None:
            del BACKENDS[FREE]
        else:
            BACKENDS[FREE] = before
