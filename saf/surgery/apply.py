"""Freezing a model as another one was, from what `state_of` kept of it."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from saf.errors import CheckpointError
from saf.heads import HeadSet
from saf.surgery.install import install_
from saf.surgery.state import matching_layers, read_pattern
from saf.surgery.uninstall import uninstall_


def apply_(model: nn.Module, state: dict[str, Any], tensors: Mapping[str, Tensor], *, backend: str = "auto") -> None:
    """Install the frozen heads of `state_of` in a model that has all its weights, as `install_` does.

    Its weights should be those that were frozen; where the rows kept for undoing tell that they are not, a warning
    says to load the others. Raises CheckpointError for another schema or shape of model; it is unchanged then.
    """
    layers = matching_layers(model, state)
    same = True
    for number, site, layer in layers:
        weight = site.projections()["query"][0].detach().cpu()
        for head in layer["frozen"]:
            kept = tensors.get(f"{number}.{head}.removed.query.weight")
            if kept is None:
                continue
            own = weight[head * site.head_dim : (head + 1) * site.head_dim]
            if own.shape != kept.shape:
                raise CheckpointError(
                    f"layer {number}: the frozen heads have query rows {list(kept.shape)}, this model's are "
                    f"{list(own.shape)}"
                )
            same &= torch.equal(own, kept.to(own.dtype))
    events = []
    for trainable in (False, True):
        heads = HeadSet(
            (number, head)
            for number, _, layer in layers
            for head in layer["frozen"]
            if (head in layer.get("trainable", ())) is trainable
        )
        # As stored, without training yet: `install_` makes them trainable.
        events.append((heads, [read_pattern(tensors, f"{number}.{head}.", False) for number, head in heads], trainable))
    for heads, patterns, trainable in events:
        try:
            install_(model, heads, patterns, backend=backend, trainable=trainable)
        except Exception:
            uninstall_(model)
            raise
    if not same:
        warnings.warn(
            "these are not the weights whose heads were frozen: load the state dict of the frozen model now",
            UserWarning,
            stacklevel=3,
        )
