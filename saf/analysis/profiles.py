"""How heads spread their attention: entropy, recent keys, largest weight, first token (paper, appendix A.3)."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from saf.adapters import Site, adapter_for
from saf.analysis.model import SILENT, ModelSettings, Record, Watch
from saf.arguments import at_least
from saf.calibration import latter_half
from saf.calibration.capture import Batch, evaluation_mode, read_batches
from saf.errors import InputError
from saf.heads import Head, HeadSet
from saf.ops.live import capped, score_scale
from saf.records import paper
from saf.records.quantities import number
from saf.records.table import Part, Table
from saf.settings import documented

PROFILES = ("entropy", "local_mass", "largest", "first_token")
LOCAL = 64
"""Keys that count as recent, the query's own included (paper, appendix A.3)."""


@documented
@dataclass(frozen=True, kw_only=True)
class Profiles(ModelSettings):
    """Measure how heads spread their attention, selected heads against unselected ones of the same layers."""

    selected: tuple[Head, ...] = ()
    """Heads to compare with the others; on the command line 0:3 1:11 or a file: JSON pairs, or events.jsonl."""
    windows: Annotated[int, at_least(1)] = 128
    """Windows of the controller partition to measure on."""


def measure(settings: Profiles, watch: Watch = SILENT) -> dict[str, Any]:
    """Measure, and return the record."""
    opened = settings.open()
    chosen = HeadSet(settings.selected)
    if len(chosen):
        layer_matched(blank(adapter_for(opened.model).sites()), chosen)  # raises now what it would raise afterwards
    with opened.autocast:
        windows = opened.windows(settings.windows)[:, :-1]
        progress = watch.countdown("windows", len(windows))
        found = attention_profiles(opened.model, windows.split(settings.batch_size), progress=progress)
    matched = {name: layer_matched(values, chosen) for name, values in found.items()} if len(chosen) else {}
    values = {"windows": len(windows), "profiles": found, "selected": chosen.to_list(), "matched": matched}
    return opened.record("profiles", values)


def tables(record: Record) -> list[Part]:
    """Return how selected and other heads spread their attention."""
    rows = []
    for name, values in record["profiles"].items():
        known = [value for row in values for value in row if value is not None]
        cells = [sum(known) / len(known) if known else None, *(record["matched"].get(name) or (None, None))]
        beside = paper.PROFILES.get(name) or (None, None)
        rows.append([name.replace("_", " "), *map(number, cells), *beside])
    head = ["profile", "all heads", "selected", "unselected, layer-matched", "paper, selected", "paper, unselected"]
    return [
        f"How heads spread their attention: {record['windows']} windows of {record['length']:,} tokens, "
        f"{len(record['selected'])} heads selected.",
        Table.of("", head, rows, notes=paper.notes(paper.SELECTION_TEXT)).used(),
    ]


def attention_profiles(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    positions: Sequence[int] | None = None,
    local: int = LOCAL,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Tensor]:
    """Return each head's mean over sequences and query positions, `[L, H]` float64; NaN for frozen heads.

    It is NaN for heads of layers that stay ordinary, too. `entropy` is divided by the logarithm of the number of keys,
    `local_mass` is the weight of the last `local` keys, the query's own included, `largest` the largest weight,
    `first_token` the first key's.

    Args:
        model: A supported model, run in evaluation mode and left as it was.
        batches: LongTensors `[B, T]` of token ids, or mappings with `input_ids`; one T.
        positions: Query positions, from 1 on; 64, evenly over the latter half of T, if not given.
        local: How many keys count as recent.
        progress: Called after each batch with how many sequences are done.

    Raises:
        InputError: Batches that cannot be used, positions outside [1, T), or `local` below 1.
    """
    adapter = adapter_for(model)
    ids = read_batches(batches)
    length = ids[0].shape[1]
    rows = list(latter_half(length) if positions is None else positions)
    if local < 1:
        raise InputError(f"local is a number of keys, at least the query's own; got {local}")
    if not rows or not all(1 <= row < length for row in rows):
        raise InputError(f"query positions lie in [1, {length}), where entropy means something; got {rows}")
    sites = adapter.sites()
    total = blank(sites).repeat(len(PROFILES), 1, 1)

    def sink(layer: int, site: Site, query: Tensor, key: Tensor) -> None:
        found = torch.stack([_profile(q, k, site, rows, local) for q, k in zip(query, key, strict=True)])
        total[:, layer, list(site.layout.live)] += found.sum(0).cpu()

    with torch.no_grad(), evaluation_mode(model), ExitStack() as stack:
        for layer, site in enumerate(sites):
            if site.stays_ordinary is not None:
                continue
            stack.enter_context(site.capture(lambda query, key, layer=layer, site=site: sink(layer, site, query, key)))
        for number, batch in enumerate(ids, 1):
            adapter.run(batch.to(adapter.device))
            if progress is not None:
                progress(sum(map(len, ids[:number])))
    return dict(zip(PROFILES, total / (sum(map(len, ids)) * len(rows)), strict=True))


def blank(sites: Sequence[Site]) -> Tensor:
    """Return 0 for live heads and NaN for frozen ones and layers that stay ordinary, `[L, H]` float64."""
    values = torch.full((len(sites), sites[0].layout.num_heads), torch.nan, dtype=torch.float64)
    for layer, site in enumerate(sites):
        if site.stays_ordinary is None:
            values[layer, list(site.layout.live)] = 0.0
    return values


def _profile(query: Tensor, key: Tensor, site: Site, rows: Sequence[int], local: int) -> Tensor:
    """Return the profiles of one sequence summed over `rows`, `[4, live heads]` float64."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    with torch.autocast(query.device.type, enabled=False):
        scale = score_scale(site.scale, query.shape[-1])
        logits = capped(query[:, rows].to(wide) @ key[list(site.layout.key_head)].to(wide).mT * scale, site.soft_cap)
        last = torch.tensor(rows, device=query.device)[:, None]
        keys = torch.arange(key.shape[1], device=query.device)
        pattern = logits.masked_fill_(keys > last, -torch.inf).softmax(-1).double()
    entropy = -torch.xlogy(pattern, pattern).sum(-1) / (last[:, 0] + 1).double().log()
    recent = (pattern * (keys > last - local)).sum(-1)
    return torch.stack([entropy, recent, pattern.amax(-1), pattern[..., 0]]).sum(-1)


def layer_matched(values: Tensor, selected: HeadSet) -> tuple[float, float]:
    """Return the mean of `values [L, H]` over selected heads, and over unselected ones weighted to match their layers.

    Each layer's unselected heads weigh as much together as its selected ones; layers without unselected heads are left
    out of both. NaN values (frozen heads) count as neither. Raises InputError when no layer has both, and for heads
    that do not exist.
    """
    layers, width = values.shape
    if strange := [[layer, head] for layer, head in selected if layer >= layers or head >= width]:
        raise InputError(f"the model has {layers} layers of {width} heads; got {strange}")
    chosen, others, weights = [], [], []
    for layer, row in enumerate(values.double()):
        heads = [head for head in range(len(row)) if not row[head].isnan()]
        inside = [head for head in heads if (layer, head) in selected]
        outside = [head for head in heads if (layer, head) not in selected]
        if inside and outside:
            chosen.append(row[inside].mean())
            others.append(row[outside].mean())
            weights.append(len(inside))
    if not weights:
        raise InputError("no layer has both selected and unselected heads: there is nothing to compare")
    share = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    return float(share @ torch.stack(chosen).cpu()), float(share @ torch.stack(others).cpu())
