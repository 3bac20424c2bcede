"""Measuring operators: the frozen heads alone, and whole layers."""

from collections.abc import Sequence

from saf.bench.clean_process import clean_process
from saf.bench.context import Context
from saf.bench.grids import Point, rates_of
from saf.bench.op import OpSubject
from saf.bench.op_case import OpCase, variants_of
from saf.bench.settings import OpSettings
from saf.machine.cuda_graphs import GraphPool


def measure_operators(context: Context, settings: OpSettings, points: Sequence[Point]) -> None:
    """Measure every point and part that there is time for; raise UnsupportedError for graphs without CUDA."""
    variants = variants_of(settings, context.execution.device)
    recorder, longest = context.recorder, 0.0
    for point in points:
        for part in settings.parts:
            # The baseline of a layer is the same at every rate; that of frozen heads alone is as many heads.
            for rates in [(rate,) for rate in rates_of(settings)] if part == "frozen" else [rates_of(settings)]:
                began = recorder.budget.spent
                case = OpCase(settings=settings, point=point, part=part, rate=rates[0], device=context.execution.device)
                _measure_case(context, case, rates, variants, longest)
                longest = max(longest, recorder.budget.spent - began)


def _measure_case(
    context: Context, case: OpCase, rates: Sequence[float], variants: tuple[str, ...], longest: float
) -> None:
    alone = case.part == "frozen"
    name = f"{case.point.name} {case.part}" + (f" {100 * case.rate:g}%" if alone else "")
    reason = case.reason_against
    if reason is None and not context.recorder.budget.begins(longest):
        reason = "out of time"
    if reason:
        context.recorder.leave_out(name, reason)
        return
    comparisons = context.plan(rates, others=not alone or "layer" not in case.settings.parts, free=not alone)
    heads, kv_heads, dim = case.shape
    fields = {
        "part": case.part,
        "alone": case.layout(case.rate).num_frozen if alone else None,
        "point": case.point.to_dict(),
        "layer": {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim},
        "dtype": str(case.dtype).removeprefix("torch."),
    }
    compiled = context.execution.compile
    with clean_process():
        pool = GraphPool()
        context.runner(name, fields, sixteen_bit=case.dtype.itemsize == 2).run(
            comparisons,
            lambda arm: OpSubject(case, arm, pool, compiled=compiled),
            variants=variants,
            work=case.work,
            describe=lambda arm, variant: {
                "heads": case.layout(arm.rate).num_frozen if arm.backend else 0,
                "ran": case.runs(arm, variant, compiled=compiled),
            },
        )
