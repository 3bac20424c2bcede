"""The sufficient statistics of a dense pattern for a compact fit, Eqs. (S.3) and (S.4)."""

from typing import NamedTuple

import torch
from torch import Tensor

from saf.statistics import FLOOR


class Target(NamedTuple):
    """Hold what a compact pattern is fitted to: marginals `[F, T]` and row-averaged entropy `[F]` (nats), float64."""

    eta_abs: Tensor
    eta_rel: Tensor
    row_entropy: Tensor


def target_of(weights: Tensor) -> Target:
    """Return the target of dense patterns `[F, T, T]`, floored at 1e-9 and normalised again."""
    length = weights.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool, device=weights.device).tril()
    position = torch.arange(length, device=weights.device)
    distance = (position[:, None] - position)[causal]
    rows = []
    for matrix in weights:
        floored = matrix.double().clamp(min=FLOOR) * causal
        floored /= floored.sum(-1, keepdim=True)
        by_distance = floored.new_zeros(length).index_add_(0, distance, floored[causal])
        rows.append((floored.sum(0), by_distance, -torch.xlogy(floored, floored).sum() / length))
    return Target(*(torch.stack(column) for column in zip(*rows, strict=True)))
