"""Freezing chosen heads of a model in place: their query and key rows leave the weights."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from saf.adapters import Site, adapter_for, rows_of
from saf.errors import InputError
from saf.heads import Head, HeadSet
from saf.patterns import Pattern, TrainablePattern, pattern_for_each_head, trained_logits
from saf.surgery.edit import carry_out_, check_live, editable, editing, layers_with, patterns_of, plan_edit
from saf.surgery.optimizer import check_group, unwrap_optimizer


@editing
def install_(
    model: nn.Module,
    heads: HeadSet | Iterable[Head],
    patterns: Pattern | Sequence[Pattern],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    backend: str = "auto",
    trainable: bool = False,
    output: Mapping[Head, Tensor] | None = None,
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

    With `output` heads write with these columns `[D, C]` from now on, such as `refit_output` returns; their own are
    kept for undoing too, and `uninstall_` gives them back as they were.

    Raises:
        InputError: Heads that do not exist or are not live, a wrong number of patterns, unequal lengths, an
            optimiser that does not hold the model's weights, a TrainablePattern without `trainable`, `output` of other
            heads or another shape. Nothing is changed then.
        UnsupportedError: A model wrapped for data parallelism; weights that are computed, shared, quantised or have
            hooks, attention that is not transformers' own; a backend that cannot run, optimiser state that cannot
            be carried; dense patterns to be trained, or a backend, dtype or optimiser that cannot train patterns.
    """
    heads = HeadSet.in_order(heads)
    adapter = editable(model)
    given = pattern_for_each_head(patterns) if len(heads) else []
    if len(given) != len(heads):
        raise InputError(f"{len(heads)} heads need as many patterns, in (layer, head) order; got {len(given)}")
    check_live(adapter, heads)
    _check_output(model, heads, output or {})
    optimizer = unwrap_optimizer(optimizer)
    edits = []
    for layer, site, own in layers_with(adapter, heads):
        new = {head: given[heads.index((layer, head))] for head in own}
        if not trainable and any(pattern.trainable for pattern in new.values()):
            raise InputError("a TrainablePattern trains: pass trainable=True, or pattern.compact() to keep it fixed")
        if trainable:
            new = {head: _trainable(pattern, site) for head, pattern in new.items()}
            check_group(optimizer, rows_of(site, "value").parameter)
        together = patterns_of(site) | new
        layout = site.layout.changed(new, "frozen")
        written = {head: columns for (at, head), columns in (output or {}).items() if at == layer}
        edits.append(plan_edit(site, layout, together, backend=backend, optimizer=optimizer, output=written))
    carry_out_(edits, optimizer)


def _check_output(model: nn.Module, heads: HeadSet, output: Mapping[Head, Tensor]) -> None:
    """Raise InputError unless `output` has columns `[D, C]` of some of `heads`, of their layers' sizes."""
    if strangers := sorted(output.keys() - set(heads)):
        raise InputError(f"output has columns of {strangers}, which are not among the heads to install")
    sites = adapter_for(model).sites()
    for (layer, head), columns in output.items():
        rows = rows_of(sites[layer], "output")
        expected = (sites[layer].head_dim, rows.parameter.shape[1 - rows.dimension])
        if tuple(columns.shape) != expected:
            raise InputError(f"output of head {(layer, head)} must be {list(expected)}; got {list(columns.shape)}")


def pattern_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the key and distance logits that are trained, two parameters `[T]` a head, layer by layer."""
    return [logits for site in adapter_for(model).sites() for logits in trained_logits(patterns_of(site).values())]


def _trainable(pattern: Pattern, site: Site) -> Pattern:
    """Return a pattern as one that is trained, beside the layer's value weights."""
    if pattern.trainable:
        return pattern
    weight = rows_of(site, "value").parameter
    return TrainablePattern.of(pattern, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
