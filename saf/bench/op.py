"""One layer's attention as an operator: operands, check, capture and timing of each arm's function.

Calls are eager and replayed graphs of whole layers compiled; `OpCase.runs` says why, and each row how its arm ran.
Live and frozen heads come apart, as in training, forward passes alone too: inference, whose operator has the output
product inside, is timed by `saf bench prefill`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from saf.bench.arms import FREE, Arm
from saf.bench.check import check_arm
from saf.bench.op_case import OpCase, variants_of
from saf.bench.op_function import Function, function_of
from saf.bench.profiling import kernels_of
from saf.bench.timing import GRAPH, event_block, repeats_within, resting_ms
from saf.machine.cuda_graphs import GraphPool, GraphReplay

WORKING_SET = 128 << 20
"""Bytes that the operands of all buffers take at least, more than twice the largest second-level cache."""
MOST_BUFFERS = 12


class OpSubject:
    """One arm of one case, over several buffers used in turn so that no cache holds them."""

    def __init__(self, case: OpCase, arm: Arm, pool: GraphPool, *, compiled: bool):
        self._case, self._arm, self._pool = case, arm, pool
        self._compiled = compiled
        function, self._pattern = function_of(case, arm)
        self._functions: dict[str, Function] = {"eager": function, "compiled": torch.compile(function)}
        self._inputs = self._buffers(case.operands(arm))
        self._gradients: list[tuple[Tensor, ...]] = []
        self._passes: dict[str, tuple[Callable[[], Any], int]] = {}

    def _buffers(self, heads: Sequence[int]) -> list[tuple[Tensor, ...]]:
        """Random operands `[B, heads, T, D]`, laid out as projections leave them, `[B, T, heads, D]`."""
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

    def block(self, variant: str) -> float:
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
