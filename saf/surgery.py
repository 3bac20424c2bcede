"""`install_` freezes heads of a model in place, `prune_` removes them, `uninstall_` undoes, `finalize_` makes it final.

Every edit goes the same way: a verb makes the next layout of each layer, `plan_edit` checks it and changes nothing, and
`carry_out_` moves rows of weights, moments and gradients to it. Rows that leave are kept on the CPU for undoing. The
heads that have rows in a projection are those of `saf.heads.KINDS`.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from saf.distributed import in_group
from saf.errors import InputError, UnsupportedError
from saf.heads import EDITED, Head, HeadLayout, HeadSet, role_of
from saf.models.adapter import ON_META, Adapter, Removed, Site, adapter_for, hooked, rows_of
from saf.models.description import check_plain_weights
from saf.ops import FrozenHeads
from saf.optimizer_state import (
    add_logits_,
    check_group,
    check_left_behind,
    check_optimizer,
    check_returning,
    drop_logits_,
    head_orders,
    moments,
    remember_optimizer,
    unwrap_optimizer,
    update_steps_,
)
from saf.patterns import Pattern, TrainablePattern, pattern_for_each_head, trained_logits

Arguments = ParamSpec("Arguments")
Outcome = TypeVar("Outcome")


def editing(function: Callable[Arguments, Outcome]) -> Callable[Arguments, Outcome]:
    """Run an edit of a model, its first argument, outside inference mode and without recording gradients.

    Tensors of inference mode could never be trained. Afterwards optimisers are held to the rows that weights have.
    """

    @wraps(function)
    def edit(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Outcome:
        """Edit the model, then record the order of its heads."""
        with torch.inference_mode(False), torch.no_grad():
            outcome = function(*args, **kwargs)
        model: Any = args[0] if args else kwargs["model"]
        head_orders.set(_rows_by_weight(adapter_for(model).sites()), unwrap_optimizer(kwargs.get("optimizer")))
        return outcome

    return edit


def _rows_by_weight(sites: Iterable[Site]) -> Iterator[tuple[Tensor, str | None]]:
    """Yield every projection's weight and bias with the heads that its rows belong to, None for the original order."""
    for site in sites:
        original = HeadLayout(site.layout.num_heads, site.layout.num_kv_heads)
        for name, (parameter, _) in site.projections().items():
            rows = site.layout.rows_in(name)
            yield parameter, None if rows == original.rows_in(name) else repr(rows)


