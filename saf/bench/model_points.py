"""Measuring whole models: peak memory of each arm, then time."""

from collections.abc import Sequence

from saf.bench.arms import Arm, arms_of
from saf.bench.children import Children
from saf.bench.clean_process import clean_process
from saf.bench.context import Context
from saf.bench.grids import Point, rates_of
from saf.bench.models import ModelPlan
from saf.bench.runner import Subject
from saf.bench.settings import ModelSettings
from saf.bench.subjects import (
    FreshSubject,
    build_subject,
    cases_of,
    compile_specification,
    specification,
    variants_of,
    work_of,
)
from saf.machine.cuda_graphs import GraphPool


def measure_models(context: Context, settings: ModelSettings, points: Sequence[Point]) -> None:
    """Measure every point that there is time for; raise UnsupportedError for graphs without CUDA."""
    variants_of(settings, context.execution.device)
    recorder, longest = context.recorder, 0.0
    with Children(recorder.budget, settings.workers, recorder.say) as children:
        for point in cases_of(settings, points, context.execution.device):
            began = recorder.budget.spent
            if not recorder.budget.begins(longest):
                recorder.leave_out(point.name, "out of time")
                continue
            _measure_point(context, settings, point, children)
            longest = max(longest, recorder.budget.spent - began)


def _measure_point(context: Context, settings: ModelSettings, point: Point, children: Children) -> None:
    shape = ModelPlan.of(settings, point.length)
    comparisons = context.plan(shape.own_rate or rates_of(settings))
    if settings.memory:
        arms = [arm for arm in arms_of(comparisons) if not arm.control]
        _measure_memory(context, settings, point, arms, children)
    if settings.pairs == 0:
        return
    if settings.precompile:
        arms = [arm for arm in arms_of(comparisons) if not arm.control]
        _compile_in_advance(context, settings, point, arms, children)
    pool = GraphPool()

    def build(arm: Arm) -> Subject:
        if settings.fresh:
            return FreshSubject(settings, point, arm, children)
        return build_subject(settings, point, arm, pool)

    precision = point.precision or context.execution.precision
    fields = {"model": shape.name, "point": point.to_dict()}
    with clean_process():
        context.runner(point.name, fields, sixteen_bit=precision != "fp32").run(
            comparisons,
            build,
            variants=variants_of(settings, context.execution.device),
            work=lambda arm, _: work_of(settings, point, arm),
            describe=lambda arm, _: shape.describe(arm),
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
        told = "" if change is None else f", {change:+.2f}% against ordinary"
        recorder.say(f"{point.name} peak memory: {arm.name} {peak / 2**30:.3f} GiB{told}")
