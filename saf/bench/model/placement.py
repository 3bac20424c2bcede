"""Which heads of a model are frozen in a benchmark: how many in each layer, and which ones."""

import math
from collections.abc import Sequence

import torch

from saf.errors import InputError
from saf.heads import HeadSet

MEASURED_SHARES = tuple(count / 12 for count in (8, 7, 3, 5, 2, 4, 2, 2, 1, 2, 0, 0))
"""Share of each layer's heads that variance selection takes at 25% in a trained 124M model with rotary positions."""
SMALLEST_SHARE = 0.01
"""What a layer of which none, or all, was taken counts as: its log odds are finite then."""

_FURTHEST, _HALVINGS = 30.0, 100
"""Log odds are moved by up to so much, 1e-13 from none or all, and the shift is halved until float64 ends it."""
_ALMOST = 1e-6
"""A count so close below a whole number is that number but for rounding."""


def heads_per_layer(*, num_layers: int, num_heads: int, rate: float, placement: str) -> list[int]:
    """Return how many heads of each layer are frozen; they add up to `round(rate * num_layers * num_heads)`.

    "even" spreads them; "early" follows `MEASURED_SHARES` over relative depth, its odds scaled to the rate.
    """
    total = round(rate * num_layers * num_heads)
    if placement == "even":
        shares = [rate] * num_layers
    elif placement == "early":
        shares = _scaled([_measured(layer, num_layers) for layer in range(num_layers)], total / num_heads)
    else:
        raise InputError(f"placement must be 'early' or 'even'; got {placement!r}")
    return _whole([share * num_heads for share in shares], total, num_heads)


def _measured(layer: int, num_layers: int) -> float:
    """Interpolate the measured shares at the middle of a layer."""
    at = (layer + 0.5) / num_layers * len(MEASURED_SHARES) - 0.5
    at = min(max(at, 0.0), len(MEASURED_SHARES) - 1.0)
    low = min(int(at), len(MEASURED_SHARES) - 2)
    share = MEASURED_SHARES[low] + (at - low) * (MEASURED_SHARES[low + 1] - MEASURED_SHARES[low])
    return min(max(share, SMALLEST_SHARE), 1 - SMALLEST_SHARE)


def _scaled(shares: list[float], total: float) -> list[float]:
    """Shift all log odds by one number so that the shares add up to `total` layers."""
    low, high = -_FURTHEST, _FURTHEST
    logits = [math.log(share / (1 - share)) for share in shares]
    for _ in range(_HALVINGS):
        shift = (low + high) / 2
        moved = [1 / (1 + math.exp(-(logit + shift))) for logit in logits]
        low, high = (shift, high) if sum(moved) < total else (low, shift)
    return moved


def _whole(counts: list[float], total: int, most: int) -> list[int]:
    """Round to whole numbers of at most `most` that add up to `total`, largest remainders first."""
    whole = [min(int(count + _ALMOST), most) for count in counts]
    order = sorted(range(len(counts)), key=lambda layer: counts[layer] - whole[layer], reverse=True)
    while sum(whole) < total:
        for layer in order:
            if sum(whole) < total and whole[layer] < most:
                whole[layer] += 1
    return whole


def choose_heads(per_layer: Sequence[int], num_heads: int, generator: torch.Generator) -> HeadSet:
    """Draw that many heads of each layer; raise InputError when a layer has fewer."""
    if max(per_layer) > num_heads:
        raise InputError(f"per_layer asks for {max(per_layer)} heads of a layer, the model has {num_heads}")
    drawn = [torch.randperm(num_heads, generator=generator)[:count].tolist() for count in per_layer]
    return HeadSet((layer, head) for layer, heads in enumerate(drawn) for head in heads)
