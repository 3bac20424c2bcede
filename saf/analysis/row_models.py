"""Rows of attention drawn from models of how they vary over sequences: what a diagnostic holds against measured rows.

A row is what one head gives its causal keys at one query position. The models are those of the sampled patterns
(docs/method.md, section 5), fitted to the rows of some sequences.
"""

import torch
from torch import Tensor

from saf.errors import InputError
from saf.estimates.dirichlet import (
    BOUNDS,
    NEAR_CONSTANT,
    NEAR_DETERMINISTIC,
    PARAMETER_FLOOR,
    concentration,
    log_gamma_draws,
)
from saf.estimates.sampling import stream_of

FAMILIES = ("resampled", "gaussian", "dirichlet")
SCALE = 4.0
"""Of Dirichlet concentrations in diagnostics; patterns to install take 16 (paper, appendix)."""

Key = tuple[int, ...]
"""What a random stream belongs to, such as (layer, head, position)."""


def resampled_rows(rows: Tensor, count: int, *, seed: int, key: Key) -> Tensor:
    """Return `count` of the rows `[N, W]`, drawn with replacement: the reference for finite samples."""
    return rows[torch.from_numpy(stream_of(seed, key).integers(len(rows), size=count))]


def gaussian_rows(logits: Tensor, count: int, *, seed: int, key: Key) -> Tensor:
    """Return rows `[count, W]`: logits drawn one by one with the means and variances of `logits [N, W]`, softmax."""
    _check(logits)
    values = logits.double()
    noise = torch.from_numpy(stream_of(seed, key).standard_normal((count, values.shape[1])))
    return (values.mean(0) + values.std(0) * noise).softmax(-1)


def dirichlet_rows(rows: Tensor, count: int, *, seed: int, key: Key, scale: float = SCALE) -> Tensor:
    """Return rows `[count, W]` from Dirichlet(c m), m the mean of `rows [N, W]`, c `scale` times Eq. (18).

    c is kept within the bounds of the pattern, parameters are floored as there; rows that are nearly one-hot or hardly
    vary are their mean. Raises InputError unless scale > 0.
    """
    _check(rows)
    if not scale > 0:
        raise InputError(f"the scale of Dirichlet concentrations is positive; got {scale}")
    values = rows.double()
    center, spread = values.mean(0), values.var(0).sum()
    if 1 - center.square().sum() <= NEAR_DETERMINISTIC or spread <= NEAR_CONSTANT:
        return center.expand(count, -1)
    strength = (scale * concentration(center, spread)).clamp(*BOUNDS)
    parameters = (strength * center).clamp(min=PARAMETER_FLOOR).repeat(count)
    return log_gamma_draws(parameters, seed, key).view(count, -1).softmax(-1)


def _check(values: Tensor) -> None:
    if values.ndim != 2 or len(values) < 2 or not bool(values.isfinite().all()):
        raise InputError(f"expected finite values [N, W] of two sequences or more; got {list(values.shape)}")
