"""`capture_layers` runs a model, unchanged, over calibration sequences and copies queries and keys of some layers.

`plan_calibration` chooses which layers go together, by the memory that their queries and keys take.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from saf.calibration.measure import COLLECTIONS, Collector
from saf.calibration.sequences import Batch, Sequences, read_sequences
from saf.errors import InputError, UnsupportedError
from saf.heads import Head, HeadSet
from saf.machine import free_bytes
from saf.models.adapter import Adapter, Site, adapter_for
from saf.records.table import byte_size

# Share of free memory for queries and keys, or for collected tensors. The rest is a margin for the model's activations
# and for attention matrices (`STRIP_ELEMENTS` in measure.py).
SHARE = 0.5
CPU_BYTES = 4 << 30  # most queries and keys by default on a CPU, whose memory others use too
COLLECT_BYTES = 16 << 30  # most that `heads_at_a_time` collects at once


class CalibrationPlan(NamedTuple):
    """The passes of a calibration and the memory that it holds; `str` is a sentence for people."""

    adapter: Adapter
    heads: HeadSet
    sequences: Sequences
    groups: list[list[int]]
    """Layers whose queries and keys are held at the same time; the model runs once for each group."""
    capture_bytes: int  # queries and keys of the largest group, on the model's device
    collector: Collector  # tensors of `collect`, on the CPU; `calibrate` fills them in

    def __str__(self) -> str:
        held = self.collector.nbytes
        collected = f"; {byte_size(held)} collected on the CPU" if held else ""
        return (
            f"calibration of {len(self.heads)} heads on {self.sequences}: {byte_size(self.capture_bytes)} for queries "
            f"and keys of {max(map(len, self.groups), default=0)} layers at a time; runs of the model: "
            f"{len(self.groups)}{collected}"
        )


def plan_calibration(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    collect: Sequence[str] = (),
    heads: Iterable[Head] | None = None,
    positions: Sequence[int] | None = None,
    capture_bytes: int | None = None,
) -> CalibrationPlan:
    """Plan `calibrate` with the same arguments, without running the model.

    Queries and keys of as many layers are held at a time as fit into `capture_bytes`. Its default is half of the free
    memory, on a CPU at most 4 GiB; a single layer may then take all that is free. Raises InputError where one layer
    does not fit, or the collected tensors do not.
    """
    adapter, sequences = adapter_for(model), read_sequences(batches)
    adapter.check_tokens(sequences.ids)
    measured, count, length = measurable_heads(adapter, heads), len(sequences.tokens), sequences.length
    collector = Collector(collect, measured, sequences=count, length=length, dtype=adapter.dtype, positions=positions)
    free = free_bytes(torch.device("cpu"))
    if free is not None and collector.nbytes > free:
        raise InputError(
            f"not enough memory: {byte_size(collector.nbytes)} to collect, {byte_size(free)} free on the CPU; "
            "measure fewer heads at a time (heads=)"
        )
    if sequences.unequal_lengths and (names := [name for name in collect if "N" in COLLECTIONS[name].shape]):
        raise InputError(
            f"{' and '.join(names)} cannot be collected of sequences of unequal lengths, {sequences.lengths[-1]} to "
            f"{sequences.length} tokens; pass sequences of one length, or collect the mean"
        )
    groups, size = _groups(adapter, measured, count * length, capture_bytes)
    return CalibrationPlan(adapter, measured, sequences, groups, size, collector)


def _groups(adapter: Adapter, heads: HeadSet, tokens: int, capture_bytes: int | None) -> tuple[list[list[int]], int]:
    """Return groups of as many layers as memory holds, and the bytes of queries and keys of the largest group."""
    sites, dtype, device = adapter.sites(), adapter.dtype, adapter.device
    # Under autocast the projections of float32 weights give queries and keys of its dtype.
    autocast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    if dtype == torch.float32 and autocast:
        dtype = torch.get_autocast_dtype(device.type)
    sizes = {}
    for layer in sorted({layer for layer, _ in heads}):
        queries, keys, _ = read_slots(sites[layer], heads.in_layer(layer))
        sizes[layer] = tokens * (len(queries) + len(keys)) * sites[layer].head_dim * dtype.itemsize
    largest = max(sizes.values(), default=1)
    limit = free_bytes(device) if capture_bytes is None else capture_bytes
    if limit is not None and largest > limit:
        raise InputError(
            f"queries and keys of one layer must be at most {byte_size(limit)} "
            f"({'free memory' if capture_bytes is None else 'capture_bytes'}), got {byte_size(largest)}; "
            "pass fewer sequences, or measure fewer heads (heads=)"
        )
    if capture_bytes is None:
        # All layers where the free memory is unknown.
        capture_bytes = sum(sizes.values()) if limit is None else int(SHARE * limit)
        capture_bytes = min(capture_bytes, CPU_BYTES) if device.type == "cpu" else capture_bytes
    count, layers = max(1, capture_bytes // largest), list(sizes)
    groups = [layers[first : first + count] for first in range(0, len(layers), count)]
    return groups, max((sum(sizes[layer] for layer in group) for group in groups), default=0)


def heads_at_a_time(model: nn.Module, collect: Sequence[str], *, sequences: int, length: int) -> int:
    """Return the number of heads whose collected tensors fit into half of the CPU's free memory; at least 1."""
    free = free_bytes(torch.device("cpu"))
    limit = COLLECT_BYTES if free is None else min(COLLECT_BYTES, int(SHARE * free))
    one = Collector(collect, HeadSet([(0, 0)]), sequences=sequences, length=length, dtype=adapter_for(model).dtype)
    return max(1, limit // max(one.nbytes, 1))


# --- heads that the model has


def measurable_heads(adapter: Adapter, heads: Iterable[Head] | None = None) -> HeadSet:
    """Return the heads to measure: by default all live ones of layers that can be frozen.

    Raises InputError for a head that is not live, UnsupportedError for one in a layer that stays ordinary, or where
    every layer does.
    """
    live, reasons = adapter.heads("live"), [site.unsupported_reason for site in adapter.sites()]
    if all(reasons):
        raise UnsupportedError(f"no head of this model can be frozen: {reasons[0]}")
    ordinary = HeadSet(head for head in live if reasons[head[0]])
    measured = live - ordinary if heads is None else HeadSet(heads)
    if missing := measured - live:
        raise InputError(f"only live heads can be measured; these are frozen or do not exist: {missing.to_list()}")
    if refused := measured & ordinary:
        raise UnsupportedError(f"heads {refused.to_list()} cannot be measured: {reasons[next(iter(refused))[0]]}")
    return measured


# --- the passes


class CapturedLayer(NamedTuple):
    """Rotated queries and keys of a layer over all sequences; zeros follow shorter sequences."""

    query: Tensor  # `[N, heads, T, D]`
    key: Tensor  # `[N, K, T, D]`, the keys that these queries read
    kv_head: list[int]  # the key that each query reads


def capture_layers(
    adapter: Adapter, heads: HeadSet, layers: Iterable[int], ids: Sequence[Tensor]
) -> dict[int, CapturedLayer]:
    """Run the model over all batches, the longest first, and return the queries and keys of `heads` in some layers.

    Each batch is copied at once, so that no more is held than the result and one forward pass.
    """
    sites, count, length = adapter.sites(), sum(map(len, ids)), ids[0].shape[1]
    slots = {layer: read_slots(sites[layer], heads.in_layer(layer)) for layer in layers}
    captured: dict[int, CapturedLayer] = {}
    filled = dict.fromkeys(slots, 0)

    def space(part: Tensor, heads: int) -> Tensor:
        # Stored as `[N, T, heads, D]`, as models do.
        return part.new_empty(count, length, heads, part.shape[3]).transpose(1, 2)

    def receive(layer: int, query: Tensor, key: Tensor) -> None:
        queries, keys, kv_head = slots[layer]
        if layer not in captured:  # the model's own dtype is known from the first batch on
            captured[layer] = CapturedLayer(space(query, len(queries)), space(key, len(keys)), kv_head)
        start, end = filled[layer], filled[layer] + len(query)
        filled[layer] = end
        if end <= count:  # more from a layer that attends twice in a pass, an error below
            _copy(captured[layer].query[start:end], query, queries)
            _copy(captured[layer].key[start:end], key, keys)

    with ExitStack() as stack:
        for layer in slots:
            stack.enter_context(sites[layer].capture(partial(receive, layer)))
        for tokens in ids:
            adapter.run(tokens.to(adapter.device))
    for layer, number in filled.items():
        if number != count:
            raise UnsupportedError(
                f"layer {layer} must attend once in a pass, got {number} sequences of {count}; restore the forward "
                "pass and configuration of transformers"
            )
    return captured


def _copy(space: Tensor, part: Tensor, heads: list[int]) -> None:
    """Copy some heads of one batch to their space, which may be longer."""
    length = part.shape[2]
    space[:, :, length:] = 0
    space[:, :, :length].copy_(part if len(heads) == part.shape[1] else part[:, heads])


def read_slots(site: Site, heads: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Return the query slots of some live heads, the key slots that they read, and which of these each head reads."""
    queries = [site.layout.live.index(head) for head in heads]
    read = [site.layout.key_head[slot] for slot in queries]
    keys = sorted(set(read))
    return queries, keys, [keys.index(key) for key in read]
