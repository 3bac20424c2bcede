"""Statistics from whole `T x T` patterns in float64, written as the paper writes them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from saf.models import GPT
from saf.statistics import FLOOR, LayerStatistics


def layer_inputs(model: GPT, ids: Tensor) -> list[dict[str, Tensor]]:
    """Run the model; return queries, keys, values, residual stream and attention output of each layer."""
    seen: list[dict[str, Tensor]] = [{} for _ in model.blocks]
    handles = []
    for block, each in zip(model.blocks, seen, strict=True):
        handles += [
            block.register_forward_pre_hook(lambda _, args, each=each: each.update(residual=args[0])),
            block.attention.register_forward_hook(lambda _, args, out, each=each: each.update(output=out)),
            block.attention.live.register_forward_pre_hook(
                lambda _, args, each=each: each.update(q=args[0], k=args[1], v=args[2])
            ),
        ]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return seen


def queries_and_keys(model: GPT, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Rotated queries and keys of each layer, as its attention computes them."""
    return [(each["q"], each["k"]) for each in layer_inputs(model, ids)]


def causal_patterns(query: Tensor, key: Tensor) -> Tensor:
    """Return `[N, heads, T, T]`."""
    length, dim = query.shape[-2:]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return (query @ key.mT / dim**0.5).masked_fill(future, -torch.inf).softmax(-1)


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
