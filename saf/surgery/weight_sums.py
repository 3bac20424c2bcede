"""Sums of a model's attention weights, which tell the weights that were frozen from others loaded later."""

import hashlib

import torch
from torch import Tensor, nn

from saf.adapters import Site, adapter_for

Sums = dict[str, dict[str, str]]
"""dtype and SHA-256 of one layer's projections, by role."""


def weight_sums(model: nn.Module) -> list[Sums]:
    """Return the sums of every layer's projections as they are: without removed rows, heads in slot order."""
    return [
        {
            role: {"dtype": str(weight.dtype).removeprefix("torch."), "sha256": _sum(weight)}
            for role, (weight, _) in site.projections().items()
        }
        for site in adapter_for(model).sites()
    ]


def differing_roles(site: Site, sums: Sums) -> set[str]:
    """Return the roles whose weights are not those of `sums`, compared in the dtype that these were taken in.

    Weights of a narrower dtype cannot be compared, and are not named.
    """
    found = set()
    for role, recorded in sums.items():
        weight, dtype = site.projections()[role][0], getattr(torch, recorded["dtype"])
        comparable = torch.promote_types(weight.dtype, dtype) == weight.dtype
        if comparable and _sum(weight.to(dtype)) != recorded["sha256"]:
            found.add(role)
    return found


def _sum(weight: Tensor) -> str:
    return hashlib.sha256(weight.detach().cpu().flatten().view(torch.uint8).numpy().data).hexdigest()
