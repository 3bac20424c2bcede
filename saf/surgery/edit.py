"""One edit of a model in place: planned and checked for every layer first, then carried out without failing.

Verbs, a file each, differ in the layout and the patterns they ask for; the sequence is the same. A verb checks its
arguments, makes the layouts, and calls the functions below: `layers_with` finds the layers that heads are in;
`plan_edit` checks a layer and prepares its frozen heads, changing nothing; `carry_out_` moves the rows of its weights
with the optimiser's moments and gradients, keeps those that leave for undoing, and hands the layer its layout. Which
heads have rows in which projection is what `saf.heads.KINDS` says of the kind of head that the verb makes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from saf.adapters import Adapter, Removed, Site, adapter_for, rows_of
from saf.adapters.adapter import ON_META, hooked
from saf.adapters.description import check_plain_weights
from saf.errors import InputError, UnsupportedError
from saf.heads import EDITED, HeadLayout, HeadSet, role_of
from saf.machine.processes import in_group
from saf.ops import FrozenHeads
from saf.patterns import Pattern, trained_logits
from saf.surgery.optimizer import (
    add_logits_,
    check_optimizer,
    check_returning,
    drop_logits_,
    head_orders,
    unwrap_optimizer,
)
from saf.surgery.rows import moments, rearrange_, take_rows, write_rows_

Arguments = ParamSpec("Arguments")
Outcome = TypeVar("Outcome")


def editing(function: Callable[Arguments, Outcome]) -> Callable[Arguments, Outcome]:
    """Run an edit of a model, its first argument, outside inference mode and without recording gradients.

    Tensors of inference mode could never be trained. Afterwards optimisers are held to the rows that weights have.
    """

    @wraps(function)
    def edit(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Outcome:
        """Edit the model, then take in the order of its heads."""
        with torch.inference_mode(False), torch.no_grad():
            outcome = function(*args, **kwargs)
        model: Any = args[0] if args else kwargs["model"]
        head_orders.set(_rows_of(adapter_for(model).sites()), unwrap_optimizer(kwargs.get("optimizer")))
        return outcome

    return edit


def _rows_of(sites: Iterable[Site]) -> Iterator[tuple[Tensor, str | None]]:
    """Yield every projection's weight and bias with what its rows are now, None for the order it was made with."""
    for site in sites:
        made = HeadLayout(site.layout.num_heads, site.layout.num_kv_heads)
        for name, (parameter, _) in site.projections().items():
            rows = site.layout.rows_in(name)
            yield parameter, None if rows == made.rows_in(name) else repr(rows)


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
    spans = []
    for name, tensor in chain(
        adapter.model.named_parameters(remove_duplicate=False), adapter.model.named_buffers(remove_duplicate=False)
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


def check_editable(model: nn.Module, optimizer: Any = None) -> None:
    """Raise what an edit of any layer would raise for the model and the optimiser, before work is put in."""
    inner = unwrap_optimizer(optimizer)
    for site in editable(model).sites():
        _check_layer(site, site.layout, inner)


def _check_layer(site: Site, layout: HeadLayout, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise InputError or UnsupportedError for a layer that cannot be given a layout, as `plan_edit` does."""
    site.check(layout)
    check_plain_weights(site)
    _check_hooks(site)
    if rows_of(site, "value").parameter.is_meta:
        raise InputError(ON_META)
    check_optimizer(optimizer, [parameter for parameter, _ in site.projections().values()])


def _check_hooks(site: Site) -> None:
    """Raise UnsupportedError for hooks in a layer, or on its weights, that would find other heads after the edit."""
    found = hooked(site.attention)
    for role, (weight, _) in site.projections().items():
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:
            found = found or f"the {role} weight"
    if found:
        raise UnsupportedError(
            f"hooks on {found} of an attention layer would act on other heads once these are edited: remove them, and "
            "hook the layer instead"
        )


def watch_wrapper_(attention: nn.Module) -> None:
    """Let a layer's next pass in a process group check that the model was wrapped again after the edit."""
    if in_group():
        _forget_wrapper_(attention)
        attention.register_forward_pre_hook(check_wrapper)


def _forget_wrapper_(attention: nn.Module) -> None:
    """Take the check of `watch_wrapper_` out of a layer."""
    for number in [number for number, hook in attention._forward_pre_hooks.items() if hook is check_wrapper]:
        del attention._forward_pre_hooks[number]


def check_wrapper(attention: nn.Module, _: Any) -> None:
    """Check in a pass that a wrapper of several processes knows a layer's edited weights; once it does, no more."""
    if torch.compiler.is_compiling():
        from torch._dynamo.comptime import comptime

        comptime(_check_all_known)  # while the program is made: an edit makes another one
    elif _check_known(attention):
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
    edit has made others, which nothing keeps before the pass.
    """
    trains = attention.training or torch.is_grad_enabled()  # reentrant checkpointing records in the backward pass
    if DistributedDataParallel._get_active_ddp_module() is None or not trains or torch.is_inference_mode_enabled():
        return False
    for weight in attention.parameters():
        if weight.requires_grad and weight.numel() and weight.dim() > 1:
            _gradient_notes(weight)["saf"] = True
            if "saf" not in _gradient_notes(weight):
                raise InputError(
                    "heads were edited, and this DistributedDataParallel from before would not average gradients of "
                    "their weights: wrap the model again (in accelerate prepare_model)"
                )
    return True


def _gradient_notes(weight: Tensor) -> Any:
    """Return the dictionary that goes with the node which accumulates a weight's gradient, as long as that lives."""
    with torch.enable_grad():
        return torch.autograd.graph.get_gradient_edge(weight).node.metadata


@dataclass(frozen=True)
class LayerEdit:
    """Hold a layer's next layout, checked, with what executes its frozen heads."""

    site: Site
    layout: HeadLayout
    frozen: FrozenHeads | None
    joining: list[nn.Parameter]
    """Logits that the optimiser is to train from now on."""
    leaving: list[nn.Parameter]
    """Logits that it no longer trains."""
    output: Mapping[int, Tensor]
    """Output columns `[D, C]` that heads write with from now on; their own are kept for undoing."""


def layers_with(adapter: Adapter, heads: HeadSet) -> Iterator[tuple[int, Site, list[int]]]:
    """Yield number, site and heads of every layer that one of `heads` is in; raise InputError where it has no such."""
    sites = adapter.sites()
    for layer in sorted({layer for layer, _ in heads}):
        own = heads.in_layer(layer)
        if layer >= len(sites):
            raise InputError(f"heads must lie in layers 0 to {len(sites) - 1}; got {(layer, own[0])}")
        if own[-1] >= (count := sites[layer].layout.num_heads):
            raise InputError(f"layer {layer} has heads 0 to {count - 1}; got {own[-1]}")
        yield layer, sites[layer], own


def check_live(adapter: Adapter, heads: HeadSet) -> None:
    """Raise InputError for a head that was edited already."""
    for kind in EDITED:
        if already := (heads & adapter.heads(kind)).to_list():
            raise InputError(f"already {kind}: {already}; uninstall_ them first")


def plan_edit(
    site: Site,
    layout: HeadLayout,
    patterns: Mapping[int, Pattern],
    *,
    backend: str | None = None,
    optimizer: torch.optim.Optimizer | None,
    output: Mapping[int, Tensor] | None = None,
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
            for kept in _returning(site, layout, name, site.removed).values():
                check_returning(optimizer, parameter, own - kept.keys())
    frozen = None
    if backend is None:
        backend = "auto" if site.frozen is None else site.frozen.backend
    if layout.frozen:
        frozen = FrozenHeads.from_patterns(
            [patterns[head] for head in layout.frozen],
            backend=backend,
            dtype=value_dtypes(site),
            device=rows_of(site, "value").parameter.device,
            kv_head=layout.kv_head,
        )
    before, after = (trained_logits(heads.patterns if heads is not None else ()) for heads in (site.frozen, frozen))
    kept = {id(logits) for logits in before} & {id(logits) for logits in after}
    joining, leaving = ([logits for logits in some if id(logits) not in kept] for some in (after, before))
    return LayerEdit(site, layout, frozen, joining, leaving, output or {})


def carry_out_(edits: Iterable[LayerEdit], optimizer: torch.optim.Optimizer | None) -> None:
    """Change layers as planned: rows, moments, gradients, trained logits, layout, and what is kept for undoing."""
    for edit in edits:
        removed = _move_rows_(edit, optimizer)
        edit.site.assign(edit.layout, edit.frozen, removed)
        watch_wrapper_(edit.site.attention)
        if optimizer is not None and edit.leaving:
            drop_logits_(optimizer, edit.leaving)
        if optimizer is not None and edit.joining:
            add_logits_(optimizer, edit.joining, rows_of(edit.site, "value").parameter)


def patterns_of(site: Site) -> dict[int, Pattern]:
    """Return the patterns of a layer's frozen heads, by head."""
    return {} if site.frozen is None else dict(zip(site.layout.frozen, site.frozen.patterns, strict=True))


def absent_rows(before: HeadLayout, after: HeadLayout) -> dict[str, list[int]]:
    """Return whose rows a layout has and another one has not, by role: all of them that differ."""
    found = {role: [one for one in rows if one not in after.rows[role]] for role, rows in before.rows.items()}
    return {role: some for role, some in found.items() if some}


def _move_rows_(edit: LayerEdit, optimizer: torch.optim.Optimizer | None) -> Removed:
    """Rearrange the rows of every projection to a layout; return those kept for undoing, on the CPU.

    What is kept lies by role, whether a projection holds the rows of one role or, fused, of several. Beside rows that
    left these are the output columns that heads had before others took their place.
    """
    site, layout = edit.site, edit.layout
    removed = {role: dict(rows) for role, rows in site.removed.items()}
    for name, (parameter, dimension) in site.projections().items():
        old, new = site.layout.rows_in(name), layout.rows_in(name)
        suffix = name.removeprefix(role_of(name))
        written = edit.output if name == "output" else {}
        for role, one in (row for row in old if row not in new or row[1] in written):
            rows = take_rows(parameter, dimension, old.index((role, one)), site.head_dim, optimizer)
            removed.setdefault(role + suffix, {})[one] = rows
        for head, columns in written.items():
            write_rows_(parameter, dimension, old.index((name, head)), columns)
        back = _returning(site, layout, name, removed)
        plan: list[int | Mapping[str, Tensor]] = [back[row] if row in back else old.index(row) for row in new]
        for role, one in back:
            del removed[role + suffix][one]
        if plan != list(range(len(old))):
            rearrange_(parameter, dimension, plan, site.head_dim, optimizer)
    return {role: rows for role, rows in removed.items() if rows}


def _returning(
    site: Site, layout: HeadLayout, name: str, removed: Removed
) -> dict[tuple[str, int], Mapping[str, Tensor]]:
    """Return the rows kept for undoing that a projection takes back under a layout, by role and head."""
    old, suffix = site.layout.rows_in(name), name.removeprefix(role_of(name))
    return {
        (role, one): removed[role + suffix][one]
        for role, one in layout.rows_in(name)
        if one in removed.get(role + suffix, {}) and ((role, one) not in old or one in layout.live)
    }


def value_dtypes(site: Site) -> tuple[torch.dtype, ...]:
    """Return the dtypes that values may have: the weights' own, and bfloat16 when autocast may lower float32."""
    dtype = rows_of(site, "value").parameter.dtype
    return (dtype, torch.bfloat16) if dtype == torch.float32 else (dtype,)
