"""`calibrate`: plan memory, run the model, copy queries and keys of some layers at a time, measure layer by layer."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saf.calibration.capture import Slots, capture, check_vocabulary, evaluation_mode, measurable_heads
from saf.calibration.sequences import Batch, Sequences, read_sequences
from saf.calibration.streaming import (
    Collection,
    LayerStatistics,
    collection_bytes,
    latter_half,
    measure_layer,
)
from saf.distributed import all_gather, all_ranks_or_raise, rank_and_size
from saf.errors import DivergenceError, InputError
from saf.heads import Head, HeadSet
from saf.machine import Stopwatch
from saf.models.adapter import Adapter, adapter_for
from saf.records.table import byte_size
from saf.statistics import COLLECTIONS, AttentionStatistics, sequences_in_words

SHARE = 0.5
"""Share of free memory for queries and keys, or a collection, by default; the rest is a margin."""
CPU_BYTES = 4 << 30
"""Most queries and keys by default on a CPU, whose memory others use too."""
COLLECT_BYTES = 16 << 30
"""Most that `heads_at_a_time` collects at once."""


def calibrate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    collect: Sequence[str] = (),
    heads: Iterable[Head] | None = None,
    positions: Sequence[int] | None = None,
    capture_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    timer: Stopwatch | None = None,
) -> AttentionStatistics:
    """Measure the attention of live heads on calibration sequences, in evaluation mode.

    Args:
        model: A supported model; weights, gradients, training mode and random states stay as they were.
        batches: LongTensors `[B, T]` of token ids, or mappings with `input_ids`; a generator will do. Sequences may
            have unequal lengths: T differs from batch to batch, or an `attention_mask` marks padding behind them, which
            never enters. Patterns are as long as the longest; a row is measured over the sequences that reach it.
        collect: Names of `saf.statistics.COLLECTIONS` to return too, on the CPU.
        heads: The heads to measure; by default all live heads of layers that can be frozen (none of those that
            attend within a sliding window). Others are NaN.
        positions: Query positions of `mean_rows`, `rows` and `logit_rows`; by default 64, evenly over the latter half.
        capture_bytes: Most memory for queries and keys held at once; more layers at a time mean fewer passes. By
            default half of the free memory, see `plan_calibration`.
        progress: Called with (layers done, layers), first before the model runs.
        timer: Adds the seconds of running the model (`capture`) and of measuring (`statistics`).

    Returns:
        Exact statistics of all sequences together; no `T x T` array is held but the collected ones.

    Raises:
        InputError: Batches or heads that cannot be measured, unknown names to collect, or more to hold than fits.
        UnsupportedError: Heads of a layer that stays ordinary, or a model with no other layers.
        DivergenceError: Queries or keys that are not finite.
    """
    adapter, sequences = adapter_for(model), read_sequences(batches)
    check_vocabulary(adapter, sequences.ids)
    plan = _plan(adapter, sequences, measurable_heads(adapter, heads), collect, positions, capture_bytes)
    shape = {"sequences": plan.sequences, "length": plan.length, "positions": positions, "dtype": _wide(adapter)}
    collection = Collection(collect, plan.heads, **shape) if collect else None
    sites = adapter.sites()
    by_head = len(sites), sites[0].layout.num_heads
    statistics = {
        name: torch.full((*by_head, plan.length) if name.startswith("eta") else by_head, torch.nan, dtype=torch.float64)
        for name in LayerStatistics._fields
    }
    num_layers, progress = len(plan.layer_bytes), progress or (lambda done, layers: None)
    progress(0, num_layers)
    with torch.no_grad(), evaluation_mode(model):
        measured = _measure(adapter, plan, sequences, collection, timer or Stopwatch())
        for done, (layer, values) in enumerate(measured, 1):
            for name, tensor in values.items():
                statistics[name][layer, plan.heads.in_layer(layer)] = tensor
            progress(done, num_layers)
    return AttentionStatistics(
        **statistics,
        length=plan.length,
        num_sequences=plan.sequences,
        sequences_hash=sequences.hash,
        lengths=sequences.unequal,
        collected=collection.tensors if collection else {},
        collected_heads=plan.heads if collection else HeadSet(),
        positions=collection.positions if collection else (),
    )


def _measure(
    adapter: Adapter, plan: "CalibrationPlan", sequences: Sequences, collection: Collection | None, timer: Stopwatch
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield the plan's layers with the fields of their `LayerStatistics`, on the CPU."""
    sites = adapter.sites()
    for group in plan.groups:
        slots = {layer: Slots.of(sites[layer], plan.heads.in_layer(layer)) for layer in group}
        with timer("capture"):
            captured = capture(adapter, slots, sequences.ids)
        for layer in group:
            with timer("statistics"):
                query, key = captured.pop(layer)
                measured = measure_layer(
                    query,
                    key,
                    kv_head=slots[layer].kv_head,
                    scale=sites[layer].scale,
                    soft_cap=sites[layer].soft_cap,
                    lengths=sequences.lengths,
                    take=partial(collection.take, layer) if collection else None,
                )
                values = {name: each.cpu() for name, each in measured._asdict().items()}
                del query, key
            if not all(bool(each.isfinite().all()) for each in values.values()):
                raise DivergenceError(f"the attention of layer {layer} is not finite; check the model's weights")
            yield layer, values


