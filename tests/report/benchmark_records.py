"""Benchmark records with invented times, made by the code that writes real ones."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from saf.bench.harness.arms import Arm, plan
from saf.bench.harness.environment import environment
from saf.bench.harness.recorder import Recorder
from saf.bench.harness.runner import PointRunner
from saf.bench.harness.settings import Point, SpeedSettings
from saf.bench.harness.timing import Budget
from saf.bench.harness.work import Work
from saf.bench.model.update import UpdateSettings
from saf.machine.peaks import Peak

POINT = Point(4096, 8, 4)
TIMES = {
    "ordinary cudnn": [100.0, 100.4, 99.6, 100.0],
    "control cudnn": [100.0, 100.2, 99.8, 100.0],
    "25% toeplitz cudnn": [92.0, 93.0, 90.0, 94.0],
    "25% free cudnn": [88.0, 90.0, 87.0, 89.0],
    "50% toeplitz cudnn": [84.0, 86.0, 83.0, 85.0],
    "50% free cudnn": [80.0, 80.0, 80.0, 80.0],
}
"""Milliseconds of each arm's blocks, taken in turn."""


class _Timed:
    """Takes invented times, so that the real runner can measure it."""

    def __init__(self, times: Sequence[float]):
        self._times, self._asked = times, 0

    def warm_up(self) -> None:
        pass

    def timed_block(self, variant: str) -> float:
        self._asked += 1
        return self._times[(self._asked - 1) % len(self._times)]

    def kernels(self) -> list[dict[str, Any]]:
        return [{"name": "sdpa_<forward>", "calls": 1, "ms": 2.5}]


def record(
    path: Path | None = None,
    *,
    times: Mapping[str, Sequence[float]] = TIMES,
    points: Sequence[Point] = (POINT,),
    settings: SpeedSettings | None = None,
    others: Sequence[str] = (),
    fields: Mapping[str, Any] | None = None,
    variants: Sequence[str] = ("update",),
    memory: Mapping[float, int] | None = None,
) -> dict[str, Any]:
    """Return (and write) a record of arms that take `times`; an arm without any cannot run."""
    settings = settings or UpdateSettings(pairs=4, device="cpu")
    comparisons = plan(
        kernels=["cudnn"],
        others=others,
        backends=settings.backends or ("toeplitz",),
        rates=[0.25, 0.5],
        free=settings.free,
        pruned=getattr(settings, "pruned", False),
    )

    def build(arm: Arm) -> _Timed:
        if arm.name not in times:
            raise RuntimeError(f"no way to run {arm.name}.")
        return _Timed(times[arm.name])

    cpu = torch.device("cpu")
    with Recorder(
        path, kind=settings.kind, settings=settings.to_dict(), budget=Budget(), say=lambda _: None
    ) as recorder:
        recorder.trace(**environment(cpu, "Invented 9000"), processes=1)
        for point in points:
            own = {"model": "124m", "point": point.to_dict(), **(fields or {})}
            runner = PointRunner(
                recorder, settings, name=point.name, fields=own, device=cpu, peak=Peak(1e14, 1e12, "made up")
            )
            runner.run(
                comparisons,
                build,
                variants=variants,
                work=lambda arm, _: Work(2e12, 1e9),
                describe=lambda arm, _: {"heads": round(144 * arm.rate)},
            )
        for rate, size in (memory or {}).items():
            arm = Arm("cudnn", "toeplitz" if rate else None, rate)
            change = 100 * (size / memory[0] - 1) if memory else None
            entry = {"arm": arm.name, "backend": arm.backend, "rate": rate, "kind": "allocated"}
            recorder.add("memory", point=points[0].to_dict(), **entry, bytes=size, change_percent=change)
    return recorder.record
