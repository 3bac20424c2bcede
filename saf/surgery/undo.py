"""Undoing edits of a model exactly, and making them final."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from saf.adapters import adapter_for
from saf.errors import InputError
from saf.heads import Head, HeadSet
from saf.surgery.edit import (
    absent_rows,
    carry_out_,
    check_unwrapped,
    editing,
    layers_with,
    patterns_of,
    plan_edit,
)
from saf.surgery.optimizer import check_left_behind, unwrap_optimizer


@editing
def uninstall_(
    model: nn.Module, heads: HeadSet | Iterable[Head] | None = None, *, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Give frozen heads (all of them by default) their ordinary attention back, changing the model in place.

    Removed query and key rows and their moments return as they were when removed; trainable patterns of these heads
    leave the optimiser; everything else keeps its progress since.

    Raises:
        InputError: A head that is not frozen, or whose rows are gone (after `finalize_`, or when the model was loaded
            without them); no `optimizer`, though the one passed when heads were frozen still has moments of their
            layer. Nothing is changed then.
        UnsupportedError: A model wrapped for data parallelism.
    """
    check_unwrapped(model)
    adapter = adapter_for(model)
    frozen = adapter.frozen_heads()
    heads = frozen if heads is None else HeadSet(heads)
    if strangers := (heads - frozen).to_list():
        raise InputError(f"not frozen: {strangers}; frozen heads are {frozen.to_list()}")
    optimizer = unwrap_optimizer(optimizer)
    edits = []
    for layer, site, own in layers_with(adapter, heads):
        kept = tuple(head for head in site.layout.frozen if head not in own)
        layout = replace(site.layout, frozen=kept)
        for role, some in absent_rows(layout, site.layout).items():
            if gone := [one for one in some if one not in site.removed.get(role, {})]:
                raise InputError(
                    f"the {role} rows of layer {layer}, heads {gone} were not kept; "
                    "undo before finalize_, or load a checkpoint that holds them"
                )
        if optimizer is None:
            check_left_behind(parameter for parameter, _ in site.projections().values())
        backend = "auto" if site.frozen is None else site.frozen.backend
        edits.append(plan_edit(site, layout, patterns_of(site), backend=backend, optimizer=optimizer))
    carry_out_(edits, optimizer)


def finalize_(model: nn.Module) -> None:
    """Forget the rows kept for undoing; the frozen heads stay frozen."""
    for site in adapter_for(model).sites():
        if site.removed:
            site.assign(site.layout, site.frozen, {})
