"""A measured operator must be right at the measured shape: sampled rows against float64."""

import torch
from torch import Tensor

from saf.errors import AccuracyError
from saf.patterns import CompactPattern

SAMPLES = 64
"""Positions that are compared, evenly spread: all T rows in float64 would take longer than what is measured."""
TOLERANCE = {torch.bfloat16: 4.5e-3, torch.float16: 1e-3, torch.float32: 1e-6, torch.float64: 1e-12}
"""Largest relative L2 error of frozen heads' outputs and gradients, inputs being in the dtype already."""


def check_arm(
    pattern: CompactPattern,
    *,
    value: Tensor,
    output: Tensor,
    output_gradient: Tensor,
    value_gradient: Tensor | None,
) -> None:
    """Compare frozen heads with Eq. (3) in float64 at evenly spread positions.

    `value`, `output` and the gradients are `[B, F, T, D]`. Raises AccuracyError when an error is above the bar
    of the dtype, NaN included.
    """
    length = value.shape[-2]
    at = torch.linspace(0, length - 1, min(SAMPLES, length), device=value.device).round().long()
    wanted = torch.stack([_rows(pattern, head, at) @ value[:, head].double() for head in range(value.shape[1])], 1)
    _compare("outputs", output[:, :, at], wanted)
    if value_gradient is not None:
        columns = [_columns(pattern, head, at) @ output_gradient[:, head].double() for head in range(value.shape[1])]
        _compare("value gradients", value_gradient[:, :, at], torch.stack(columns, 1))


def _rows(pattern: CompactPattern, head: int, at: Tensor) -> Tensor:
    """Return rows `at` of one head's pattern, `[len(at), T]`."""
    return _entries(pattern, head, at[:, None], torch.arange(pattern.length, device=at.device)[None])


def _columns(pattern: CompactPattern, head: int, at: Tensor) -> Tensor:
    """Return columns `at` of one head's pattern, transposed: `[len(at), T]`."""
    return _entries(pattern, head, torch.arange(pattern.length, device=at.device)[None], at[:, None])


def _entries(pattern: CompactPattern, head: int, query: Tensor, key: Tensor) -> Tensor:
    lag = query - key
    alpha, rho, log_z = pattern.alpha[head].double(), pattern.rho[head].double(), pattern.log_z[head].double()
    return torch.where(lag >= 0, (alpha[key] + rho[lag.clamp(min=0)] - log_z[query]).exp(), 0.0)


def _compare(what: str, got: Tensor, wanted: Tensor) -> None:
    error = ((got.double() - wanted).norm() / wanted.norm()).item()
    bar = TOLERANCE[got.dtype]
    if not error <= bar:
        raise AccuracyError(f"{what} are wrong: relative error {error:.2e} against float64, the bar is {bar:.1e}")
