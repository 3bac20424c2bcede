"""`calibrate` measures the attention of a model in one exact pass; `score_inputs` measures what else scores read.

A file a step: `sequences` reads the batches, `plan` divides memory, `capture` runs the model and copies queries and
keys, and they are measured layer by layer, by `measure` in plain PyTorch or by the Triton `kernels`. `collect` defines
the further tensors of `calibrate(collect=...)`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from saf.calibration.capture import CapturedSlots, capture, check_vocabulary, evaluation_mode
from saf.calibration.collect import COLLECTIONS, Collection, latter_half
from saf.calibration.measure import LayerStatistics, measure_layer
from saf.calibration.plan import (
    CalibrationPlan,
    collected_dtype,
    free_bytes,
    heads_at_a_time,
    plan_calibration,
)
from saf.calibration.score_inputs import QKGradient, gate_gradients, head_outputs
from saf.calibration.sequences import Batch, Sequences, read_batches, read_sequences
from saf.errors import DivergenceError
from saf.heads import Head, HeadSet
from saf.machine import Stopwatch
from saf.models.adapter import Adapter, adapter_for
from saf.statistics import AttentionStatistics

__all__ = [
    "COLLECTIONS",
    "Batch",
    "CalibrationPlan",
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
    length, count = sequences.length, len(sequences.tokens)
    shape = {"sequences": count, "length": length, "dtype": collected_dtype(adapter)}
    collection = Collection(collect, plan.heads, positions=positions, **shape) if collect else None
    sites = adapter.sites()
    by_head = len(sites), sites[0].layout.num_heads
    statistics = {
        name: torch.full((*by_head, length) if name.startswith("eta") else by_head, torch.nan, dtype=torch.float64)
        for name in LayerStatistics._fields
    }
    num_layers, progress = len(plan.layer_bytes), progress or (lambda done, layers: None)
    progress(0, num_layers)
    with torch.no_grad(), evaluation_mode(model):
        measured = _measure(adapter, plan, collection, timer or Stopwatch())
        for done, (layer, values) in enumerate(measured, 1):
            for name, tensor in values.items():
                statistics[name][layer, plan.heads.in_layer(layer)] = tensor
            progress(done, num_layers)
    return AttentionStatistics(
        **statistics,
        length=length,
        num_sequences=count,
        sequences_hash=sequences.hash,
        lengths=sequences.unequal,
        collected=collection.tensors if collection else {},
        collected_heads=plan.heads if collection else HeadSet(),
        positions=collection.positions if collection else (),
    )


def _measure(
    adapter: Adapter, plan: CalibrationPlan, collection: Collection | None, timer: Stopwatch
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield the plan's layers with the fields of their `LayerStatistics`, on the CPU."""
    sites = adapter.sites()
    for group in plan.groups:
        slots = {layer: CapturedSlots.of(sites[layer], plan.heads.in_layer(layer)) for layer in group}
        with timer("capture"):
            captured = capture(adapter, slots, plan.sequences.ids)
        for layer in group:
            with timer("statistics"):
                query, key = captured.pop(layer)
                measured = measure_layer(
                    query,
                    key,
                    kv_head=slots[layer].kv_head,
                    scale=sites[layer].scale,
                    soft_cap=sites[layer].soft_cap,
                    lengths=plan.sequences.lengths,
                    take=partial(collection.take, layer) if collection else None,
                )
                values = {name: each.cpu() for name, each in measured._asdict().items()}
                del query, key
            if not all(bool(each.isfinite().all()) for each in values.values()):
                raise DivergenceError(f"the attention of layer {layer} is not finite; check the model's weights")
            yield layer, values
