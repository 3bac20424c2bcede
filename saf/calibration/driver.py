"""`calibrate`: run the model, keep queries and keys of some layers at a time, measure them tile by tile."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from saf.adapters import Site, adapter_for
from saf.calibration.capture import (
    Batch,
    capture,
    evaluation_mode,
    hash_of,
    layer_groups,
    live_kv_index,
    read_batches,
)
from saf.calibration.collect import COLLECT_BYTES, Collection
from saf.calibration.tiles import LayerStatistics, Take, measure_layer
from saf.errors import DivergenceError, InputError
from saf.heads import Head, HeadSet
from saf.statistics import AttentionStatistics
from saf.stopwatch import Stopwatch


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
        batches: LongTensors `[B, T]` of token ids, or mappings with `input_ids`; one T.
        collect: What to keep beside the statistics, names of `saf.statistics.COLLECTIONS`.
        heads: The heads to measure; all live heads if not given. Others are NaN.
        positions: Query positions of `mean_rows`, `rows` and `logit_rows`; 64, evenly over the latter half of T, if
            not given.
        collect_limit: Most bytes that `collect` may keep (on the CPU); computed and checked before the model runs.
        capture_bytes: Most memory for queries and keys kept at once; more layers at a time mean fewer passes.
        progress: Called with (layers done, layers).
        watch: Adds the seconds of running the model (`capture`) and of the tile loop (`statistics`).

    Returns:
        Exact statistics of all sequences together; no `T x T` array is held but those asked for.

    Raises:
        InputError: No sequences, unequal lengths, or ids that are not a `[B, T]` integer tensor; heads that are
            not live, unknown names to collect, or more to collect than `collect_limit`.
        DivergenceError: Queries or keys that are not finite.
    """
    adapter = adapter_for(model)
    sites = adapter.sites()
    ids = read_batches(batches)
    sequences, length = sum(len(batch) for batch in ids), ids[0].shape[1]
    chosen = live_heads(sites) if heads is None else _check_heads(sites, heads)
    dtype = torch.float64 if sites[0].projections()["query"][0].dtype == torch.float64 else torch.float32
    kept = Collection(
        collect, chosen, sequences=sequences, length=length, positions=positions, limit=collect_limit, dtype=dtype
    )
    shape = (len(sites), sites[0].layout.num_heads)
    result = {
        name: torch.full((*shape, length) if name.startswith("eta") else shape, torch.nan, dtype=torch.float64)
        for name in LayerStatistics._fields
    }
    layers = sorted({layer for layer, _ in chosen})
    watch = Stopwatch() if watch is None else watch
    with torch.no_grad(), evaluation_mode(model):
        for group in layer_groups(sites, layers, sequences * length, capture_bytes):
            with watch("capture"):
                captured = capture(adapter, group, ids)
            for layer in group:
                wanted = chosen.in_layer(layer)
                with watch("statistics"):
                    measured = _measure(sites[layer], wanted, *captured.pop(layer), kept.layer(layer))
                if not all(bool(values.isfinite().all()) for values in measured):
                    raise DivergenceError(f"the attention of layer {layer} is not finite; check the model's weights")
                for name, values in measured._asdict().items():
                    result[name][layer, wanted] = values.cpu()
                if progress is not None:
                    progress(layers.index(layer) + 1, len(layers))
    return AttentionStatistics(
        **result,
        length=length,
        num_sequences=sequences,
        sequences_hash=hash_of(torch.cat(ids)),
        collected=kept.tensors,
        collected_heads=chosen if kept.tensors else HeadSet(),
        positions=kept.positions,
    )


def live_heads(sites: Sequence[Site]) -> HeadSet:
    """Return the heads of a model that compute ordinary attention."""
    return HeadSet((layer, head) for layer, site in enumerate(sites) for head in site.layout.live)


def _check_heads(sites: Sequence[Site], heads: Iterable[Head]) -> HeadSet:
    chosen = HeadSet(heads)
    if len(missing := chosen - live_heads(sites)):
        raise InputError(f"only live heads can be measured; these are frozen or do not exist: {missing.to_list()}")
    return chosen


def _measure(site: Site, wanted: list[int], query: Tensor, key: Tensor, take: Take | None) -> LayerStatistics:
    slots = [site.layout.live.index(head) for head in wanted]
    kv_index = live_kv_index(site)
    if len(slots) < query.shape[1]:
        query = query[:, slots]
    return measure_layer(query, key, kv_head=[kv_index[slot] for slot in slots], take=take)
