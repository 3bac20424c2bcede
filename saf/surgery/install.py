"""Freezing chosen heads of a model in place."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from saf.adapters import Site, adapter_for
from saf.adapters.site import frozen_heads
from saf.errors import InputError
from saf.heads import Head, HeadSet
from saf.patterns import Pattern, TrainablePattern, pattern_for_each_head, trained_logits
from saf.surgery.editing import check_unwrapped, editing
from saf.surgery.layout import change_layout_, prepare_heads
from saf.surgery.pattern_group import add_logits_, check_group
from saf.surgery.rows import check_optimizer, unwrap_optimizer


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
    sites = adapter_for(model).sites()
    given = pattern_for_each_head(patterns) if len(heads) else []
    if len(given) != len(heads):
        raise InputError(f"{len(heads)} heads need as many patterns, in (layer, head) order; got {len(given)}")
    already = heads & frozen_heads(adapter_for(model))
    if len(already):
        raise InputError(f"already frozen: {already.to_list()}; uninstall_ them first")
    optimizer = unwrap_optimizer(optimizer)
    changes = []
    for layer in sorted({layer for layer, _ in heads}):
        if layer >= len(sites):
            raise InputError(
                f"the model has layers 0 to {len(sites) - 1}; got head {(layer, heads.in_layer(layer)[0])}"
            )
        site = sites[layer]
        new: dict[int, Pattern] = {head: given[heads.index((layer, head))] for head in heads.in_layer(layer)}
        old = {} if site.frozen is None else dict(zip(site.layout.frozen, site.frozen.patterns, strict=True))
        if max(new) >= site.layout.num_heads:
            raise InputError(f"layer {layer} has heads 0 to {site.layout.num_heads - 1}; got {max(new)}")
        if not trainable and any(pattern.trainable for pattern in new.values()):
            raise InputError("a TrainablePattern trains: pass trainable=True, or pattern.compact() to keep it fixed")
        if trainable:
            new = {head: _trainable(pattern, site) for head, pattern in new.items()}
            check_group(optimizer, site.projections()["value"][0])
        together = old | new
        layout = type(site.layout)(site.layout.num_heads, site.layout.num_kv_heads, tuple(sorted(together)))
        site.check(layout)
        check_optimizer(optimizer, [parameter for parameter, _ in site.projections().values()])
        changes.append((site, layout.frozen, prepare_heads(site, layout, together, backend), new.values()))
    for site, frozen, prepared, added in changes:
        change_layout_(site, frozen, prepared, optimizer)
        logits = trained_logits(added)
        if logits and optimizer is not None:
            add_logits_(optimizer, logits, site.projections()["value"][0])


def _trainable(pattern: Pattern, site: Site) -> Pattern:
    """Return a pattern as one that is trained, beside the layer's value weights."""
    if pattern.trainable:
        return pattern
    weight = site.projections()["value"][0]
    return TrainablePattern.of(pattern, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
