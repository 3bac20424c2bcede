"""Ranks of heads over the whole model, for scores that combine others."""

import torch
from torch import Tensor

from saf.errors import InputError


def ranks(values: Tensor) -> Tensor:
    """Return each head's place in ascending order, `[L, H]` float64 from 0, ties by layer and head; NaN stays NaN."""
    flat = values.double().flatten()
    order = flat.argsort(stable=True)
    places = torch.empty_like(flat)
    places[order] = torch.arange(len(flat), dtype=flat.dtype)
    return places.masked_fill_(flat.isnan(), torch.nan).view(values.shape)


def check_gradient(gradient: Tensor, measured: Tensor) -> Tensor:
    """Return the Q/K gradient score in float64; raise InputError unless every measured head has one."""
    if gradient.shape != measured.shape:
        raise InputError(f"gradient must be one number a head, {list(measured.shape)}; got {list(gradient.shape)}")
    gradient = gradient.double().cpu()
    if bool((gradient.isnan() & measured).any()):
        lacking = (gradient.isnan() & measured).nonzero().tolist()
        raise InputError(
            f"no gradient was recorded for {len(lacking)} live heads ({lacking[:3]}...); call QKGradient.update() "
            "after a backward pass first"
        )
    return gradient.masked_fill(~measured, torch.nan)
