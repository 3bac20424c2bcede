"""Moving one attention layer from one head layout to another."""

from dataclasses import replace

import torch

from saf.adapters import Site
from saf.heads import HeadLayout
from saf.ops import FrozenHeads
from saf.patterns import Pattern
from saf.surgery.rows import rearrange_, take_rows


def value_dtypes(site: Site) -> tuple[torch.dtype, ...]:
    """The dtypes that values may have: the weights' own, and bfloat16 when autocast may lower float32."""
    dtype = site.projections()["value"][0].dtype
    return (dtype, torch.bfloat16) if dtype == torch.float32 else (dtype,)


def prepare_heads(site: Site, layout: HeadLayout, patterns: dict[int, Pattern], backend: str) -> FrozenHeads | None:
    """Return the frozen heads of a layout, from one pattern per frozen head id."""
    if not layout.frozen:
        return None
    return FrozenHeads.from_patterns(
        [patterns[head] for head in layout.frozen],
        backend=backend,
        dtype=value_dtypes(site),
        device=site.projections()["value"][0].device,
        kv_head=layout.kv_head,
    )


def change_layout_(
    site: Site,
    frozen: tuple[int, ...],
    heads: FrozenHeads | None,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Give a layer another set of frozen heads: newly frozen rows are kept aside, thawed ones put back.

    Without grouped queries value rows and output columns follow slot order; with them only output columns do, and
    keys stay whole.
    """
    old, new = site.layout, replace(site.layout, frozen=frozen)
    projections = site.projections()
    roles = ("query",) if old.grouped else ("query", "key")
    for head in set(frozen) - set(old.frozen):
        slot = old.slots.index(head)
        site.removed[head] = {
            f"{role}.{name}": rows
            for role in roles
            for name, rows in take_rows(*projections[role], slot, site.head_dim, optimizer).items()
        }
    for role in roles:
        plan = [old.live.index(head) if head in old.live else _named(site.removed[head], role) for head in new.live]
        rearrange_(*projections[role], plan, site.head_dim, optimizer)
    moved = [old.slots.index(head) for head in new.slots]
    if moved != sorted(moved):
        for role in ("output",) if old.grouped else ("value", "output"):
            rearrange_(*projections[role], moved, site.head_dim, optimizer)
    for head in set(old.frozen) - set(frozen):
        site.removed.pop(head, None)
    site.assign(new, heads)


def _named(rows: dict[str, torch.Tensor], role: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(f"{role}."): t for name, t in rows.items() if name.startswith(f"{role}.")}