@editing
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

    Query and key rows of the heads leave the weights and are kept on the CPU until `finalize_`; the optimiser's
    moments and gradients not yet used follow the retained rows exactly. Parameters keep their identity. An optimiser
    that trains the heads' queries or keys but is not passed fails at its next step. Heads that are frozen already keep
    their patterns. A weight that another model shares is changed for that model too, which is not seen here: give each
    a copy first.

    With `trainable` the key and distance logits of these compact patterns become parameters of the model, float32 or
    wider, two `[T]` a head; a `TrainablePattern` is taken as it is. The optimiser trains them with the settings of the
    layer's value weights, but no weight decay and no moments yet; without one, make it afterwards. Fixed and trainable
    heads may share a layer.

    Raises:
        InputError: Heads that do not exist or are not live, a wrong number of patterns, unequal lengths, an
            optimiser that does not hold the model's weights, or a TrainablePattern without `trainable`. Nothing is
            changed then.
        UnsupportedError: A model wrapped for data parallelism; weights that are computed, shared, quantised or have
            hooks, attention that is not transformers' own; a backend that cannot run, optimiser state that cannot
            be carried; dense patterns to be trained, or a backend, dtype or optimiser that cannot train patterns.
    """
    heads = HeadSet.in_order(heads)
    adapter, optimizer = editable(model), unwrap_optimizer(optimizer)
    singles = pattern_for_each_head(patterns) if len(heads) else []
    if len(singles) != len(heads):
        raise InputError(f"{len(heads)} heads need as many patterns, in (layer, head) order; got {len(singles)}")
    _check_live(adapter, heads)
    by_head, edits = dict(zip(heads, singles, strict=True)), []
    for layer, site, own in _layers_with(adapter, heads):
        new = {head: by_head[layer, head] for head in own}
        if trainable:
            new = {head: _trainable(pattern, site) for head, pattern in new.items()}
            check_group(optimizer, rows_of(site, "value").parameter)
        elif any(pattern.trainable for pattern in new.values()):
            raise InputError("a TrainablePattern trains: pass trainable=True, or pattern.compact() to keep it fixed")
        layout = site.layout.changed(new, "frozen")
        edits.append(plan_edit(site, layout, patterns_of(site) | new, backend=backend, optimizer=optimizer))
    carry_out_(edits, optimizer)


@editing
def prune_(model: nn.Module, heads: HeadSet | Iterable[Head], *, optimizer: Optimizer | None = None) -> None:
    """Remove `heads`, changing the model in place: the control that freezing is compared with (paper, section 4).

    Their query, key and value rows and their columns of the output projection leave the weights: the model computes
    what it would with these heads' outputs set to zero. With grouped queries keys go with the last live head of their
    KV group, values with its last head that is not pruned. A layer may lose all its heads, and so may every layer.
    Rows, moments, gradients and optimisers are treated as by `install_`. Before the first update this makes the smaller
    architecture to be trained from initialisation.

    Raises:
        InputError: Heads that do not exist or are not live, an optimiser that does not hold the model's weights.
            Nothing is changed then.
        UnsupportedError: A model wrapped for data parallelism; optimiser state that cannot be carried.
    """
    adapter, heads, optimizer = editable(model), HeadSet(heads), unwrap_optimizer(optimizer)
    _check_live(adapter, heads)
    edits = [
        plan_edit(site, site.layout.changed(own, "pruned"), patterns_of(site), optimizer=optimizer)
        for _, site, own in _layers_with(adapter, heads)
    ]
    carry_out_(edits, optimizer)


@editing
def uninstall_(
    model: nn.Module, heads: HeadSet | Iterable[Head] | None = None, *, optimizer: Optimizer | None = None
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
    adapter, optimizer = editable(model), unwrap_optimizer(optimizer)
    edited = adapter.heads(*EDITED)
    heads = edited if heads is None else HeadSet(heads)
    if strangers := (heads - edited).to_list():
        raise InputError(f"not frozen or pruned: {strangers}; those that are: {edited.to_list()}")
    edits = []
    for layer, site, own in _layers_with(adapter, heads):
        layout = site.layout.changed(own, "live")
        for role, owners in absent_rows(layout, site.layout).items():
            if gone := [owner for owner in owners if owner not in site.removed.get(role, {})]:
                raise InputError(
                    f"the {role} rows of layer {layer}, heads {gone} were not kept; "
                    "undo before finalize_, or load a checkpoint that holds them"
                )
        if optimizer is None:
            check_left_behind(parameter for parameter, _ in site.projections().values())
        edits.append(plan_edit(site, layout, patterns_of(site), optimizer=optimizer))
    carry_out_(edits, optimizer)


def finalize_(model: nn.Module) -> None:
    """Forget the rows kept for undoing; frozen heads stay frozen, and pruned ones are gone."""
    for site in adapter_for(model).sites():
        if site.removed:
            site.assign(site.layout, site.frozen, {})


def pattern_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the key and distance logits that are trained, two parameters `[T]` a head, layer by layer."""
    return [logits for site in adapter_for(model).sites() for logits in trained_logits(patterns_of(site).values())]


def patterns_of(site: Site) -> dict[int, Pattern]:
    """Return the patterns of a layer's frozen heads, by head."""
    return {} if site.frozen is None else dict(zip(site.layout.frozen, site.frozen.patterns, strict=True))


def value_dtypes(site: Site) -> tuple[torch.dtype, ...]:
    """Return the dtypes that values may have: the weights' own, and bfloat16 when autocast may lower float32."""
    dtype = rows_of(site, "value").parameter.dtype
    return (dtype, torch.bfloat16) if dtype == torch.float32 else (dtype,)


def _trainable(pattern: Pattern, site: Site) -> Pattern:
    """Return a pattern as one that is trained, beside the layer's value weights."""
    if pattern.trainable:
        return pattern
    weight = rows_of(site, "value").parameter
    return TrainablePattern.of(pattern, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)


def check_editable(model: nn.Module, optimizer: Any = None) -> None:
    """Raise what an edit of any layer would raise for the model and the optimiser, before work is put in."""
    inner = unwrap_optimizer(optimizer)
    for site in editable(model).sites():
        _check_layer(site, site.layout, inner)


def editable(model: nn.Module) -> Adapter:
    """Return the adapter of a model; raise UnsupportedError where an edit of a layer would reach beyond it.

    That is so in a data-parallel wrapper, which would average gradients of the old shapes, and where an attention
    weight, or its memory, is also that of another layer, role or module.
    """
    inner: object = model
    while isinstance(inner, nn.Module):
        if isinstance(inner, DistributedDataParallel) or type(inner).__name__ == "FullyShardedDataParallel":
            raise UnsupportedError(
                f"heads cannot be edited inside {type(inner).__name__}, which has hooks on the parameters as "
                "they are; pass its .module, then wrap that again"
            )
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
    adapter = adapter_for(model)
    _check_memory(adapter)
    return adapter


