"""The dense collection of some layers: its time beside the tile loop's, and whether both agree."""

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from saf.adapters import adapter_for
from saf.bench.freezing.intervention import Interventions
from saf.bench.harness.timing import Budget, wait_for
from saf.calibration import dense_collection, plan_calibration
from saf.calibration.capture import Captured, Wanted, capture, evaluation_mode
from saf.calibration.layer import LayerStatistics
from saf.calibration.plan import free_bytes
from saf.statistics import AttentionStatistics

HELD = 6
"""Arrays [heads, T, T] that the dense collection holds at its peak."""
CPU_BYTES = 1 << 30
"""Memory for these arrays on a CPU, which does not tell what is free: little beside what a model takes."""
AGREEMENT = 1e-4
"""Largest relative difference of a statistic from float64 for which times are compared."""


def measure_dense(
    interventions: Interventions, statistics: AttentionStatistics, *, layers: int, budget: Budget
) -> dict[str, Any] | None:
    """Return a row's fields: seconds of collecting all layers densely in float32, extrapolated from the first ones.

    The queries and keys are those of the interventions. `difference` is how far the intervention's `statistics` are
    from a dense collection in float64 (`float32_difference` the timed one's), relative to the head's largest entry.
    None when there is no time for a layer.
    """
    model = interventions.model
    adapter = adapter_for(model)
    with torch.no_grad(), evaluation_mode(model), interventions.execution.autocast():
        plan = plan_calibration(model, interventions.ids)
        wanted = {
            layer: Wanted.of(adapter.sites()[layer], plan.heads.in_layer(layer)) for layer in plan.layers[:layers]
        }
        captured = capture(adapter, wanted, interventions.ids)
    times: list[float] = []
    worst = dict.fromkeys(LayerStatistics._fields, 0.0)
    plain_worst = 0.0
    for layer, parts in captured.items():
        if not budget.fits(times[-1] if times else 0):
            break
        if not times:
            next(_collect(parts, wanted[layer], torch.float32))
        wait_for(parts[0].device)
        began = time.perf_counter()
        plain = _joined(_collect(parts, wanted[layer], torch.float32))
        wait_for(parts[0].device)
        times.append(time.perf_counter() - began)
        exact = _joined(_collect(parts, wanted[layer], torch.float64))
        for name, reference in exact.items():
            ours = getattr(statistics, name)[layer, plan.heads.in_layer(layer)]
            worst[name] = max(worst[name], _difference(ours, reference))
            plain_worst = max(plain_worst, _difference(plain[name], reference))
    if not times:
        return None
    return {
        "layers": len(times),
        "of_layers": len(plan.layers),
        "extrapolated": len(times) < len(plan.layers),
        "layer_seconds": times,
        "seconds": sum(times) / len(times) * len(plan.layers),
        "difference": worst,
        "float32_difference": plain_worst,
        "agrees": max(worst.values()) <= AGREEMENT,
        "bar_difference": AGREEMENT,
    }


def _collect(parts: Captured, wanted: Wanted, dtype: torch.dtype) -> Iterator[LayerStatistics]:
    """Yield the statistics of as many heads at a time as fit."""
    query, key = parts
    free = free_bytes(query.device)
    budget = CPU_BYTES if query.device.type == "cpu" or free is None else free // 2
    together = max(1, budget // (HELD * query.shape[2] ** 2 * dtype.itemsize))
    for first in range(0, query.shape[1], together):
        last = min(first + together, query.shape[1])
        yield dense_collection(query[:, first:last], key, kv_head=wanted.kv_head[first:last], dtype=dtype)


def _joined(parts: Iterator[LayerStatistics]) -> dict[str, Tensor]:
    columns = zip(*parts, strict=True)
    return {name: torch.cat(column).cpu() for name, column in zip(LayerStatistics._fields, columns, strict=True)}


def _difference(found: Tensor, reference: Tensor) -> float:
    """Return the largest difference of a head, relative to the head's largest entry; 0 where both vanish."""
    found, reference = found.reshape(len(found), -1), reference.reshape(len(reference), -1)
    size = reference.abs().amax(1).clamp(min=torch.finfo(torch.float64).tiny)
    worst = ((found - reference).abs().amax(1) / size).max().item()
    return math.inf if math.isnan(worst) else worst
