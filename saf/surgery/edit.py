"""One edit of a model in place: planned and checked for every layer first, then carried out without failing.

Installing and undoing differ in the layout and the patterns they ask for, and so would any other edit; the sequence is
the same. A verb checks its arguments, makes the layouts, and calls the two functions below: `plan_edit` checks a layer
and prepares its frozen heads, changing nothing; `carry_out_` moves the rows of its weights with the optimiser's moments
and gradients, keeps those that leave for undoing, and hands the layer its layout. `heads_with_rows` alone says which
heads have rows in which projection.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from saf.adapters import Site, adapter_for
from saf.errors import UnsupportedError
from saf.heads import HeadLayout
from saf.ops import FrozenHeads
from saf.patterns import Pattern, trained_logits
from saf.surgery.optimizer import add_logits_, check_optimizer, drop_logits_, unwrap_optimizer
from saf.surgery.rows import rearrange_, take_rows

Arguments = ParamSpec("Arguments")
Outcome = TypeVar("Outcome")


def editing(function: Callable[Arguments, Outcome]) -> Callable[Arguments, Outcome]:
    """Run an edit outside inference mode, whose tensors could never be trained, and without recording gradients."""

    @wraps(function)
    def edit(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Outcome:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return edit


def check_unwrapped(model: nn.Module) -> None:
    """Raise UnsupportedError for a model in a data-parallel wrapper: it would average gradients of the old shapes."""
    inner: object = model
    while isinstance(inner, nn.Module):
        if isinstance(inner, DistributedDataParallel) or type(inner).__name__ == "FullyShardedDataParallel":
            raise UnsupportedError(
                f"heads cannot be frozen or undone inside {type(inner).__name__}, which has hooks on the parameters as "
                "they are; pass its .module, then wrap that again"
            )
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)


def check_editable(model: nn.Module, optimizer: Any = None) -> None:
    """Raise what an edit of any layer would raise for the model's wrapper and the optimiser, before work is put in."""
    check_unwrapped(model)
    inner = unwrap_optimizer(optimizer)
    for site in adapter_for(model).sites():
        check_optimizer(inner, [parameter for parameter, _ in site.projections().values()])


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


def plan_edit(
    site: Site,
    layout: HeadLayout,
    patterns: Mapping[int, Pattern],
    *,
    backend: str,
    optimizer: torch.optim.Optimizer | None,
) -> LayerEdit:
    """Return the edit that gives a layer another layout, with one pattern for each of its frozen heads.

    Raises:
        InputError: An optimiser that does not hold the layer's weights, or patterns of several lengths.
        UnsupportedError: A layout that the layer cannot execute, a backend that cannot run or train these patterns,
            optimiser state that cannot be carried.
    """
    site.check(layout)
    check_optimizer(optimizer, [parameter for parameter, _ in site.projections().values()])
    frozen = None
    if layout.frozen:
        frozen = FrozenHeads.from_patterns(
            [patterns[head] for head in layout.frozen],
            backend=backend,
            dtype=value_dtypes(site),
            device=site.projections()["value"][0].device,
            kv_head=layout.kv_head,
        )
    before, after = (trained_logits(heads.patterns if heads is not None else ()) for heads in (site.frozen, frozen))
    kept = {id(logits) for logits in before} & {id(logits) for logits in after}
    joining, leaving = ([logits for logits in some if id(logits) not in kept] for some in (after, before))
    return LayerEdit(site, layout, frozen, joining, leaving)


def carry_out_(edits: Iterable[LayerEdit], optimizer: torch.optim.Optimizer | None) -> None:
    """Change layers as planned: rows, moments, gradients, trained logits, layout, and what is kept for undoing."""
    for edit in edits:
        removed = _move_rows_(edit.site, edit.layout, optimizer)
        edit.site.assign(edit.layout, edit.frozen, removed)
        if optimizer is not None and edit.leaving:
            drop_logits_(optimizer, edit.leaving)
        if optimizer is not None and edit.joining:
            add_logits_(optimizer, edit.joining, edit.site.projections()["value"][0])


def heads_with_rows(layout: HeadLayout) -> dict[str, tuple[int, ...]]:
    """Return the heads whose rows a projection holds, in order, by role; other roles stay as they are.

    Frozen heads have no queries. Without grouped queries they have no keys either, and values follow slot order; with
    them keys and values belong to the groups and stay whole.
    """
    if layout.grouped:
        return {"query": layout.live, "output": layout.slots}
    return {"query": layout.live, "key": layout.live, "value": layout.slots, "output": layout.slots}


def _move_rows_(
    site: Site, layout: HeadLayout, optimizer: torch.optim.Optimizer | None
) -> dict[int, Mapping[str, Tensor]]:
    """Rearrange the rows of every projection to a layout; return those kept for undoing, by head, on the CPU."""
    before, after, projections = heads_with_rows(site.layout), heads_with_rows(layout), site.projections()
    removed = {head: dict(rows) for head, rows in site.removed.items()}
    for role, heads in before.items():
        for head in (head for head in heads if head not in after[role]):
            taken = take_rows(*projections[role], heads.index(head), site.head_dim, optimizer)
            removed.setdefault(head, {}).update({f"{role}.{name}": rows for name, rows in taken.items()})
    for role, heads in after.items():
        old = before[role]
        plan = [old.index(head) if head in old else _named(removed[head], role) for head in heads]
        if plan != list(range(len(old))):
            rearrange_(*projections[role], plan, site.head_dim, optimizer)
    return {head: rows for head, rows in removed.items() if head not in layout.live}


def _named(rows: Mapping[str, Tensor], role: str) -> dict[str, Tensor]:
    """Return the rows of one projection, by the names of the weight and its moments."""
    return {name.removeprefix(f"{role}."): t for name, t in rows.items() if name.startswith(f"{role}.")}


def value_dtypes(site: Site) -> tuple[torch.dtype, ...]:
    """Return the dtypes that values may have: the weights' own, and bfloat16 when autocast may lower float32."""
    dtype = site.projections()["value"][0].dtype
    return (dtype, torch.bfloat16) if dtype == torch.float32 else (dtype,)
