"""Pruning chosen heads of a model in place: all their rows leave the weights, and they are not computed any more."""

from collections.abc import Iterable

import torch
from torch import nn

from saf.arguments import checked
from saf.heads import Head, HeadSet
from saf.surgery.edit import carry_out_, check_live, editable, editing, layers_with, patterns_of, plan_edit
from saf.surgery.optimizer import unwrap_optimizer


@checked
@editing
def prune_(
    model: nn.Module, heads: HeadSet | Iterable[Head], *, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Remove `heads`, changing the model in place: the control that freezing is compared with (paper, section 4).

    Their query, key and value rows and their columns of the output projection leave the weights: the model computes
    what it would with these heads' outputs set to zero. With grouped queries keys go with the last live head of their
    KV group, values with its last head that is not pruned. A layer may lose all its heads, and so may every layer. The
    rows are kept on the CPU until `finalize_`, and `uninstall_` puts them back as they were; the optimiser's moments
    and gradients not yet used follow the retained rows exactly. Parameters keep their identity. An optimiser that
    trains these weights but is not passed fails at its next step. Frozen heads keep their patterns.

    Before the first update this makes the smaller architecture to be trained from initialisation.

    Raises:
        InputError: Heads that do not exist or are not live, an optimiser that does not hold the model's weights.
            Nothing is changed then.
        UnsupportedError: A model wrapped for data parallelism; optimiser state that cannot be carried.
    """
    adapter, heads = editable(model), HeadSet(heads)
    check_live(adapter, heads)
    optimizer = unwrap_optimizer(optimizer)
    carry_out_(
        [
            plan_edit(site, site.layout.changed(own, "pruned"), patterns_of(site), optimizer=optimizer)
            for _, site, own in layers_with(adapter, heads)
        ],
        optimizer,
    )
