"""The gauge in which tables are made of key and distance logits: what matters stays inside the range of their type."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from saf.ops.convolution import causal_convolution

REACH = {torch.float64: 600.0, torch.float32: 64.0, torch.bfloat16: 64.0}
"""Nats by which factors and normalisers may differ from 1; the rest of the range is left to values and gradients."""
LARGEST = {torch.float64: 690.0, torch.float32: 80.0, torch.bfloat16: 80.0}
"""Logarithm of the largest sum over rows, before it is multiplied with a key's factor, which may be 0."""
NEGLIGIBLE = {torch.float64: -56.0, torch.float32: -28.0, torch.bfloat16: -28.0}
"""Logarithm of all the weight of a key, or of a distance, below which its factor may be 0."""
TILTS, STRETCHES = 65, 256
"""How many tilts are tried where the balanced gauge does not do, and on how many stretches of positions."""


def table_gauge(alpha: Tensor, rho: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return alpha and rho `[F, T]` float64 in the gauge (S.6) for tables of `dtype`, and whether they hold each head.

    It is the balanced one while every factor that matters and every row's Z are at least exp(-REACH). Otherwise the
    tilt is the one that needs least reach, and a maximum is above 0. A head is held if all of them lie within `REACH`.
    Whatever gauge the logits come in, the result is the same up to rounding. For float16, with too little range for any
    choice, the gauge is balanced and the caller the judge.
    """
    logits, weights = _balanced(alpha.double(), rho.double())
    reach = REACH.get(dtype, torch.inf)
    # Every row matters.
    matters = pad(weights >= NEGLIGIBLE.get(dtype, -torch.inf), (0, 0, 0, 0, 0, 1), value=True)
    logits = logits + _tilt(logits, matters, reach) * _positions(logits)
    low, high = _ends(logits, matters)
    held = _needed(low, high) <= reach
    # Maxima of 0 where minima allow it; what rows then lack goes to the keys as far as they reach.
    by = torch.maximum(-high[:2], -reach - low[:2])
    lacking = (-reach - low[2] - by.sum(0)).clamp(min=0)
    to_key = torch.minimum(lacking, reach - high[0] - by[0])
    alpha, rho = logits[:2] + (by + torch.stack([to_key, lacking - to_key]))[..., None]
    held = held & ((weights[0] - alpha).amax(1) <= LARGEST.get(dtype, torch.inf))
    return alpha.clamp(max=reach), rho.clamp(max=reach), held


def _balanced(alpha: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """Return alpha, rho and log Z `[3, F, T]` with no slope in log Z, and P's sums over columns and over diagonals.

    The sums are logarithms, `[2, F, T]`; no gauge changes them. All are NaN where float64 cannot hold a row's Z.
    """
    position = _positions(alpha)
    # Z is at least its terms of the first key and of distance 0; without their slope the others are within range.
    logits = torch.stack([alpha, rho])
    logits = logits - _slope(torch.maximum(alpha + rho[:, :1], rho + alpha[:, :1])) * position
    logits = logits - logits.amax(-1, keepdim=True)
    keys, lags = logits.exp()
    log_z = causal_convolution(keys, lags).log()
    inverse = (-log_z).exp().flip(1)
    sums = causal_convolution(torch.cat([inverse, keys]), torch.cat([lags, inverse])).flip(1).log()
    weights = logits + sums.unflatten(0, (2, -1))
    return torch.cat([logits, log_z[None]]) - _slope(log_z) * position, weights


def _tilt(logits: Tensor, matters: Tensor, reach: float) -> Tensor:
    """Return the slope `[F, 1]` to add to alpha, rho and log Z, `logits [3, F, T]`, so that they need least reach."""
    length = logits.shape[-1]
    stretch = -(-length // STRETCHES)
    fill = (0, -length % stretch)
    low, high = _ends(*(pad(x, fill).unflatten(-1, (-1, stretch)) for x in (logits, matters)))
    needed = _needed(low.amin(-1), high.amax(-1))[:, None]
    # With a slope of more than four times that over all positions, rows alone need more.
    slopes = needed * torch.linspace(-4, 4, TILTS, dtype=logits.dtype, device=logits.device) / length
    added = slopes[..., None] * stretch * _positions(low)
    best = _needed((low[:, :, None] + added).amin(-1), (high[:, :, None] + added).amax(-1)).argmin(1, keepdim=True)
    return torch.where(needed <= reach, 0, slopes.gather(1, best))


def _needed(low: Tensor, high: Tensor) -> Tensor:
    """Return the least R such that shifts a and b exist with alpha + a, rho + b and log Z + a + b in [-R, R].

    `low` and `high` `[3, ...]` are the ends of the three. A shift each has its own interval, their sum a third one.
    """
    sums = torch.maximum(high[2] - low[0] - low[1], high[0] + high[1] - low[2])
    return torch.maximum((high - low).amax(0) / 2, sums / 3)


def _ends(logits: Tensor, matters: Tensor) -> tuple[Tensor, Tensor]:
    """Return minima and maxima over the last dimension of what matters."""
    return torch.where(matters, logits, torch.inf).amin(-1), torch.where(matters, logits, -torch.inf).amax(-1)


def _positions(x: Tensor) -> Tensor:
    """Return 0, 1, ... for the last dimension of `x`."""
    return torch.arange(x.shape[-1], dtype=x.dtype, device=x.device)


def _slope(x: Tensor) -> Tensor:
    """Return the least-squares slope of `x [F, T]` over positions, `[F, 1]`; 0 for a single position."""
    length = x.shape[1]
    position = _positions(x) - (length - 1) / 2
    return (x * position).sum(1, keepdim=True) / max(0.5, length * (length * length - 1) / 12)
