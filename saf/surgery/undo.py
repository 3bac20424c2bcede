"""Undoing edits of a model exactly, and making them final."""

from collections.abc import Iterable

import torch
from torch import nn

from saf.adapters import adapter_for
from saf.arguments import checked
from saf.errors import InputError
from saf.heads import EDITED, Head, HeadSet
from saf.surgery.edit import (
    absent_rows,
    carry_out_,
    editable,
    editing,
    layers_with,
    patterns_of,
    plan_edit,
)
from saf.surgery.optimizer import check_left_behind, unwrap_optimizer


@checked
@editing
def uninstall_(
    model: nn.Module, heads: HeadSet | Iterable[Head] | None = None, *, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Give frozen and pruned heads (all of them by default) their ordinary attention back, in place.

    Removed rows and their moments return as they were when removed; trainable patterns of these heads leave the
    optimiser; everything else keeps its progress since.

    Raises:
        InputError: A head that is neither frozen nor pruned, or whose rows are gone (after `finalize_`, or when the
            model was loaded without them); no `optimizer`, though the one passed when heads were edited still has
            moments of their layer. Nothing is changed then.
        UnsupportedError: A model wrapped for data parallelism.
    """
    adapter = editable(model)
    edited = adapter.heads(*EDITED)
    heads = edited if heads is None else HeadSet(heads)
    if strangers := (heads - edited).to_list():
        raise InputError(f"not frozen or pruned: {strangers}; those that are: {edited.to_list()}")
    optimizer = unwrap_optimizer(optimizer)
    edits = []
    for layer, site, own in layers_with(adapter, heads):
        layout = site.layout.changed(own, "live")
        for role, some in absent_rows(layout, site.layout).items():
            if gone := [one for one in some if one not in site.removed.get(role, {})]:
                raise InputError(
                    f"the {role} rows of layer {layer}, heads {gone} were not kept; "
                    "undo before finalize_, or load a checkpoint that holds them"
                )
        if optimizer is None:
            check_left_behind(parameter for parameter, _ in site.projections().values())
        edits.append(plan_edit(site, layout, patterns_of(site), optimizer=optimizer))
    carry_out_(edits, optimizer)


@checked
def finalize_(model: nn.Module) -> None:
    """Forget the rows kept for undoing; frozen heads stay frozen, and pruned ones are gone."""
    for site in adapter_for(model).sites():
        if site.removed:
            site.assign(site.layout, site.frozen, {})
