"""`install_` freezes heads of a model in place and `prune_` removes them; `uninstall_` undoes both until `finalize_`.

The first three share their steps: they compute the next layout of each layer, `plan_edit` checks it and changes
nothing, and `apply_edits_` moves rows of weights, moments and gradients. Removed rows stay on the CPU for undoing.
`saf.heads.KINDS` lists which heads have rows in which projection; saf/optimizer_state.py has the optimiser's side.
"""

import gc
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, combinations
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from saf.distributed import in_group
from saf.errors import InputError, UnsupportedError
from saf.heads import BIAS, EDITED, KINDS, Head, HeadLayout, HeadSet, head_pairs
from saf.models.adapter import ON_META, Adapter, Removed, Site, adapter_for, check_unsharded, rows_of
from saf.ops import FrozenHeads
from saf.optimizer_state import (
    add_logits_,
    check_can_add_logits,
    check_missing_state,
    check_optimizer,
    copy_step_count_,
    drop_logits_,
    moments,
    record_orders,
    unwrap_optimizer,
)
from saf.patterns import Pattern, TrainablePattern, is_trainable, pattern_for_each_head

# --- the verbs; they leave inference mode, as tensors created in it could never be trained


@torch.inference_mode(False)
@torch.no_grad()
def install_(
    model: nn.Module,
    heads: HeadSet | Iterable[Head],
    patterns: Pattern | Sequence[Pattern],
    *,
    optimizer: Optimizer | None = None,
    backend: str = "auto",
    trainable: bool = False,
) -> None:
    """Replace the attention of `heads` by fixed `patterns` in (layer, head) order, changing the model in place.

    Query and key rows of the heads leave the weights and stay on the CPU until `finalize_`; the optimiser's moments
    and unused gradients follow the retained rows exactly. Parameters stay the same objects. An optimiser that trains
    the heads' queries or keys but is not passed fails at its next step. Heads that are frozen already stay frozen.

    With `trainable` the key and distance logits of these compact patterns become parameters of the model, float32 or
    wider, two `[T]` a head. The optimiser trains them with the settings of the layer's value weights, without weight
    decay or moments; if there is no optimiser yet, make it afterwards. Fixed and trainable heads may share a layer.

    Raises:
        InputError: Heads that do not exist or are not live, a wrong number of patterns, unequal lengths, an
            optimiser that does not hold the model's weights, or a TrainablePattern without `trainable`.
        UnsupportedError: A data-parallel wrapper; weights that are computed, shared, quantised or have hooks;
            attention that is not transformers' own; a backend, dtype or optimiser that cannot run, train or carry them.
    """
    pairs = head_pairs(heads)
    heads = HeadSet(pairs)
    if list(heads) != pairs:  # sorted without a word, heads would get each other's patterns
        raise InputError(f"heads and patterns must be in (layer, head) order; got {pairs}, sort both")
    by_head = pattern_for_each_head(patterns) if len(heads) else []
    sites, optimizer = _sites_of(model, heads, "live"), unwrap_optimizer(optimizer)
    if len(by_head) != len(heads):
        raise InputError(f"{len(heads)} heads need as many patterns, in (layer, head) order; got {len(by_head)}")
    chosen: dict[Head, Pattern] = {}
    # All that can fail comes before the first layer is edited: an error leaves the model as it was.
    for (layer, head), pattern in zip(heads, by_head, strict=True):
        if trainable:
            weight = rows_of(sites[layer], "value").parameter
            check_can_add_logits(optimizer, weight)
            if not pattern.trainable:
                dtype = torch.promote_types(weight.dtype, torch.float32)  # 16 bits would round small updates away
                pattern = TrainablePattern.of(pattern, dtype=dtype, device=weight.device)
        elif pattern.trainable:
            raise InputError("a TrainablePattern trains: pass trainable=True, or pattern.compact() for a fixed one")
        chosen[layer, head] = pattern
    _edit_(sites, heads, "frozen", optimizer, chosen, backend=backend)


