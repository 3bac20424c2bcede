"""Timing whole interventions on one model: frozen, and unfrozen again before the next one."""

import resource
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saf.bench.freezing.model import with_moments
from saf.bench.harness.timing import wait_for
from saf.freezing.config import FreezeConfig
from saf.freezing.recipe import freeze_
from saf.freezing.report import FreezeReport
from saf.machine.execution import Execution
from saf.models import GPT
from saf.surgery import uninstall_


class Event(NamedTuple):
    """Hold what one intervention reported, its wall-clock seconds, and the largest memory meanwhile."""

    report: FreezeReport
    seconds: float
    peak_bytes: int


class Interventions:
    """Hold one model with its optimiser's moments and its calibration sequences."""

    def __init__(self, model: GPT, ids: list[Tensor], execution: Execution):
        self.model, self.ids, self.execution = model, ids, execution
        self._optimizer = with_moments(model)

    def once(self, rate: float) -> Event:
        """Calibrate, score, select, fit and install; undo it after the clock has stopped."""
        device = self.execution.device
        wait_for(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        with self.execution.autocast():
            report = freeze_(self.model, self.ids, FreezeConfig(rate=rate), optimizer=self._optimizer)
        wait_for(device)
        seconds = time.perf_counter() - began
        peak = peak_bytes(device)
        uninstall_(self.model, report.heads, optimizer=self._optimizer)
        return Event(report, seconds, peak)


def peak_bytes(device: torch.device) -> int:
    """Return the allocator's peak since its last reset on CUDA, the process's resident peak elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def row_of(first: Event, warm: Sequence[Event]) -> dict[str, Any]:
    """Return a row's fields: medians of the warm interventions stage by stage, and what the first one took longer.

    A stage's seconds are its own; `other` is what no stage counts. Medians of stages need not add up to that of the
    whole.
    """
    stages = {name: spread([_stages(event)[name] for event in warm]) for name in _stages(first)}
    total = spread([event.seconds for event in warm])
    chosen = warm[-1].report
    variance = chosen.statistics.variance.nan_to_num()
    return {
        "heads": len(chosen.heads),
        "rejected": len(chosen.rejected),
        "worst_fit_kl": max(chosen.fit_kl.values(), default=None),
        "repeats": len(warm),
        "seconds": total["median"],
        "spread": total,
        "stages": stages,
        "first_seconds": first.seconds,
        "first_stages": _stages(first),
        "first_use_seconds": first.seconds - total["median"],
        "peak_bytes": max(event.peak_bytes for event in warm),
        "same_each_time": all(
            event.report.heads == chosen.heads and torch.equal(event.report.statistics.variance.nan_to_num(), variance)
            for event in (first, *warm)
        ),
    }


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Return median, smallest, largest and all of some times."""
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "all": list(seconds)}


def _stages(event: Event) -> dict[str, float]:
    stages = dict(event.report.seconds)
    return {**stages, "other": event.seconds - sum(stages.values())}
