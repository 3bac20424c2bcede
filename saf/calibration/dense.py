"""The oracle: the same statistics from whole `T x T` patterns of every sequence."""

from collections.abc import Sequence

import torch
from torch import Tensor

from saf.calibration.tiles import LayerStatistics
from saf.statistics import FLOOR


def dense_statistics(query: Tensor, key: Tensor, *, kv_head: Sequence[int]) -> LayerStatistics:
    """Measure heads as `measure_layer` does, written as the paper writes it; holds `[N, heads, T, T]` in float64."""
    count, _, length, dim = query.shape
    scores = query.double() @ key.double()[:, list(kv_head)].mT / dim**0.5
    causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    pattern = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    mean = pattern.mean(0)
    deviation = ((pattern - mean) ** 2).sum((0, 2, 3))
    divergence = (torch.xlogy(pattern, pattern) - torch.xlogy(pattern, mean)).sum((0, 2, 3))
    floored = mean.clamp(min=FLOOR) * causal
    floored = floored / floored.sum(-1, keepdim=True)
    position = torch.arange(length, device=query.device)
    distance = (position[:, None] - position)[causal]
    return LayerStatistics(
        variance=deviation / (max(count - 1, 1) * length**2),
        forward_kl=divergence / (count * length),
        eta_abs=floored.sum(1),
        eta_rel=torch.zeros_like(floored[:, 0]).index_add(1, distance, floored[:, causal]),
        row_entropy=-torch.xlogy(floored, floored).sum((1, 2)) / length,
    )