def _check_memory(adapter: Adapter) -> None:
    """Raise UnsupportedError where bytes of an attention weight are also those of another parameter or buffer."""
    weights = {id(weight) for site in adapter.sites() for weight, _ in site.projections().values()}
    model, spans = adapter.model, []
    for name, tensor in chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        if type(tensor) in (Tensor, nn.Parameter) and tensor.numel() and not tensor.is_meta:
            reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            first = (str(tensor.device), tensor.data_ptr())
            spans.append((first, (first[0], first[1] + reach * tensor.itemsize), name, id(tensor) in weights))
    # In order of memory, a span overlaps an earlier one where it overlaps the one that reaches furthest.
    end, owner, before = ("", 0), "", False
    for first, last, name, projection in sorted(spans):
        if first < end and (projection or before):
            raise UnsupportedError(
                f"an attention weight must have memory of its own, got one of {owner} and {name}: give each a copy "
                "(nn.Parameter(weight.detach().clone()))"
            )
        if last > end:
            end, owner, before = last, name, projection


def _check_layer(site: Site, layout: HeadLayout, optimizer: Optimizer | None) -> None:
    """Raise InputError or UnsupportedError for a layer that cannot be given a layout."""
    site.check(layout)
    check_plain_weights(site)
    owner = hooked(site.attention)
    for role, (weight, _) in site.projections().items():
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:
            owner = owner or f"the {role} weight"
    if owner:
        raise UnsupportedError(
            f"hooks on {owner} of an attention layer would act on other heads once these are edited: remove them, and "
            "hook the layer instead"
        )
    if rows_of(site, "value").parameter.is_meta:
        raise InputError(ON_META)
    check_optimizer(optimizer, [parameter for parameter, _ in site.projections().values()])


def _check_live(adapter: Adapter, heads: HeadSet) -> None:
    """Raise InputError for a head that was edited already."""
    for kind in EDITED:
        if already := (heads & adapter.heads(kind)).to_list():
            raise InputError(f"already {kind}: {already}; uninstall_ them first")


def _layers_with(adapter: Adapter, heads: HeadSet) -> Iterator[tuple[int, Site, list[int]]]:
    """Yield number, site and heads of every layer that one of `heads` is in; raise InputError where it has no such."""
    sites = adapter.sites()
    for layer in sorted({layer for layer, _ in heads}):
        own = heads.in_layer(layer)
        if layer >= len(sites):
            raise InputError(f"heads must lie in layers 0 to {len(sites) - 1}; got {(layer, own[0])}")
        if own[-1] >= (count := sites[layer].layout.num_heads):
            raise InputError(f"layer {layer} has heads 0 to {count - 1}; got {own[-1]}")
        yield layer, sites[layer], own


@dataclass(frozen=True)
class LayerEdit:
    """Hold a layer's next layout, checked, with what executes its frozen heads."""

    site: Site
    layout: HeadLayout
    frozen: FrozenHeads | None
    joining: list[nn.Parameter]
    """Logits that the optimiser trains from now on."""
    leaving: list[nn.Parameter]
    """Logits that it no longer trains."""


def plan_edit(
    site: Site,
    layout: HeadLayout,
    patterns: Mapping[int, Pattern],
    *,
    backend: str | None = None,
    optimizer: Optimizer | None,
) -> LayerEdit:
    """Return the edit that gives a layer another layout, with one pattern for each of its frozen heads.

    Without `backend` they stay with the one that the layer has.

    Raises:
        InputError: An optimiser that does not hold the layer's weights, or patterns of several lengths.
        UnsupportedError: A layout that the layer cannot execute, a backend that cannot run or train these patterns,
            optimiser state that cannot be carried.
    """
    _check_layer(site, layout, optimizer)
    if optimizer is not None:
        for name, (parameter, _) in site.projections().items():
            own = moments(parameter, optimizer).keys()
            for rows in _returning(layout, name, site.removed).values():
                check_returning(optimizer, parameter, own - rows.keys())
    frozen = None
    if layout.frozen:
        frozen = FrozenHeads.from_patterns(
            [patterns[head] for head in layout.frozen],
            backend=backend or ("auto" if site.frozen is None else site.frozen.backend),
            dtype=value_dtypes(site),
            device=rows_of(site, "value").parameter.device,
            kv_head=layout.kv_head,
        )
    before, after = (trained_logits(heads.patterns if heads is not None else ()) for heads in (site.frozen, frozen))
    staying = {id(logits) for logits in before} & {id(logits) for logits in after}
    joining, leaving = ([logits for logits in some if id(logits) not in staying] for some in (after, before))
    return LayerEdit(site, layout, frozen, joining, leaving)