def calibrate_together(
    model: nn.Module, batches: Iterable[Batch], *, timer: Stopwatch, **options: Any
) -> AttentionStatistics:
    """Measure all live heads as `calibrate` does, shared out over the processes of the group.

    Every process calls this with the same model, batches and options, and all return the same. Heads are shared out,
    never sequences: a variance over sequences is not a sum of variances over some of them. Every process runs the
    model over all sequences and measures consecutive heads, so that few layers are measured in two processes. `timer`
    adds the seconds of joining (`gather`). An error of one process is raised in every one.
    """
    rank, count = rank_and_size()
    if count == 1:
        return calibrate(model, batches, timer=timer, **options)
    with all_ranks_or_raise():
        live = list(measurable_heads(adapter_for(model)))
        share = HeadSet(live[rank * len(live) // count : (rank + 1) * len(live) // count])
        measured = calibrate(model, batches, heads=share, timer=timer, **options)
    with timer("gather"):
        return AttentionStatistics.join(all_gather(measured))


# --- memory


@dataclass(frozen=True, kw_only=True)
class CalibrationPlan:
    """The passes of a calibration and what it holds, in exact bytes; `str` is a sentence for people."""

    heads: HeadSet
    sequences: int
    length: int
    lengths: tuple[int, ...]
    """Tokens of each sequence, longest first, where they differ; `length` is the longest."""
    groups: list[list[int]]
    """Layers whose queries and keys are held at the same time; the model runs once for each group."""
    layer_bytes: dict[int, int]
    """Queries and keys of each layer, on the model's device."""
    collected_bytes: int
    """Tensors of `collect`, on the CPU."""

    @property
    def capture_bytes(self) -> int:
        """Queries and keys of the largest group."""
        return max((sum(self.layer_bytes[layer] for layer in group) for group in self.groups), default=0)

    def __str__(self) -> str:
        collected = f"; {byte_size(self.collected_bytes)} collected on the CPU" if self.collected_bytes else ""
        return (
            f"calibration of {len(self.heads)} heads on "
            f"{sequences_in_words(self.sequences, self.length, self.lengths)}: queries and keys of "
            f"{max(map(len, self.groups), default=0)} layers at a time {byte_size(self.capture_bytes)}, model runs "
            f"{len(self.groups)} x{collected}"
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

    Queries and keys of as many layers as fit are held at a time: into `capture_bytes`, by default into half of the free
    memory (on a CPU at most 4 GiB), but always of one layer that fits into it. Raises InputError where one layer does
    not fit, or the collected tensors do not.
    """
    adapter = adapter_for(model)
    return _plan(adapter, read_sequences(batches), measurable_heads(adapter, heads), collect, positions, capture_bytes)


def _plan(
    adapter: Adapter,
    sequences: Sequences,
    heads: HeadSet,
    collect: Sequence[str],
    positions: Sequence[int] | None,
    capture_bytes: int | None,
) -> CalibrationPlan:
    """Plan for sequences and heads that are checked already."""
    count, length = len(sequences.lengths), sequences.length
    if sequences.unequal and (whole := [name for name in collect if "N" in COLLECTIONS.get(name, "")]):
        raise InputError(
            f"{' and '.join(whole)} cannot be collected of sequences of unequal lengths, {sequences.lengths[-1]} to "
            f"{length} tokens; pass sequences of one length, or collect the mean"
        )
    layer_bytes = _layer_bytes(adapter, heads, count * length)
    collected = 0
    if collect:
        rows = len(latter_half(length) if positions is None else positions)
        shape = {"heads": len(heads), "sequences": count, "length": length, "positions": rows}
        collected = collection_bytes(collect, **shape, itemsize=_wide(adapter).itemsize)
        spare = free_bytes(torch.device("cpu"))
        if spare is not None and collected > spare:
            raise InputError(
                f"not enough memory: {byte_size(collected)} to collect, {byte_size(spare)} free on the CPU; measure "
                "fewer heads at a time (heads=)"
            )
    layers, together = list(layer_bytes), _layers_at_a_time(adapter.device, layer_bytes, capture_bytes)
    return CalibrationPlan(
        heads=heads,
        sequences=count,
        length=length,
        lengths=sequences.unequal,
        groups=[layers[first : first + together] for first in range(0, len(layers), together)],
        layer_bytes=layer_bytes,
        collected_bytes=collected,
    )


def _layer_bytes(adapter: Adapter, heads: HeadSet, tokens: int) -> dict[int, int]:
    """Return the bytes of each layer's queries and keys, in the dtype that the model computes them in."""
    sites, dtype, device = adapter.sites(), adapter.dtype, adapter.device.type
    if dtype == torch.float32 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    slots = {layer: Slots.of(sites[layer], heads.in_layer(layer)) for layer in sorted({at for at, _ in heads})}
    return {
        layer: tokens * (len(each.queries) + len(each.keys)) * sites[layer].head_dim * dtype.itemsize
        for layer, each in slots.items()
    }


def _layers_at_a_time(device: torch.device, layer_bytes: dict[int, int], capture_bytes: int | None) -> int:
    """Return the number of layers whose queries and keys are held at once; raise InputError where one does not fit.

    By default they take a share of the free memory; one layer may take all of it.
    """
    largest = max(layer_bytes.values(), default=0) or 1
    most = free_bytes(device) if capture_bytes is None else capture_bytes
    if most is not None and largest > most:
        raise InputError(
            f"queries and keys of one layer must be at most {byte_size(most)} "
            f"({'free memory' if capture_bytes is None else 'capture_bytes'}), got {byte_size(largest)}; "
            "pass fewer sequences, or measure fewer heads (heads=)"
        )
    if capture_bytes is not None:
        return max(1, capture_bytes // largest)
    usual = sum(layer_bytes.values()) if most is None else int(SHARE * most)
    return max(1, (min(usual, CPU_BYTES) if device.type == "cpu" else usual) // largest)


def heads_at_a_time(model: nn.Module, collect: Sequence[str], *, sequences: int, length: int) -> int:
    """Return the number of heads whose `collect` fits into half of the CPU's free memory at once; one at least."""
    itemsize = _wide(adapter_for(model)).itemsize
    each = collection_bytes(collect, heads=1, sequences=sequences, length=length, itemsize=itemsize)
    free = free_bytes(torch.device("cpu"))
    limit = COLLECT_BYTES if free is None else min(COLLECT_BYTES, int(SHARE * free))
    return max(1, limit // max(each, 1))


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device, with PyTorch's unused reserve; None where it is unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def _wide(adapter: Adapter) -> torch.dtype:
    """Return the dtype of collected numbers: float64 models are measured in float64, others in float32."""
    return torch.float64 if adapter.dtype == torch.float64 else torch.float32