@torch.inference_mode(False)
@torch.no_grad()
def prune_(model: nn.Module, heads: HeadSet | Iterable[Head], *, optimizer: Optimizer | None = None) -> None:
    """Remove `heads`, changing the model in place: the control that freezing is compared with (paper, section 4).

    Their query, key and value rows and their columns of the output projection leave the weights: the model computes
    as with these heads' outputs set to zero. With grouped queries, keys go with the last live head of their KV group,
    values with its last head that is not pruned. A layer may lose all its heads, and so may every layer. Moments,
    gradients and errors are those of `install_`. On an untrained model this builds the smaller architecture.
    """
    heads = HeadSet(heads)
    _edit_(_sites_of(model, heads, "live"), heads, "pruned", unwrap_optimizer(optimizer))


@torch.inference_mode(False)
@torch.no_grad()
def uninstall_(
    model: nn.Module, heads: HeadSet | Iterable[Head] | None = None, *, optimizer: Optimizer | None = None
) -> None:
    """Make frozen and pruned heads (all of them by default) live again, in place.

    Removed rows and their moments return as they were when removed; trainable patterns of these heads leave the
    optimiser; everything else stays as trained since.

    Raises:
        InputError: A head that is neither frozen nor pruned, or whose rows are gone (after `finalize_`, or because the
            model was loaded without them).
        UnsupportedError: As for `install_`.
    """
    # Frozen and pruned heads may return in one edit, in any order: each has rows of its own in `Site.removed`.
    heads = adapter_for(model).heads(*EDITED) if heads is None else HeadSet(heads)
    _edit_(_sites_of(model, heads, *EDITED), heads, "live", unwrap_optimizer(optimizer))


def finalize_(model: nn.Module) -> None:
    """Discard the rows for undoing; frozen heads stay frozen, and pruned ones are gone."""
    # Trained logits stay parameters, and the optimiser keeps them.
    for site in adapter_for(model).sites():
        if site.removed:
            site.assign(site.layout, site.frozen, {})


# --- the patterns of a layer


def pattern_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained key and distance logits, two parameters `[T]` a head, layer by layer."""
    return [logits for site in adapter_for(model).sites() for logits in _logits_of(site)]


def _logits_of(site: Site) -> dict[nn.Parameter, None]:
    """Return the trained logits of a layer, as an ordered set."""
    # Keys of a dictionary are compared by identity first; `in` of a list would compare tensors element by element.
    trained = (pattern for pattern in patterns_of(site).values() if is_trainable(pattern))
    return dict.fromkeys(logits for pattern in trained for logits in pattern.parameters())


def patterns_of(site: Site) -> dict[int, Pattern]:
    """Return the patterns of a layer's frozen heads, by head."""
    return {} if site.frozen is None else dict(zip(site.layout.frozen, site.frozen.patterns, strict=True))


def values_of(site: Site) -> tuple[torch.device, tuple[torch.dtype, ...]]:
    """Return the device of a layer's values and their dtypes: the weights' own, and bfloat16 too for float32."""
    # Under autocast values are in bfloat16. Tables of both dtypes are built when heads are installed, and a forward
    # pass in a dtype without any is an error.
    weight = rows_of(site, "value").parameter
    return weight.device, (weight.dtype, torch.bfloat16) if weight.dtype == torch.float32 else (weight.dtype,)


# --- what can be edited


def check_editable(model: nn.Module, optimizer: Any = None) -> Adapter:
    """Return the adapter of a model; raise now what an edit of any layer would raise about model and optimiser."""
    adapter, inner = editable(model), unwrap_optimizer(optimizer)
    for site in adapter.sites():
        _check_layer(site, site.layout, inner)
    return adapter


