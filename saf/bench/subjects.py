"""The subjects of whole-model benchmarks by kind, in this process or in one of their own."""

from collections.abc import Sequence
from typing import Any

import torch

from saf.bench import prefill, update
from saf.bench.arms import Arm
from saf.bench.children import Children
from saf.bench.grids import Point, kind_of
from saf.bench.runner import Subject
from saf.bench.settings import ModelSettings, PrefillSettings, UpdateSettings
from saf.bench.timing import ways_of
from saf.bench.work import Work
from saf.errors import UnsupportedError
from saf.machine.cuda_graphs import GraphPool


def variants_of(settings: ModelSettings, device: torch.device) -> tuple[str, ...]:
    """Return what is timed of each arm; raise UnsupportedError for graphs without CUDA."""
    return ways_of(settings.graphs, device) if isinstance(settings, PrefillSettings) else update.VARIANTS


def build_subject(settings: ModelSettings, point: Point, arm: Arm, pool: GraphPool) -> Subject:
    """Return an arm ready to be warmed up in this process."""
    if isinstance(settings, PrefillSettings):
        return prefill.PrefillSubject(settings, point, arm, pool)
    assert isinstance(settings, UpdateSettings)
    return update.UpdateSubject(settings, point, arm)


def work_of(settings: ModelSettings, point: Point, arm: Arm) -> Work:
    """Return the work of one timed call."""
    if isinstance(settings, PrefillSettings):
        return prefill.work_of(settings, point, arm)
    assert isinstance(settings, UpdateSettings)
    return update.work_of(settings, point, arm)


def cases_of(settings: ModelSettings, points: Sequence[Point], device: torch.device) -> list[Point]:
    """Return the points with everything that varies filled in."""
    if not isinstance(settings, PrefillSettings):
        return list(points)
    precisions = prefill.precisions_of(settings, device)
    return [Point(p.length, p.batch_size, precision=precision) for p in points for precision in precisions]


def specification(settings: ModelSettings, point: Point, arm: Arm, *, profile: bool) -> dict[str, Any]:
    """Return what a process of its own is told."""
    return {
        "kind": kind_of(settings),
        "settings": settings.to_dict(),
        "point": point.to_dict(),
        "arm": arm.to_dict(),
        "profile": profile,
    }


def compile_specification(settings: ModelSettings, point: Point, arm: Arm) -> dict[str, Any]:
    """Return what a process is told that only compiles an arm, with as little running as possible."""
    small = Point(point.length, point.batch_size, 1 if point.accumulation else None, point.precision)
    told = specification(settings, small, arm, profile=False)
    plain = {key: "off" if key == "graphs" else value for key, value in told["settings"].items()}
    return {**told, "settings": {**plain, "warmup": 1}, "only_compile": True}


class FreshSubject:
    """An arm whose every block runs in a new process; its compiled code is kept on disk between them."""

    def __init__(self, settings: ModelSettings, point: Point, arm: Arm, children: Children):
        self._children = children
        self._timed = specification(settings, point, arm, profile=False)
        self._first = specification(settings, point, arm, profile=settings.profile)
        self._kernels: list[dict[str, Any]] = []
        self._blocks: dict[str, float] = {}

    def warm_up(self) -> None:
        """Run once, so that later processes find the compiled code."""
        self._kernels = self._reply(self._first)["kernels"]

    def block(self, variant: str) -> float:
        """Return one block's milliseconds; a process times every variant once, so it serves them all."""
        if variant not in self._blocks:
            self._blocks = self._reply(self._timed)["block_ms"]
        return self._blocks.pop(variant)

    def kernels(self) -> list[dict[str, Any]]:
        """Return the kernels of one iteration."""
        return self._kernels

    def _reply(self, specification: dict[str, Any]) -> dict[str, Any]:
        reply = self._children.run([specification])[0]
        if "error" in reply:
            raise UnsupportedError(reply["error"])
        return reply
