"""Gradients of the loss with respect to a gate on each head's output, sequence by sequence: paper Eq. (19)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from saf.adapters import Adapter, Site, adapter_for
from saf.calibration.capture import Batch, evaluation_mode, read_batches
from saf.errors import InputError

Loss = Callable[[Any, Tensor], Tensor]


def gate_gradients(model: nn.Module, batches: Iterable[Batch], *, loss: Loss | None = None) -> Tensor:
    """Return the importance I of Eq. (19), `[L, H]` float64 on the CPU; NaN for frozen heads.

    A gate multiplies a head's output just before the output projection, so its gradient is the inner product of the
    head's block of output weights with that block's gradient: exact, and the same for every model family.

    Args:
        model: A supported model, run in evaluation mode; weights, gradients and random states stay as they were.
        batches: LongTensors `[B, T]` of token ids, or mappings with `input_ids`. Sequences are run one by one,
            since the absolute value is taken of each one's gradient.
        loss: `loss(model, ids)`, ids `[1, T]`, to the mean loss per token; that of the next token if not given.

    Raises:
        InputError: Batches that cannot be used, as in `calibrate`.
    """
    adapter = adapter_for(model)
    sites = adapter.sites()
    weights = [site.projections()["output"][0] for site in sites]
    total = torch.zeros(len(sites), sites[0].layout.num_heads, dtype=torch.float64)
    count = 0
    with torch.enable_grad(), evaluation_mode(model), requiring_gradients(weights):
        for batch in read_batches(batches):
            for sequence in batch.to(adapter.device).split(1):
                value = _next_token_loss(adapter, sequence) if loss is None else loss(adapter.model, sequence)
                gradients = torch.autograd.grad(value, weights)
                total += torch.stack([gate_gradient(*each) for each in zip(sites, gradients, strict=True)]).abs().cpu()
                count += 1
    for layer, site in enumerate(sites):
        total[layer, list(site.layout.frozen)] = torch.nan
    return total / count


def gate_gradient(site: Site, gradient: Tensor) -> Tensor:
    """Return the derivative of the loss by each head's gate, `[H]` float64, from the output weight's gradient."""
    weight, dimension = site.projections()["output"]
    product = (weight.detach().double() * gradient.double()).movedim(dimension, 0)
    by_slot = product.reshape(site.layout.num_heads, -1).sum(1)
    return torch.zeros_like(by_slot).index_copy_(0, torch.tensor(site.layout.slots, device=by_slot.device), by_slot)


def _next_token_loss(adapter: Adapter, ids: Tensor) -> Tensor:
    """Return the mean negative log-likelihood (nats per token) of `ids[:, 1:]` given what precedes each."""
    if ids.shape[1] < 2:
        raise InputError(f"a next-token loss needs sequences of two tokens or more; got {ids.shape[1]}")
    return adapter.next_token_loss(ids[:, :-1], ids[:, 1:])


@contextmanager
def requiring_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Let parameters take part in gradients, and give each its own setting back afterwards."""
    fixed = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in fixed:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in fixed:
            parameter.requires_grad_(False)
