"""`calibrate` measures the attention of a model in one exact pass over sequences, Eqs. (1), (2) and (S.4).

The files in the order of a calibration: sequences.py reads the batches once; capture.py plans how many layers' queries
and keys memory holds, runs the model and copies them; measure.py sums a layer's statistics over strips of query rows,
kernels.py (Triton) over tiles. Both are exact and hold no T x T array. A `Collector` of measure.py adds the
tensors that `calibrate(collect=...)` names. score_inputs.py measures other inputs of scores: gradients, outputs, gates.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import nn

from saf.calibration.capture import capture_layers, heads_at_a_time, plan_calibration
from saf.calibration.measure import COLLECTIONS, Collected, latter_half, measure_layer
from saf.calibration.score_inputs import QKGradient, gate_gradients, head_outputs
from saf.calibration.sequences import Batch, Sequences, read_batches, read_sequences
from saf.errors import DivergenceError
from saf.heads import Head
from saf.machine import Stopwatch
from saf.models.adapter import evaluation_mode
from saf.statistics import AttentionStatistics, LayerStatistics

__all__ = [
    "COLLECTIONS", "Batch", "Collected", "QKGradient", "Sequences", "calibrate", "gate_gradients", "head_outputs",
    "heads_at_a_time", "latter_half", "plan_calibration", "read_batches", "read_sequences",
]  # fmt: skip


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
    plan = plan_calibration(
        model, batches, collect=collect, heads=heads, positions=positions, capture_bytes=capture_bytes
    )
    adapter, sequences, timer = plan.adapter, plan.sequences, timer or Stopwatch()
    sites, layers, done = adapter.sites(), sum(map(len, plan.groups)), 0
    # NaN marks heads that were not measured, here as in every score.
    per_head = len(sites), sites[0].layout.num_heads
    statistics = {name: torch.full(per_head, torch.nan, dtype=torch.float64) for name in LayerStatistics._fields}
    for name in ("eta_abs", "eta_rel"):
        statistics[name] = torch.full((*per_head, sequences.length), torch.nan, dtype=torch.float64)
    if progress:
        progress(done, layers)
    with torch.no_grad(), evaluation_mode(model):
        for group in plan.groups:
            with timer("capture"):
                captured = capture_layers(adapter, plan.heads, group, sequences.ids)
            for layer in group:
                with timer("statistics"):
                    measured = measure_layer(
                        *captured.pop(layer),  # so that a layer's memory is free for the next one's strips
                        lengths=sequences.lengths,
                        scale=sites[layer].scale,
                        soft_cap=sites[layer].soft_cap,
                        on_strip=partial(plan.collector.read, layer) if collect else None,
                    )
                    if not all(bool(each.isfinite().all()) for each in measured):
                        raise DivergenceError(f"attention of layer {layer} must be finite; check the model's weights")
                    for name, values in measured._asdict().items():
                        statistics[name][layer, plan.heads.in_layer(layer)] = values.cpu()
                done += 1
                if progress:
                    progress(done, layers)
    return AttentionStatistics(
        **statistics,
        length=sequences.length,
        num_sequences=len(sequences.tokens),
        sequences_hash=sequences.hash,
        lengths=sequences.unequal_lengths,
        collected=plan.collector.tensors,
        collected_heads=plan.heads,
        positions=plan.collector.positions,
    )
