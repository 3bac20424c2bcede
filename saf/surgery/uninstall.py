"""Undoing a freeze exactly, and making it final."""

from collections.abc import Iterable

import torch
from torch import nn

from saf.adapters import adapter_for
from saf.adapters.site import frozen_heads
from saf.errors import InputError
from saf.heads import Head, HeadSet
from saf.patterns import trained_logits
from saf.surgery.editing import check_unwrapped, editing
from saf.surgery.layout import change_layout_, prepare_heads
from saf.surgery.pattern_group import drop_logits_
from saf.surgery.rows import check_optimizer, unwrap_optimizer
from saf.surgery.stale_moments import check_left_behind


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
    frozen = frozen_heads(adapter)
    heads = frozen if heads is None else HeadSet(heads)
    if strangers := (heads - frozen).to_list():
        raise InputError(f"not frozen: {strangers}; frozen heads are {frozen.to_list()}")
    optimizer = unwrap_optimizer(optimizer)
    changes = []
    for layer in sorted({layer for layer, _ in heads}):
        site = adapter.sites()[layer]
        gone = [head for head in heads.in_layer(layer) if head not in site.removed]
        if gone:
            raise InputError(
                f"the query and key rows of layer {layer}, heads {gone} were not kept; "
                "undo before finalize_, or load a checkpoint that holds them"
            )
        parameters = [parameter for parameter, _ in site.projections().values()]
        check_optimizer(optimizer, parameters)
        if optimizer is None:
            check_left_behind(parameters)
        assert site.frozen is not None
        patterns = dict(zip(site.layout.frozen, site.frozen.patterns, strict=True))
        kept = tuple(head for head in site.layout.frozen if (layer, head) not in heads)
        layout = type(site.layout)(site.layout.num_heads, site.layout.num_kv_heads, kept)
        dropped = [patterns[head] for head in heads.in_layer(layer)]
        changes.append((site, kept, prepare_heads(site, layout, patterns, site.frozen.backend), dropped))
    for site, kept, prepared, dropped in changes:
        change_layout_(site, kept, prepared, optimizer)
        if optimizer is not None:
            drop_logits_(optimizer, trained_logits(dropped))


def finalize_(model: nn.Module) -> None:
    """Forget the rows kept for undoing; the frozen heads stay frozen."""
    for site in adapter_for(model).sites():
        site.removed.clear()
