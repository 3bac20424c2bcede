"""Freezing chosen heads of a model in place, undoing it exactly, and making it final."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from saf.adapters import Site, adapter_for
from saf.errors import InputError
from saf.heads import Head, HeadSet
from saf.patterns import Pattern, TrainablePattern, pattern_for_each_head, trained_logits
from saf.surgery.edit import carry_out_, check_unwrapped, editing, plan_edit
from saf.surgery.optimizer import check_group, check_left_behind, unwrap_optimizer


@editing
def install_(
    model: nn.Module,
    heads: HeadSet | Iterable[Head],
    patterns: Pattern | Sequence[Pattern],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    backend: str = "auto",
    trainable: bool = False,
) -> None:
    """Replace the attention of `heads` by fixed `patterns` in (layer, head) order, changing the model in place.

    Query and key rows of the heads leave the weights and are kept on the CPU until `finalize_`; the optimiser's
    moments and gradients not yet used follow the retained rows exactly. Parameters keep their identity. An optimiser
    that trains the heads' queries or keys but is not passed fails at its next step. Heads that are frozen already keep
    their patterns.

    With `trainable` the key and distance logits of these compact patterns become parameters of the model, float32 or
    wider, two `[T]` a head; a `TrainablePattern` is taken as it is. The optimiser trains them with the settings of the
    layer's value weights, but no weight decay and no moments yet; without one, make it afterwards. Fixed and trainable
    heads may share a layer.

    Raises:
        InputError: Heads that do not exist or are frozen, a wrong number of patterns, unequal lengths, an
            optimiser that does not hold the model's weights, a TrainablePattern without `trainable`. Nothing is
            changed then.
        UnsupportedError: A model wrapped for data parallelism; a backend that cannot run, optimiser state that cannot
            be carried; dense patterns to be trained, or a backend, dtype or optimiser that cannot train patterns.
    """
    check_unwrapped(model)
    heads = HeadSet.in_order(heads)
    adapter = adapter_for(model)
    sites = adapter.sites()
    given = pattern_for_each_head(patterns) if len(heads) else []
    if len(given) != len(heads):
        raise InputError(f"{len(heads)} heads need as many patterns, in (layer, head) order; got {len(given)}")
    if already := (heads & adapter.frozen_heads()).to_list():
        raise InputError(f"already frozen: {already}; uninstall_ them first")
    optimizer = unwrap_optimizer(optimizer)
    edits = []
    for layer in sorted({layer for layer, _ in heads}):
        if layer >= len(sites):
            raise InputError(
                f"the model has layers 0 to {len(sites) - 1}; got head {(layer, heads.in_layer(layer)[0])}"
            )
        site = sites[layer]
        new = {head: given[heads.index((layer, head))] for head in heads.in_layer(layer)}
        if max(new) >= site.layout.num_heads:
            raise InputError(f"layer {layer} has heads 0 to {site.layout.num_heads - 1}; got {max(new)}")
        if not trainable and any(pattern.trainable for pattern in new.values()):
            raise InputError("a TrainablePattern trains: pass trainable=True, or pattern.compact() to keep it fixed")
        if trainable:
            new = {head: _trainable(pattern, site) for head, pattern in new.items()}
            check_group(optimizer, site.projections()["value"][0])
        together = _patterns(site) | new
        layout = replace(site.layout, frozen=tuple(sorted(together)))
        edits.append(plan_edit(site, layout, together, backend=backend, optimizer=optimizer))
    carry_out_(edits, optimizer)


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
    sites, edits = adapter.sites(), []
    for layer in sorted({layer for layer, _ in heads}):
        site = sites[layer]
        if gone := [head for head in heads.in_layer(layer) if head not in site.removed]:
            raise InputError(
                f"the query and key rows of layer {layer}, heads {gone} were not kept; "
                "undo before finalize_, or load a checkpoint that holds them"
            )
        if optimizer is None:
            check_left_behind(parameter for parameter, _ in site.projections().values())
        assert site.frozen is not None
        kept = tuple(head for head in site.layout.frozen if (layer, head) not in heads)
        layout = replace(site.layout, frozen=kept)
        edits.append(plan_edit(site, layout, _patterns(site), backend=site.frozen.backend, optimizer=optimizer))
    carry_out_(edits, optimizer)


def finalize_(model: nn.Module) -> None:
    """Forget the rows kept for undoing; the frozen heads stay frozen."""
    for site in adapter_for(model).sites():
        if site.removed:
            site.assign(site.layout, site.frozen, {})


def pattern_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the key and distance logits that are trained, two parameters `[T]` a head, layer by layer."""
    return [logits for site in adapter_for(model).sites() for logits in trained_logits(_patterns(site).values())]


def _patterns(site: Site) -> dict[int, Pattern]:
    """Return the patterns of a layer's frozen heads, by head."""
    return {} if site.frozen is None else dict(zip(site.layout.frozen, site.frozen.patterns, strict=True))


def _trainable(pattern: Pattern, site: Site) -> Pattern:
    """Return a pattern as one that is trained, beside the layer's value weights."""
    if pattern.trainable:
        return pattern
    weight = site.projections()["value"][0]
    return TrainablePattern.of(pattern, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