def editable(model: nn.Module) -> Adapter:
    """Return the adapter of a model; raise UnsupportedError where an edit would reach beyond its layer.

    A data-parallel wrapper would average gradients of the old shapes, and an attention weight may share its memory
    with another layer, role or module of the model.
    """
    inner: object = model
    while isinstance(inner, nn.Module):
        if isinstance(inner, DistributedDataParallel) or type(inner).__name__ == "FullyShardedDataParallel":
            raise UnsupportedError(
                f"heads cannot be edited inside {type(inner).__name__}, which has hooks on the present parameters; "
                "pass its .module, then wrap that again"
            )
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
    adapter = adapter_for(model)
    _check_memory(adapter)
    return adapter


def _check_memory(adapter: Adapter) -> None:
    """Raise UnsupportedError where an attention weight shares memory with another parameter or buffer."""
    weights = {id(weight) for site in adapter.sites() for weight, _ in site.projections().values()}
    model, spans = adapter.model, defaultdict[int, list[tuple[int, int, str, bool]]](list)
    for name, tensor in chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        if type(tensor) in (Tensor, nn.Parameter) and tensor.numel() and not tensor.is_meta:
            # From its first to its last element, in bytes: parameters of one flat buffer share a storage, not memory.
            reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            first = tensor.data_ptr()
            span = first, first + reach * tensor.itemsize, name, id(tensor) in weights
            spans[tensor.untyped_storage().data_ptr()].append(span)
    for sharing in spans.values():
        for (first, end, name, own), (other_first, other_end, other, others) in combinations(sharing, 2):
            if (own or others) and first < other_end and other_first < end:
                raise UnsupportedError(
                    f"an attention weight must have memory of its own, got one of {name} and {other}: give each a copy "
                    "(nn.Parameter(weight.detach().clone()))"
                )


def _check_layer(site: Site, layout: HeadLayout, optimizer: Optimizer | None) -> None:
    """Raise InputError or UnsupportedError for a layer that cannot take a layout."""
    site.check(layout)
    check_plain_weights(site)
    _check_no_hooks(site)
    if rows_of(site, "value").parameter.is_meta:
        raise InputError(ON_META)
    check_optimizer(optimizer, [parameter for parameter, _ in site.projections().values()])


def _check_no_hooks(site: Site) -> None:
    """Raise UnsupportedError for hooks on a layer's projections or weights: after an edit they get reordered heads."""
    # PyTorch has no public list of the hooks of a module or a tensor.
    owners = []
    for name, each in site.attention.named_modules():
        hooks = (each._forward_hooks, each._forward_pre_hooks, each._backward_hooks, each._backward_pre_hooks)
        if name and each._parameters and any(hooks):
            owners.append(name)
    for role, (weight, _) in site.projections().items():
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:
            owners.append(f"the {role} weight")
    if owners:
        raise UnsupportedError(
            f"hooks on {owners[0]} of an attention layer would act on other heads after an edit: remove them, and hook "
            "the layer instead"
        )


def check_plain_weights(site: Site) -> None:
    """Raise UnsupportedError for projections whose weights are not plain parameters of their modules.

    Rows of quantised and sharded weights cannot be moved. Weights that a forward pass computes (`torch.nn.utils.prune`,
    `weight_norm`) would return in the old order of heads.
    """
    own = {id(parameter) for module in site.attention.modules() for parameter in module._parameters.values()}
    # By `type`, not isinstance: subclasses of Parameter hold quantised numbers.
    for role, (weight, _) in site.projections().items():
        check_unsharded(role, weight)  # first, as its remedy is another one
        if type(weight) is not nn.Parameter or id(weight) not in own:
            raise UnsupportedError(
                f"weights of a layer's {role} must be a parameter of its own, got {type(weight).__name__}: freeze and "
                "save before weights are quantised, after pruning masks and weight norms are removed"
            )


def _sites_of(model: nn.Module, heads: HeadSet, *kinds: str) -> dict[int, Site]:
    """Return the layers that have some of `heads`, by number; raise InputError for heads that are not of `kinds`."""
    adapter = editable(model)
    sites = adapter.sites()
    if unknown := heads - adapter.heads(*KINDS):
        limits = f"in {len(sites)} layers of {sites[0].layout.num_heads} heads"
        raise InputError(f"heads must exist, {limits}; got {unknown.to_list()}")
    if other := heads - adapter.heads(*kinds):
        remedy = ", uninstall_ the others first" if kinds == ("live",) else ""
        raise InputError(f"heads must be {' or '.join(kinds)}, got {other.to_list()}{remedy}")
    return {layer: sites[layer] for layer in sorted({layer for layer, _ in heads})}


