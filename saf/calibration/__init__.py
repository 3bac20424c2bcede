"""`calibrate` measures the attention of a model in one exact pass over sequences, Eqs. (1), (2) and (S.4).

It drives a file a step: sequences.py reads the batches, capture.py runs the model and copies queries and keys of as
many layers as memory holds, and measure.py or the Triton kernels.py measure them layer by layer. score_inputs.py
measures what else scores read.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from saf.calibration.capture import (
    CapturedLayer,
    capture,
    check_vocabulary,
    evaluation_mode,
    measurable_heads,
    read_slots,
)
from saf.calibration.measure import COLLECTIONS, Collected, Collection, LayerStatistics, latter_half, measure_layer
from saf.calibration.score_inputs import QKGradient, gate_gradients, head_outputs
from saf.calibration.sequences import Batch, Sequences, read_batches, read_sequences
from saf.errors import DivergenceError, InputError
from saf.heads import Head, HeadSet
from saf.machine import Stopwatch
from saf.models.adapter import Adapter, Site, adapter_for
from saf.records.table import byte_size
from saf.statistics import AttentionStatistics

__all__ = [
    "COLLECTIONS",
    "Batch",
    "CalibrationPlan",
    "Collected",
    "QKGradient",
    "Sequences",
    "calibrate",
    "free_bytes",
    "gate_gradients",
    "head_outputs",
    "heads_at_a_time",
    "latter_half",
    "plan_calibration",
    "read_batches",
    "read_sequences",
]

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
        collect: Names of `COLLECTIONS` to return too, on the CPU.
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
    options = {"heads": heads, "positions": positions, "capture_bytes": capture_bytes}
    plan = plan_calibration(model, sequences, collect=collect, **options)
    timer, progress = timer or Stopwatch(), progress or (lambda done, layers: None)
    sites, length, done, layers = adapter.sites(), sequences.length, 0, sum(map(len, plan.groups))
    by_head = len(sites), sites[0].layout.num_heads  # a site is the attention of a layer
    statistics = {
        name: torch.full((*by_head, length) if name.startswith("eta") else by_head, torch.nan, dtype=torch.float64)
        for name in LayerStatistics._fields
    }
    progress(done, layers)
    with torch.no_grad(), evaluation_mode(model):
        for group in plan.groups:
            with timer("capture"):
                captured = capture(adapter, plan.heads, group, sequences.ids)
            for layer in group:
                with timer("statistics"):
                    measured = _measure(plan, layer, sites[layer], captured.pop(layer))
                for name, values in measured.items():
                    statistics[name][layer, plan.heads.in_layer(layer)] = values
                done += 1
                progress(done, layers)
    return AttentionStatistics(
        **statistics,
        length=length,
        num_sequences=len(sequences.tokens),
        sequences_hash=sequences.hash,
        lengths=sequences.unequal,
        collected=plan.collection.tensors if collect else {},
        collected_heads=plan.heads if collect else HeadSet(),
        positions=plan.collection.positions,
    )


def _measure(plan: "CalibrationPlan", layer: int, site: Site, captured: CapturedLayer) -> dict[str, Tensor]:
    """Measure one layer; return the fields of its `LayerStatistics` on the CPU."""
    measured = measure_layer(
        captured.query,
        captured.key,
        kv_head=captured.kv_head,
        scale=site.scale,
        soft_cap=site.soft_cap,
        lengths=plan.sequences.lengths,
        take=partial(plan.collection.take, layer) if plan.collection.kinds else None,
    )
    values = {name: each.cpu() for name, each in measured._asdict().items()}
    if not all(bool(each.isfinite().all()) for each in values.values()):
        raise DivergenceError(f"the attention of layer {layer} is not finite; check the model's weights")
    return values


# --- memory


class CalibrationPlan(NamedTuple):
    """The passes of a calibration and the memory that it holds; `str` is a sentence for people."""

    heads: HeadSet
    sequences: Sequences
    groups: list[list[int]]
    """Layers whose queries and keys are held at the same time; the model runs once for each group."""
    capture_bytes: int
    """Queries and keys of the largest group, on the model's device."""
    collection: Collection
    """Tensors of `collect`, on the CPU; `calibrate` fills them in."""

    def __str__(self) -> str:
        held = self.collection.nbytes
        return (
            f"calibration of {len(self.heads)} heads on {self.sequences}: queries and keys of "
            f"{max(map(len, self.groups), default=0)} layers at a time {byte_size(self.capture_bytes)}, model runs "
            f"{len(self.groups)} x" + (f"; {byte_size(held)} collected on the CPU" if held else "")
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
    adapter, sequences = adapter_for(model), read_sequences(batches)
    chosen = measurable_heads(adapter, heads)
    collection = _collection(adapter, collect, chosen, len(sequences.tokens), sequences.length, positions)
    spare = free_bytes(torch.device("cpu"))
    if spare is not None and collection.nbytes > spare:
        raise InputError(
            f"not enough memory: {byte_size(collection.nbytes)} to collect, {byte_size(spare)} free on the CPU; "
            "measure fewer heads at a time (heads=)"
        )
    if sequences.unequal and (whole := [name for name in collect if "N" in COLLECTIONS[name].shape]):
        raise InputError(
            f"{' and '.join(whole)} cannot be collected of sequences of unequal lengths, {sequences.lengths[-1]} to "
            f"{sequences.length} tokens; pass sequences of one length, or collect the mean"
        )
    sizes = _layer_bytes(adapter, chosen, len(sequences.tokens) * sequences.length)
    groups = _groups(adapter.device, sizes, capture_bytes)
    most = max((sum(sizes[layer] for layer in group) for group in groups), default=0)
    return CalibrationPlan(chosen, sequences, groups, most, collection)


def _collection(
    adapter: Adapter,
    collect: Sequence[str],
    heads: HeadSet,
    sequences: int,
    length: int,
    positions: Sequence[int] | None = None,
) -> Collection:
    """Return what is collected of these heads; a float64 model is measured in float64, others in float32."""
    dtype = torch.float64 if adapter.dtype == torch.float64 else torch.float32
    return Collection(collect, heads, sequences=sequences, length=length, dtype=dtype, positions=positions)


def _layer_bytes(adapter: Adapter, heads: HeadSet, tokens: int) -> dict[int, int]:
    """Return the bytes of each layer's queries and keys, in the dtype that the model computes them in."""
    sites, dtype, device = adapter.sites(), adapter.dtype, adapter.device.type
    if dtype == torch.float32 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    sizes = {}
    for layer in sorted({layer for layer, _ in heads}):
        queries, keys, _ = read_slots(sites[layer], heads.in_layer(layer))
        sizes[layer] = tokens * (len(queries) + len(keys)) * sites[layer].head_dim * dtype.itemsize
    return sizes


def _groups(device: torch.device, layer_bytes: dict[int, int], capture_bytes: int | None) -> list[list[int]]:
    """Divide the layers into groups that are captured together, as many layers at a time as memory holds."""
    layers, largest = list(layer_bytes), max(layer_bytes.values(), default=0) or 1
    limit = free_bytes(device) if capture_bytes is None else capture_bytes
    if limit is not None and largest > limit:
        raise InputError(
            f"queries and keys of one layer must be at most {byte_size(limit)} "
            f"({'free memory' if capture_bytes is None else 'capture_bytes'}), got {byte_size(largest)}; "
            "pass fewer sequences, or measure fewer heads (heads=)"
        )
    if capture_bytes is None:  # all layers where the free memory is unknown
        share = sum(layer_bytes.values()) if limit is None else int(SHARE * limit)
        capture_bytes = min(share, CPU_BYTES) if device.type == "cpu" else share
    size = max(1, capture_bytes // largest)
    return [layers[first : first + size] for first in range(0, len(layers), size)]


def heads_at_a_time(model: nn.Module, collect: Sequence[str], *, sequences: int, length: int) -> int:
    """Return the number of heads whose `collect` fits into half of the CPU's free memory at once; one at least."""
    free = free_bytes(torch.device("cpu"))
    one = _collection(adapter_for(model), collect, HeadSet([(0, 0)]), sequences, length).nbytes
    limit = COLLECT_BYTES if free is None else min(COLLECT_BYTES, int(SHARE * free))
    return max(1, limit // max(one, 1))


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