def carry_out_(edits: Sequence[LayerEdit], optimizer: Optimizer | None) -> None:
    """Change layers as planned: rows, moments, gradients, trained logits, layout, and what is kept for undoing."""
    for edit in edits:
        removed = _move_rows_(edit, optimizer)
        edit.site.assign(edit.layout, edit.frozen, removed)
        if optimizer is not None and edit.leaving:
            drop_logits_(optimizer, edit.leaving)
        if optimizer is not None and edit.joining:
            add_logits_(optimizer, edit.joining, rows_of(edit.site, "value").parameter)
    watch_wrappers_([edit.site.attention for edit in edits])


def absent_rows(before: HeadLayout, after: HeadLayout) -> dict[str, list[int]]:
    """Return the heads whose rows one layout has and the other one has not, by role."""
    absent = {role: [one for one in rows if one not in after.rows[role]] for role, rows in before.rows.items()}
    return {role: heads for role, heads in absent.items() if heads}


def _move_rows_(edit: LayerEdit, optimizer: Optimizer | None) -> Removed:
    """Rearrange the rows of every projection to a layout; return those kept for undoing, on the CPU.

    These are stored by role, whether a projection holds the rows of one role or, fused, of several.
    """
    site, layout = edit.site, edit.layout
    removed = {role: dict(rows) for role, rows in site.removed.items()}
    for name, (parameter, dimension) in site.projections().items():
        old, new = site.layout.rows_in(name), layout.rows_in(name)
        suffix = name.removeprefix(role_of(name))
        for role, one in (row for row in old if row not in new):
            rows = _take_rows(parameter, dimension, old.index((role, one)), site.head_dim, optimizer)
            removed.setdefault(role + suffix, {})[one] = rows
        back = _returning(layout, name, removed)
        plan: list[int | Mapping[str, Tensor]] = [back[row] if row in back else old.index(row) for row in new]
        for role, one in back:
            del removed[role + suffix][one]
        if plan != list(range(len(old))):
            _rearrange_(parameter, dimension, plan, site.head_dim, optimizer)
    return {role: rows for role, rows in removed.items() if rows}


def _returning(layout: HeadLayout, name: str, removed: Removed) -> dict[tuple[str, int], Mapping[str, Tensor]]:
    """Return the rows kept for undoing that a projection takes back under a layout, by role and head."""
    suffix = name.removeprefix(role_of(name))
    return {
        (role, one): removed[role + suffix][one]
        for role, one in layout.rows_in(name)
        if one in removed.get(role + suffix, {})
    }


def _take_rows(
    parameter: Tensor, dimension: int, slot: int, head_dim: int, optimizer: Optimizer | None
) -> dict[str, Tensor]:
    """Return copies on the CPU of one slot's weight rows and moments, by name."""
    tensors = {"weight": parameter.data, **moments(parameter, optimizer)}
    return {
        name: tensor.narrow(dimension, slot * head_dim, head_dim).detach().to("cpu", copy=True)
        for name, tensor in tensors.items()
    }


Plan = Sequence[int | Mapping[str, Tensor]]
"""For each head of the result: the old slot it comes from, or rows to put back, by name (`weight`, moments)."""


def _rearrange_(parameter: Tensor, dimension: int, plan: Plan, head_dim: int, optimizer: Optimizer | None) -> None:
    """Rebuild the head rows of a parameter, its moments and its gradient by a plan.

    Rows to put back that lack a moment (frozen before the optimiser's first step) get zeros, as do their gradients.
    """
    head_orders.moved[parameter] = True
    if optimizer is not None:
        remember_optimizer(parameter, optimizer)
        if not parameter.numel():
            update_steps_(parameter, optimizer)
        for name, old in moments(parameter, optimizer).items():
            optimizer.state[parameter][name] = _rebuilt(old, dimension, plan, head_dim, name)
    gradient = parameter.grad
    replace_data_(parameter, _rebuilt(parameter.data, dimension, plan, head_dim, "weight"))
    if gradient is not None and parameter.numel():  # a forward pass gives an empty weight none either
        parameter.grad = _rebuilt(gradient.detach(), dimension, plan, head_dim, "gradient")


