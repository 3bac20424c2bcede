"""Freezing a model as another one was, from what `state_of` kept of it."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from saf.adapters import Site
from saf.errors import CheckpointError, SafWarning
from saf.heads import HeadSet
from saf.surgery.install import install_
from saf.surgery.state import matching_layers, read_pattern, restore_removed_
from saf.surgery.uninstall import uninstall_
from saf.surgery.weight_sums import differing_roles


def apply_(model: nn.Module, state: dict[str, Any], tensors: Mapping[str, Tensor], *, backend: str = "auto") -> None:
    """Install the frozen heads of `state_of` in a model that has all its weights, as `install_` does.

    Rows kept for undoing are those that were saved. The model's attention weights should be the saved ones, too. Where
    those rows, or the sums of the weights that stay (`weight_sums`, as `weights` of each layer; earlier files have
    none), tell that they are not, a warning names them and says to load the others. Raises CheckpointError for another
    schema or shape of model; it is unchanged then.
    """
    layers = matching_layers(model, state)
    differing = {number: _other_rows(number, site, layer["frozen"], tensors) for number, site, layer in layers}
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
    for number, site, layer in layers:
        restore_removed_(number, site, tensors)  # not this model's: undoing gives back what was frozen
        differing[number] |= differing_roles(site, layer.get("weights", {}))
    if listed := _listed(differing):
        warnings.warn(
            f"the model's weights differ from those saved with the frozen heads ({listed}): load the state dict of the "
            "frozen model now",
            SafWarning,
            stacklevel=3,
        )


def _other_rows(number: int, site: Site, heads: list[int], tensors: Mapping[str, Tensor]) -> set[str]:
    """Return {"query"} when a layer's rows are not those kept for undoing; raise CheckpointError for another shape."""
    weight = site.projections()["query"][0].detach().cpu()
    found = set()
    for head in heads:
        kept = tensors.get(f"{number}.{head}.removed.query.weight")
        if kept is None:
            continue
        own = weight[head * site.head_dim : (head + 1) * site.head_dim]
        if own.shape != kept.shape:
            raise CheckpointError(
                f"layer {number}: the frozen heads have query rows {list(kept.shape)}, this model's are "
                f"{list(own.shape)}"
            )
        narrower = min(own.dtype, kept.dtype, key=lambda dtype: dtype.itemsize)
        if not torch.equal(own.to(narrower), kept.to(narrower)):
            found.add("query")
    return found


def _listed(differing: dict[int, set[str]], most: int = 3) -> str:
    """Return "layer 0: query, value; ...": the first layers, and how many more; nothing when none differs."""
    listed = [f"layer {number}: {', '.join(sorted(roles))}" for number, roles in differing.items() if roles]
    more = [f"and {len(listed) - most} more"] if len(listed) > most else []
    return "; ".join(listed[:most] + more)
