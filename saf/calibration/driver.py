"""`calibrate`: run the model, copy queries and keys of some layers at a time, and measure them layer by layer."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from saf.calibration.capture import Slots, capture, check_heads, check_vocabulary, evaluation_mode
from saf.calibration.collect import Collection
from saf.calibration.plan import CalibrationPlan, plan_for
from saf.calibration.sequences import Batch, Sequences, read_sequences
from saf.calibration.strips import LayerStatistics, measure_layer
from saf.distributed import all_gather, all_ranks_or_raise, rank_and_size
from saf.errors import DivergenceError
from saf.heads import Head, HeadSet
from saf.machine import Stopwatch
from saf.models.adapter import Adapter, adapter_for
from saf.statistics import AttentionStatistics


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
        model: A supported model; weights, gradients, training mode and random states are left as they were.
        batches: LongTensors `[B, T]` of token ids, or mappings with `input_ids`; a generator will do. Sequences may
            have unequal lengths: T differs from batch to batch, or an `attention_mask` marks padding behind them, which
            enters nothing. Patterns are as long as the longest; a row is measured over the sequences that reach it.
        collect: Names of `saf.statistics.COLLECTIONS` to keep beside the statistics, on the CPU.
        heads: The heads to measure; by default all live heads of layers that can be frozen (none of those that
            attend within a sliding window). Others are NaN.
        positions: Query positions of `mean_rows`, `rows` and `logit_rows`; by default 64, evenly over the latter half.
        capture_bytes: Most memory for queries and keys held at once; more layers at a time mean fewer passes. By
            default half of what is free, see `plan_calibration`.
        progress: Called with (layers done, layers), first before the model runs.
        timer: Adds the seconds of running the model (`capture`) and of measuring (`statistics`).

    Returns:
        Exact statistics of all sequences together; no `T x T` array is held but those collected.

    Raises:
        InputError: No sequences, padding ahead of one, or ids that are not a `[B, T]` integer tensor; heads that are
            not live, unknown names to collect, values of every sequence (`rows`, `logit_rows`) where lengths are
            unequal, or more to hold than fits.
        UnsupportedError: Heads of a layer that stays ordinary, or a model all of whose layers do.
        DivergenceError: Queries or keys that are not finite.
    """
    adapter, sequences = adapter_for(model), read_sequences(batches)
    sites = adapter.sites()
    check_vocabulary(adapter, sequences.ids)
    chosen = check_heads(adapter, heads)
    plan = plan_for(adapter, sequences, chosen, collect, positions, capture_bytes)
    collection = Collection(
        collect,
        chosen,
        sequences=plan.sequences,
        length=plan.length,
        positions=positions,
        dtype=torch.float64 if adapter.dtype == torch.float64 else torch.float32,
    )
    shape = len(sites), sites[0].layout.num_heads
    statistics = {
        name: torch.full((*shape, plan.length) if name.startswith("eta") else shape, torch.nan, dtype=torch.float64)
        for name in LayerStatistics._fields
    }
    report = progress or (lambda done, layers: None)
    report(0, len(plan.layers))
    layers = _layers(adapter, plan, sequences, collection, timer or Stopwatch())
    with torch.no_grad(), evaluation_mode(model):
        for done, (layer, measured) in enumerate(layers, 1):
            for name, values in measured._asdict().items():
                statistics[name][layer, chosen.in_layer(layer)] = values
            report(done, len(plan.layers))
    return AttentionStatistics(
        **statistics,
        length=plan.length,
        num_sequences=plan.sequences,
        sequences_hash=sequences.hash,
        lengths=sequences.unequal,
        collected=collection.tensors,
        collected_heads=chosen if collection.tensors else HeadSet(),
        positions=collection.positions,
    )


def _layers(
    adapter: Adapter, plan: CalibrationPlan, sequences: Sequences, collection: Collection, timer: Stopwatch
) -> Iterator[tuple[int, LayerStatistics]]:
    """Yield the plan's layers with their statistics, on the CPU."""
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
                    take=collection.of_layer(layer),
                    lengths=sequences.lengths,
                )
                measured = LayerStatistics(*(values.cpu() for values in measured))
                del query, key
            if not all(bool(values.isfinite().all()) for values in measured):
                raise DivergenceError(f"the attention of layer {layer} is not finite; check the model's weights")
            yield layer, measured


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
        live = list(check_heads(adapter_for(model), None))
        own = HeadSet(live[rank * len(live) // count : (rank + 1) * len(live) // count])
        measured = calibrate(model, batches, heads=own, timer=timer, **options)
    with timer("gather"):
        return AttentionStatistics.join(all_gather(measured))
