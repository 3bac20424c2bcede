"""Whole `T x T` patterns give the same statistics here: the float64 oracle, and the paper's own collection."""

from collections.abc import Sequence

import torch
from torch import Tensor

from saf.calibration.strips import LayerStatistics, floored_sums
from saf.statistics import FLOOR


def dense_statistics(
    query: Tensor, key: Tensor, *, kv_head: Sequence[int], lengths: Sequence[int] | None = None
) -> LayerStatistics:
    """Measure heads as `measure_layer` does, written as the paper writes it; holds `[N, heads, T, T]` in float64.

    With `lengths`, row i of sequence n counts where i < lengths[n], in any order of the sequences.
    """
    count, _, length, dim = query.shape
    scores = query.double() @ key.double()[:, list(kv_head)].mT / dim**0.5
    causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    pattern = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    ends = torch.tensor(list(lengths or [length] * count), device=query.device)
    reaches = (torch.arange(length, device=query.device) < ends[:, None])[:, None, :, None]  # [N, 1, T, 1]
    reached = reaches.sum(0).double()  # [1, T, 1]
    pattern = torch.where(reaches, pattern, 0)
    mean = pattern.sum(0) / reached
    deviation = torch.where(reaches, (pattern - mean) ** 2, 0).sum(0) / (reached - 1).clamp(min=1)
    # The mean of the smallest numbers may be zero where they are not.
    above_zero = mean.clamp(min=torch.finfo(mean.dtype).tiny)
    divergence = (torch.xlogy(pattern, pattern) - torch.xlogy(pattern, above_zero)).sum(0) / reached
    compared = int((reached > 1).sum()) or length
    floored = mean.clamp(min=FLOOR) * causal
    floored = floored / floored.sum(-1, keepdim=True)
    position = torch.arange(length, device=query.device)
    distance = (position[:, None] - position)[causal]
    return LayerStatistics(
        variance=deviation.sum((1, 2)) / compared**2,  # Eq. (1)
        forward_kl=divergence.sum((1, 2)) / compared,  # Eq. (2)
        eta_abs=floored.sum(1),  # Eq. (4)
        eta_rel=torch.zeros_like(floored[:, 0]).index_add(1, distance, floored[:, causal]),
        row_entropy=-torch.xlogy(floored, floored).sum((1, 2)) / length,
    )


def dense_collection(
    query: Tensor, key: Tensor, *, kv_head: Sequence[int], dtype: torch.dtype = torch.float32
) -> LayerStatistics:
    """Measure heads from the whole pattern of one sequence after the other; holds five `[heads, T, T]` in `dtype`.

    Their running sum gives the mean; variance, Eq. (S.18), and divergence are differences of sums over sequences,
    float64 sums of entries in `dtype`. The baseline of benchmarks, as fast as it can be in plain PyTorch.
    """
    count, heads, length, dim = query.shape
    causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    total = query.new_zeros(heads, length, length, dtype=dtype)
    square, information = (query.new_zeros(heads, dtype=torch.float64) for _ in range(2))
    with torch.autocast(query.device.type, enabled=False):
        for n in range(count):
            scores = (query[n].to(dtype) * dim**-0.5) @ key[n, list(kv_head)].to(dtype).mT
            pattern = scores.masked_fill_(~causal, -torch.inf).softmax(-1)
            total += pattern
            information += torch.xlogy(pattern, pattern).sum((1, 2), dtype=torch.float64)
            square += pattern.square_().sum((1, 2), dtype=torch.float64)
    mean = total.div_(count)
    information -= count * torch.xlogy(mean, mean).sum((1, 2), dtype=torch.float64)
    square -= count * mean.square().sum((1, 2), dtype=torch.float64)
    sums = floored_sums(mean, causal)
    return LayerStatistics(
        variance=square / (max(count - 1, 1) * length**2),
        forward_kl=information / (count * length),
        eta_abs=sums.eta_abs,
        eta_rel=sums.eta_rel,
        row_entropy=sums.entropy / length,
    )
