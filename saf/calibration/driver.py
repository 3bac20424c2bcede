"""`calibrate`: run the model, keep queries and keys of some layers at a time, measure them tile by tile."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from saf.adapters import Adapter, adapter_for
from saf.calibration.capture import (
    Batch,
    Sequences,
    Wanted,
    capture,
    check_heads,
    check_vocabulary,
    evaluation_mode,
    read_sequences,
)
from saf.calibration.collect import COLLECT_BYTES, Collection
from saf.calibration.layer import LayerStatistics, measure_layer
from saf.calibration.plan import CalibrationPlan, plan_for
from saf.errors import DivergenceError
from saf.heads import Head, HeadSet
from saf.machine.stopwatch import Stopwatch
from saf.statistics import AttentionStatistics


def calibrate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    collect: Sequence[str] = (),
    heads: Iterable[Head] | None = None,
    positions: Sequence[int] | None = None,
    collect_limit: int = COLLECT_BYTES,
    capture_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    watch: Stopwatch | None = None,
) -> AttentionStatistics:
    """Measure the attention of live heads on calibration sequences, in evaluation mode.

    Args:
        model: A supported model; weights, gradients, training mode and random states are left as they were.
        batches: LongTensors `[B, T]` of token ids, or mappings with `input_ids`. Sequences may have unequal lengths: T
            differs from batch to batch, or an `attention_mask` marks padding behind them, which enters nothing. The
            patterns are as long as the longest; what is measured of a row is of the sequences that reach it.
        collect: What to keep beside the statistics, names of `saf.statistics.COLLECTIONS`.
        heads: The heads to measure; if not given, all live heads of layers that can be frozen (none of those that
            attend within a sliding window). Others are NaN.
        positions: Query positions of `mean_rows`, `rows` and `logit_rows`; 64, evenly over the latter half of T, if
            not given.
        collect_limit: Most bytes that `collect` may keep (on the CPU); computed and checked before the model runs.
        capture_bytes: Most memory for queries and keys kept at once; more layers at a time mean fewer passes. If not
            given, half of what is free, see `plan_calibration`, which tells what a calibration will hold.
        progress: Called with (layers done, layers), before the model runs too.
        watch: Adds the seconds of running the model (`capture`) and of the tile loop (`statistics`).

    Returns:
        Exact statistics of all sequences together; no `T x T` array is held but those asked for.

    Raises:
        InputError: No sequences, padding ahead of one, or ids that are not a `[B, T]` integer tensor; heads that are
            not live, unknown names to collect, what is kept of every sequence (`rows`, `logit_rows`) where lengths are
            unequal, more to collect than `collect_limit`, or more to hold than fits.
        UnsupportedError: Heads of a layer that stays ordinary, or a model all of whose layers do.
        DivergenceError: Queries or keys that are not finite.
    """
    adapter = adapter_for(model)
    sites = adapter.sites()
    sequences = read_sequences(batches)
    check_vocabulary(adapter, sequences.ids)
    chosen = check_heads(adapter, heads)
    plan = plan_for(adapter, sequences, chosen, collect=collect, positions=positions, capture_bytes=capture_bytes)
    dtype = torch.float64 if adapter.dtype == torch.float64 else torch.float32
    kept = Collection(
        collect,
        chosen,
        sequences=plan.sequences,
        length=plan.length,
        positions=positions,
        limit=collect_limit,
        dtype=dtype,
    )
    result = _Result(len(sites), sites[0].layout.num_heads, plan.length, chosen)
    say = progress or (lambda done, layers: None)
    say(0, len(plan.layers))
    watch = Stopwatch() if watch is None else watch
    with torch.no_grad(), evaluation_mode(model):
        for layer, measured in _measure(adapter, plan, sequences, kept, watch):
            result.put(layer, measured)
            say(plan.layers.index(layer) + 1, len(plan.layers))
    return AttentionStatistics(
        **result.statistics,
        length=plan.length,
        num_sequences=plan.sequences,
        sequences_hash=sequences.hash,
        lengths=sequences.unequal,
        collected=kept.tensors,
        collected_heads=chosen if kept.tensors else HeadSet(),
        positions=kept.positions,
    )


def _measure(
    adapter: Adapter, plan: CalibrationPlan, sequences: Sequences, kept: Collection, watch: Stopwatch
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield the plan's layers with their statistics, on the CPU."""
    sites = adapter.sites()
    for group in plan.groups:
        wanted = {layer: Wanted.of(sites[layer], plan.heads.in_layer(layer)) for layer in group}
        with watch("capture"):
            captured = capture(adapter, wanted, sequences.ids)
        for layer in group:
            with watch("statistics"):
                query, key = captured.pop(layer)
                found = measure_layer(
                    query,
                    key,
                    kv_head=wanted[layer].kv_head,
                    scale=sites[layer].scale,
                    soft_cap=sites[layer].soft_cap,
                    take=kept.layer(layer),
                    lengths=sequences.lengths,
                )
                measured = {name: values.cpu() for name, values in found._asdict().items()}
                del query, key
            if not all(bool(values.isfinite().all()) for values in measured.values()):
                raise DivergenceError(f"the attention of layer {layer} is not finite; check the model's weights")
            yield layer, measured


class _Result:
    """Put together what the layers give, as they come."""

    def __init__(self, layers: int, heads: int, length: int, chosen: HeadSet):
        self.statistics = {
            name: torch.full(
                (layers, heads, length) if name.startswith("eta") else (layers, heads), torch.nan, dtype=torch.float64
            )
            for name in LayerStatistics._fields
        }
        self._chosen = chosen

    def put(self, layer: int, tensors: dict[str, Tensor]) -> None:
        """Take in a layer's statistics."""
        for name, values in tensors.items():
            self.statistics[name][layer, self._chosen.in_layer(layer)] = values
