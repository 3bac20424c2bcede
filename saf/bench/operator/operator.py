"""`saf bench op`: one layer's attention without projections, the frozen heads alone or a whole layer.

Calls are eager and replayed graphs of whole layers compiled; `OpCase.runs` says why, and each row how its arm ran.
Live and frozen heads come apart, as in training, forward passes alone too: inference, whose operator has the output
product inside, is timed by `saf bench prefill`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from saf.bench.harness.arms import FREE, Arm
from saf.bench.harness.check import check_arm
from saf.bench.harness.environment import clean_process
from saf.bench.harness.kernels import kernels_of
from saf.bench.harness.kind import SpeedKind, names_flex
from saf.bench.harness.measured import Record
from saf.bench.harness.runner import Context
from saf.bench.harness.settings import QWEN_POINTS, QWEN_RATES, Point
from saf.bench.harness.shape import shape_of
from saf.bench.harness.timing import GRAPH, event_block, repeats_within, resting_ms, ways_of
from saf.bench.operator.case import Function, OpCase, OpSettings, function_of, variants_of
from saf.errors import InputError
from saf.machine.cuda_graphs import GraphPool, GraphReplay
from saf.machine.execution import Execution
from saf.records import paper
from saf.records.paper import Quoted

WORKING_SET = 128 << 20
"""Bytes that the operands of all buffers take at least, more than twice the largest second-level cache."""
MOST_BUFFERS = 12
"""More buffers would not fill a cache any better, and their memory could be missed."""
TOKENS = 32_768
"""Of a point of the grid of lengths."""
USUAL_LAYER = (12, 12, 64)
"""Query heads, KV heads and channels of a layer of the 124M model; another layer is named in documents."""


class OpSubject:
    """Check, capture and time one arm of one case, over several buffers in turn so that no cache holds them."""

    def __init__(self, case: OpCase, arm: Arm, pool: GraphPool, *, compiled: bool):
        self._case, self._arm, self._pool = case, arm, pool
        self._compiled = compiled
        function, self._pattern = function_of(case, arm)
        self._functions: dict[str, Function] = {"eager": function, "compiled": torch.compile(function)}
        self._inputs = self._buffers(case.operands(arm))
        self._gradients: list[tuple[Tensor, ...]] = []
        self._passes: dict[str, tuple[Callable[[], Any], int]] = {}

    def _buffers(self, heads: Sequence[int]) -> list[tuple[Tensor, ...]]:
        """Draw random operands `[B, heads, T, D]`, laid out as projections leave them, `[B, T, heads, D]`."""
        case = self._case
        size = case.point.batch_size * case.point.length * case.shape[2] * sum(heads) * case.dtype.itemsize
        count = min(MOST_BUFFERS, math.ceil(WORKING_SET / size)) if case.device.type == "cuda" else 1
        generator = torch.Generator(case.device).manual_seed(case.settings.seed)
        return [tuple(self._random(n, generator).requires_grad_() for n in heads if n) for _ in range(count)]

    def _random(self, heads: int, generator: torch.Generator) -> Tensor:
        case = self._case
        shape = (case.point.batch_size, case.point.length, heads, case.shape[2])
        drawn = torch.randn(shape, generator=generator, device=case.device, dtype=torch.float32)
        return drawn.to(case.dtype).transpose(1, 2)

    def _ran(self, variant: str) -> str:
        return self._case.runs(self._arm, variant, compiled=self._compiled)

    def _run(self, variant: str, number: int) -> tuple[Tensor, ...]:
        """Call once on buffer `number`: outputs, or of "both" the operands' gradients."""
        inputs, function = self._inputs[number], self._functions[self._ran(variant)]
        if variant.startswith("forward"):
            with torch.no_grad():
                return function(*inputs)
        return torch.autograd.grad(function(*inputs), inputs, self._gradients[number])

    def warm_up(self) -> None:
        """Compare with float64, run untimed, capture graphs; raise AccuracyError for a wrong result."""
        settings, device = self._case.settings, self._case.device
        variants = variants_of(settings, device)
        # Each function is checked once, however many variants it serves.
        for way in {self._ran(variant): variant.split()[1] for variant in variants}.values():
            outputs = self._run(f"forward {way}", 0)
            generator = torch.Generator(device).manual_seed(settings.seed + 1)
            heads = [output.shape[1] for output in outputs]
            self._gradients = [tuple(self._random(n, generator) for n in heads) for _ in self._inputs]
            if self._arm.backend not in (None, FREE):
                self._check(outputs[-1], way)
        for variant in variants:

            def every(variant: str = variant) -> None:
                for number in range(len(self._inputs)):
                    self._run(variant, number)

            for _ in range(settings.warmup):
                every()
            call = GraphReplay(every, device=device, pool=self._pool) if variant.endswith(GRAPH) else every
            once = event_block(call, repeats=2, device=device)
            self._passes[variant] = call, repeats_within(settings.block_ms, once, settings.repeats)

    def _check(self, output: Tensor, way: str) -> None:
        """Compare an output, and the gradient of the values where there is one, with the eager reference."""
        layout, part = self._case.layout(self._arm.rate), self._case.part
        backward = "both" in self._case.settings.directions and not layout.grouped
        gradients = self._run(f"both {way}", 0) if backward else None
        slots = list(range(layout.num_frozen) if part == "frozen" else layout.kv_head[layout.num_live :])
        assert self._pattern is not None
        check_arm(
            self._pattern,
            value=self._inputs[0][-1].detach()[:, slots],
            output=output,
            output_gradient=self._gradients[0][-1],
            value_gradient=None if gradients is None else gradients[-1][:, slots],
        )

    def timed_block(self, variant: str) -> float:
        """Return the median milliseconds of one call."""
        call, repeats = self._passes[variant]
        device = self._case.device
        rest = resting_ms(self._case.settings.rest_ms, device)
        return event_block(call, repeats=repeats, device=device, rest=rest) / len(self._inputs)

    def kernels(self) -> list[dict[str, Any]]:
        """Return the kernels of one call, with its backward pass if that is timed; those of a graph where one is."""
        direction = "both" if "both" in self._case.settings.directions else "forward"
        timed = [variant for variant in self._passes if variant.startswith(direction)]
        call, _ = self._passes[max(timed, key=lambda variant: variant.endswith(GRAPH))]
        count = len(self._inputs)
        found = kernels_of(call, self._case.device)
        return [kernel | {"calls": kernel["calls"] // count, "ms": kernel["ms"] / count} for kernel in found]


class OperatorKind(SpeedKind[OpSettings]):
    """Measure operators: the frozen heads alone, and whole layers."""

    name = "op"
    title = "One layer's attention"
    panel = "One layer's attention"
    gains = "attention"
    subject = "one layer’s attention"
    same = "the same heads or layer"
    settings = OpSettings
    grids: ClassVar = {
        "lengths": tuple(
            (length, max(1, TOKENS // length)) for length in (1024, 2048, 4096, 8192, 16384, 32768, 65536)
        ),
        "qwen": QWEN_POINTS,
    }
    grid_rates: ClassVar = {"qwen": QWEN_RATES}

    def check_shape(self, settings: OpSettings) -> None:
        """Raise InputError for an unknown shape."""
        shape_of(settings.shape, 1)

    def check_compile(self, settings: OpSettings, execution: Execution) -> None:
        """Raise InputError where compile="on" would compile nothing."""
        if settings.compile != "on" or names_flex(settings):
            return
        if "layer" not in settings.parts:
            raise InputError("compile='on' has no effect on frozen heads alone, one operator each; use --compile auto")
        if GRAPH not in ways_of(settings.graphs, execution.device):
            raise InputError("compile='on' has no effect on calls, which are eager; use --compile auto, or time graphs")

    def measure_points(self, context: Context, settings: OpSettings, points: Sequence[Point]) -> None:
        """Measure every point and part that there is time for; raise UnsupportedError for graphs without CUDA."""
        variants = variants_of(settings, context.execution.device)
        recorder, longest = context.recorder, 0.0
        for point in points:
            for part in settings.parts:
                # The baseline of a layer is the same at every rate; that of frozen heads alone is as many heads.
                rates = self.rates(settings)
                for together in [(rate,) for rate in rates] if part == "frozen" else [rates]:
                    began, device = recorder.budget.spent, context.execution.device
                    case = OpCase(settings=settings, point=point, part=part, rate=together[0], device=device)
                    _measure_case(context, case, together, variants, longest)
                    longest = max(longest, recorder.budget.spent - began)

    def unusual(self, record: Record) -> str:
        """Return in words what is unusual, another layer than that of 124M and whole groups of heads among it."""
        layers = {tuple(row["layer"].values()) for row in record["rows"] if row.get("layer")} - {USUAL_LAYER}
        words = [f"{heads} heads of {dim}, {kv_heads} of keys" for heads, kv_heads, dim in layers]
        words += ["whole groups frozen"] if record["settings"].get("whole_groups") else []
        return ", ".join(filter(None, [*words, super().unusual(record)]))

    def quoted(self, row: Record) -> Quoted | None:
        """Return the paper's speedup of Qwen3-4B's attention, forward, where a row has its shape."""
        layer, point = row["layer"], row["point"]
        qwen = (layer["num_heads"], layer["num_kv_heads"], layer["head_dim"]) == (32, 8, 128)
        forward = row["part"] == "layer" and row["variant"].startswith("forward")
        return paper.attention_speed(point["length"], point["batch_size"], row["rate"]) if qwen and forward else None


def _measure_case(
    context: Context, case: OpCase, rates: Sequence[float], variants: tuple[str, ...], longest: float
) -> None:
    """Measure every arm of one case, or record why the case is left out."""
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