# --- an edit of a layer, checked first and applied afterwards


class LayerEdit(NamedTuple):
    """The checked next layout of a layer, and its frozen heads."""

    site: Site
    layout: HeadLayout
    frozen: FrozenHeads | None


def _edit_(
    sites: Mapping[int, Site],
    heads: HeadSet,
    kind: str,
    optimizer: Optimizer | None,
    patterns: Mapping[Head, Pattern] | None = None,
    backend: str | None = None,
) -> None:
    """Turn heads into those of `kind`, frozen ones with `patterns`. An error leaves every layer as it was."""
    edits = []
    for layer, site in sites.items():
        own = heads.in_layer(layer)
        new = patterns_of(site) | {head: patterns[layer, head] for head in own if patterns}
        edits.append(plan_edit(site, site.layout.with_kind(own, kind), new, backend=backend, optimizer=optimizer))
    apply_edits_(edits, optimizer)


def plan_edit(
    site: Site,
    layout: HeadLayout,
    patterns: Mapping[int, Pattern],
    *,
    backend: str | None = None,
    optimizer: Optimizer | None,
) -> LayerEdit:
    """Return the edit that gives a layer another layout, with one pattern for each of its frozen heads.

    Without `backend` the layer's own stays. Raises InputError for missing rows of heads that return, InputError or
    UnsupportedError where the layer, the backend or the optimiser cannot take the edit.
    """
    _check_layer(site, layout, optimizer)
    for name, (parameter, _) in site.projections().items():
        suffix = BIAS if name.endswith(BIAS) else ""
        for role, head in set(layout.rows_in(name)) - set(site.layout.rows_in(name)):
            if (saved := site.removed.get(role + suffix, {}).get(head)) is None:
                remedy = "undo before finalize_, or load a checkpoint that has them"
                raise InputError(f"the {role} rows of head {head} are gone; {remedy}")
            check_missing_state(parameter, optimizer, saved)
    frozen = None
    if layout.frozen:
        device, dtypes = values_of(site)
        backend = backend or ("auto" if site.frozen is None else site.frozen.backend)
        ordered = [patterns[head] for head in layout.frozen]
        frozen = FrozenHeads.from_patterns(
            ordered, backend=backend, dtype=dtypes, device=device, kv_head=layout.kv_head
        )
    return LayerEdit(site, layout, frozen)


def apply_edits_(edits: Sequence[LayerEdit], optimizer: Optimizer | None) -> None:
    """Move rows, moments and gradients of layers as planned, with trained logits and the rows for undoing."""
    for edit in edits:
        removed, before = _move_rows_(edit, optimizer), _logits_of(edit.site)
        edit.site.assign(edit.layout, edit.frozen, removed)
        # Logits of trained heads that stay are the same parameters in the new layout, with their moments.
        if optimizer is not None:
            after = _logits_of(edit.site)
            drop_logits_(optimizer, [logits for logits in before if logits not in after])
            joining = [logits for logits in after if logits not in before]
            add_logits_(optimizer, joining, rows_of(edit.site, "value").parameter)
    record_edit([edit.site for edit in edits], optimizer)


def record_edit(sites: Sequence[Site], optimizer: Optimizer | None = None) -> None:
    """Record the order of heads in edited layers, so that optimisers and wrappers of the old order refuse to train."""
    rows: dict[Tensor, str | None] = {}
    for site in sites:
        original = HeadLayout(site.layout.num_heads, site.layout.num_kv_heads)
        for name, (parameter, _) in site.projections().items():
            order = site.layout.rows_in(name)
            rows[parameter] = None if order == original.rows_in(name) else repr(order)
    record_orders(rows, optimizer)
    if in_group() and sites:
        # Objects from before gc.freeze() are not listed by the collector, and an outdated wrapper would never be freed.
        gc.unfreeze()
        for each in gc.get_objects():
            wrapper = issubclass(type(each), DistributedDataParallel) and each not in _outdated
            if wrapper and sites[0].attention in each.modules():
                _outdated[each] = each.register_forward_pre_hook(_refuse_training)