def replace_data_(parameter: Tensor, data: Tensor) -> None:
    """Give a parameter other data, perhaps of another shape, and no gradient; it stays the same object.

    A graph that is still alive (a loss kept in a variable) keeps the node that accumulates the parameter's gradient,
    with the old shape. PyTorch forgets that node when the dtype changes, so the data passes through another one.
    An open autocast context would go on with the old data's cast, so its cache is emptied.
    """
    other = torch.float32 if data.dtype == torch.float64 else torch.float64
    parameter.data = data.new_empty(0, dtype=other)
    parameter.data = data
    parameter.grad = None
    torch.clear_autocast_cache()


def _rebuilt(old: Tensor, dimension: int, plan: Plan, head_dim: int, name: str) -> Tensor:
    """Return a tensor whose head rows are those of the plan, in its order."""
    shape = list(old.shape)
    shape[dimension] = head_dim
    parts = []
    for item in plan:
        if isinstance(item, int):
            parts.append(old.narrow(dimension, item * head_dim, head_dim))
        else:
            parts.append(item[name].to(old) if name in item else old.new_zeros(shape))
    if not parts:
        shape[dimension] = 0
        return old.new_empty(shape)
    return torch.cat(parts, dim=dimension)


_outdated: "WeakSet[nn.Module]" = WeakSet()
"""Data-parallel wrappers that are older than an edit of their model: they do not average its new gradients."""


def watch_wrappers_(layers: Sequence[nn.Module]) -> None:
    """Let the next passes of edited layers in a process group check that the model was wrapped again after the edit."""
    if not in_group() or not layers:
        return
    for each in gc.get_objects():
        if issubclass(type(each), DistributedDataParallel) and any(one is layers[0] for one in each.modules()):
            _outdated.add(each)
    for attention in layers:
        _forget_wrapper_(attention)
        attention.register_forward_pre_hook(check_wrapper)


def renewed_(wrapper: nn.Module) -> None:
    """Accept a wrapper whose buckets of gradients were made anew after the edits, in the same object."""
    _outdated.discard(wrapper)


def _forget_wrapper_(attention: nn.Module) -> None:
    """Take the check of `watch_wrappers_` out of a layer."""
    for number in [number for number, hook in attention._forward_pre_hooks.items() if hook is check_wrapper]:
        del attention._forward_pre_hooks[number]


def check_wrapper(attention: nn.Module, _: Any) -> None:
    """Check in a pass that a wrapper of several processes knows a layer's edited weights; then no more, if it may."""
    if torch.compiler.is_compiling():
        from torch._dynamo.comptime import comptime

        comptime(_check_all_known)  # while the program is made: an edit makes another one
    elif _check_known(attention) and not len(_outdated):
        _forget_wrapper_(attention)


def _check_all_known(_: Any) -> None:
    """Check every edited layer of the wrapper whose pass is compiled."""
    wrapper = DistributedDataParallel._get_active_ddp_module()
    for module in () if wrapper is None else wrapper.modules():
        if check_wrapper in module._forward_pre_hooks.values():
            _check_known(module)


def _check_known(attention: nn.Module) -> bool:
    """Return whether a layer trains in a pass of DistributedDataParallel that averages its weights' gradients.

    Raises InputError for a wrapper from before an edit. With `find_unused_parameters` it takes edited weights for
    unused, and processes drift apart. A wrapper keeps the nodes that accumulate gradients of its parameters alive; an
    edit has made others, which nothing but a newer wrapper keeps before the pass.
    """
    wrapper = DistributedDataParallel._get_active_ddp_module()
    trains = attention.training or torch.is_grad_enabled()  # reentrant checkpointing records in the backward pass
    if wrapper is None or not trains or torch.is_inference_mode_enabled():
        return False
    for weight in attention.parameters():
        if weight.requires_grad and weight.numel() and weight.dim() > 1:
            _gradient_metadata(weight)["saf"] = True
            if wrapper in _outdated or "saf" not in _gradient_metadata(weight):
                raise InputError(
                    "heads were edited, and this DistributedDataParallel from before would not average gradients of "
                    "their weights: wrap the model again (in accelerate prepare_model)"
                )
    return True


def _gradient_metadata(weight: Tensor) -> Any:
    """Return the dictionary that goes with the node which accumulates a weight's gradient, as long as that lives."""
    with torch.enable_grad():
        return torch.autograd.graph.get_gradient_edge(weight).node.metadata
