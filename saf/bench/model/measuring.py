"""Measuring whole models: peak memory of each arm, then time."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from saf.bench.harness.arms import Arm, Comparison, arms_of
from saf.bench.harness.environment import clean_process
from saf.bench.harness.kind import SpeedKind
from saf.bench.harness.runner import Context, Subject
from saf.bench.harness.settings import Point
from saf.bench.harness.shape import shape_of
from saf.bench.harness.work import Work
from saf.bench.model.models import ModelPlan, ModelSettings
from saf.bench.model.processes import Children, FreshSubject, compile_specification, specification
from saf.errors import InputError
from saf.machine.cuda_graphs import GraphPool
from saf.machine.execution import Execution
from saf.records.quantities import signed

Asked = TypeVar("Asked", bound=ModelSettings)


class ModelKind(SpeedKind[Asked]):
    """Measure whole models, all arms of a point in one process or each timed block in one of its own."""

    @abstractmethod
    def variants(self, settings: Asked, device: torch.device) -> tuple[str, ...]:
        """Return what is timed of each arm; raise UnsupportedError for graphs without CUDA."""

    @abstractmethod
    def build(self, settings: Asked, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        """Return an arm ready to be warmed up in this process."""

    @abstractmethod
    def work(self, settings: Asked, point: Point, arm: Arm) -> Work:
        """Return the work of one timed call."""

    def describe(self, settings: Asked, plan: ModelPlan, point: Point, arm: Arm) -> Mapping[str, Any]:
        """Return what a row tells of an arm."""
        return plan.describe(arm)

    def plan(self, settings: Asked, point: Point) -> ModelPlan:
        """Return the models of a point; they take as many tokens as it has."""
        return ModelPlan.of(settings, point.length)

    def cases(self, settings: Asked, points: Sequence[Point], device: torch.device) -> list[Point]:
        """Return the points with everything that varies filled in."""
        return list(points)

    def compared(self, settings: Asked, comparisons: list[Comparison]) -> list[Comparison]:
        """Return what is compared: the usual arms, and what the settings of a kind add to them."""
        return comparisons

    def check_shape(self, settings: Asked) -> None:
        """Raise InputError for an unknown model."""
        shape_of(settings.model, 1)

    def check_compile(self, settings: Asked, execution: Execution) -> None:
        """Raise InputError where compiling in advance compiles nothing."""
        if settings.precompile and not execution.compile:
            raise InputError(
                "precompile has no effect where models are not compiled; use --compile on, or leave it out"
            )

    def measure_points(self, context: Context, settings: Asked, points: Sequence[Point]) -> None:
        """Measure every point that there is time for; raise UnsupportedError for graphs without CUDA."""
        device = context.execution.device
        self.variants(settings, device)
        recorder, longest = context.recorder, 0.0
        with Children(recorder.budget, settings.workers, recorder.say) as children:
            for point in self.cases(settings, points, device):
                began = recorder.budget.spent
                if not recorder.budget.begins(longest):
                    recorder.leave_out(point.name, "out of time")
                    continue
                self._measure_point(context, settings, point, children)
                longest = max(longest, recorder.budget.spent - began)

    def _measure_point(self, context: Context, settings: Asked, point: Point, children: Children) -> None:
        """Measure the memory, then the speed, of every arm at one point."""
        plan = self.plan(settings, point)
        comparisons = context.plan(plan.own_rate or self.rates(settings), pruned=settings.pruned)
        comparisons = self.compared(settings, comparisons)
        arms = [arm for arm in arms_of(comparisons) if not arm.control]
        if settings.memory:
            _measure_memory(context, settings, point, arms, children)
        if settings.pairs == 0:
            return
        if settings.precompile:
            _compile_in_advance(context, settings, point, arms, children)
        pool = GraphPool()

        def build(arm: Arm) -> Subject:
            if settings.fresh:
                return FreshSubject(settings, point, arm, children)
            return self.build(settings, point, arm, pool)

        precision = point.precision or context.execution.precision
        fields = {"model": plan.name, "point": point.to_dict()}
        with clean_process(compiles=context.execution.compile):
            context.runner(point.name, fields, sixteen_bit=precision != "fp32").run(
                comparisons,
                build,
                variants=self.variants(settings, context.execution.device),
                work=lambda arm, _: self.work(settings, point, arm),
                describe=lambda arm, _: self.describe(settings, plan, point, arm),
            )


def _compile_in_advance(
    context: Context, settings: ModelSettings, point: Point, arms: Sequence[Arm], children: Children
) -> None:
    """Fill the compiler's cache on disk; what fails is said and left to the warm-up, so nothing is left out yet."""
    recorder = context.recorder
    replies = children.run([compile_specification(settings, point, arm) for arm in arms])
    failed = [(arm, reply["error"]) for arm, reply in zip(arms, replies, strict=True) if "error" in reply]
    for arm, error in failed:
        recorder.say(f"{point.name} not compiled in advance: {arm.name}: {error}")
    recorder.say(f"{point.name} compiled in advance: {len(arms) - len(failed)} of {len(arms)} arms")


def _measure_memory(
    context: Context, settings: ModelSettings, point: Point, arms: Sequence[Arm], children: Children
) -> None:
    """Measure the peak memory of each arm, one a process; the first arm is ordinary."""
    recorder = context.recorder
    replies = children.run([specification(settings, point, arm, profile=False) for arm in arms])
    ordinary = replies[0].get("peak_memory_bytes")
    for arm, reply in zip(arms, replies, strict=True):
        if "error" in reply:
            recorder.leave_out(f"{point.name}: peak memory of {arm.name}", reply["error"])
            continue
        peak = reply["peak_memory_bytes"]
        change = None if ordinary is None else 100 * (peak / ordinary - 1)
        entry = {"arm": arm.name, "backend": arm.backend, "rate": arm.rate, "kind": reply["memory_kind"]}
        recorder.add("memory", point=point.to_dict(), **entry, bytes=peak, change_percent=change)
        compared = "" if change is None else f", {signed(change)} against ordinary"
        recorder.say(f"{point.name} peak memory: {arm.name} {peak / 2**30:.3f} GiB{compared}")