def _move_rows_(edit: LayerEdit, optimizer: Optimizer | None) -> Removed:
    """Rearrange the head rows of every projection, its moments and its gradient; return removed rows, on the CPU.

    Removed rows are stored by role, even where one fused projection holds the rows of several roles.
    """
    site = edit.site
    removed = {role: dict(rows) for role, rows in site.removed.items()}
    for name, (parameter, dimension) in site.projections().items():
        old, new, suffix = site.layout.rows_in(name), edit.layout.rows_in(name), BIAS if name.endswith(BIAS) else ""
        if old == new:
            continue
        carried = {"weight": parameter.data, **moments(parameter, optimizer)}
        tensors = carried if parameter.grad is None else {**carried, "gradient": parameter.grad.detach()}
        # The rows of each head. Not strict: a tensor without rows splits into one empty part, of no head.
        blocks = {
            key: dict(zip(old, tensor.split(site.head_dim, dimension), strict=False)) for key, tensor in tensors.items()
        }
        for role, head in (row for row in old if row not in new):
            # Copies, also of a model on the CPU: a view would keep the whole old weight in memory.
            rows = {key: blocks[key][role, head].detach().to("cpu", copy=True) for key in carried}
            removed.setdefault(role + suffix, {})[head] = rows
        for role, head in (row for row in new if row not in old):
            rows = removed[role + suffix].pop(head)
            # Rows have no moments if they left before the optimiser's first step, and never a gradient.
            for key, tensor in tensors.items():
                blocks[key][role, head] = rows.get(key, torch.zeros_like(rows["weight"])).to(tensor)
        if optimizer is not None and not parameter.numel():
            copy_step_count_(parameter, optimizer)
        values = {}
        for key, tensor in tensors.items():
            empty = tensor.narrow(dimension, 0, 0)  # in case that no row is left: `cat` takes no empty list
            values[key] = torch.cat([empty, *(blocks[key][row] for row in new)], dim=dimension)
        replace_data_(parameter, values.pop("weight"))
        gradient = values.pop("gradient", None)
        if parameter.numel():  # a forward pass gives an empty weight no gradient either
            parameter.grad = gradient
        if optimizer is not None and values:
            optimizer.state[parameter].update(values)
    return {role: rows for role, rows in removed.items() if rows}


def replace_data_(parameter: Tensor, data: Tensor) -> None:
    """Give a parameter other data, perhaps of another shape, and no gradient; it stays the same object."""
    # A graph that is still alive (a loss in a variable) holds the node that accumulates the parameter's gradient, with
    # the old shape. PyTorch drops that node when the dtype changes, so the data passes through another one.
    other = torch.float32 if data.dtype == torch.float64 else torch.float64
    parameter.data = data.new_empty(0, dtype=other)
    parameter.data = data
    parameter.grad = None
    torch.clear_autocast_cache()  # an open autocast context would go on with the old data's cast


# --- data-parallel wrappers from before an edit, which would not average the gradients of edited weights

_outdated: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()


def _refuse_training(_: nn.Module, __: Any) -> None:
    # With find_unused_parameters such a wrapper takes edited weights for unused, and processes diverge.
    if torch.is_grad_enabled():
        raise InputError(
            "heads were edited, and this DistributedDataParallel from before would not average their gradients: wrap "
            "the model again (in accelerate prepare_model)"
        )


def accept_wrapper(wrapper: nn.Module) -> None:
    """Let a data-parallel wrapper train again: its gradient buckets were rebuilt after the edits."""
    if (handle := _outdated.pop(wrapper, None)) is not None:
        handle.remove()
