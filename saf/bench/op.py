"""One layer's attention as an operator: the call of each arm, its operands, capture and timing."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from saf.bench.arms import FREE, Arm
from saf.bench.check import check_arm
from saf.bench.flex import FLEX, FlexAttention, causal_blocks
from saf.bench.op_case import OpCase, variants_of
from saf.bench.profiling import kernels_of
from saf.bench.synthetic import synthetic_patterns
from saf.bench.timing import event_block, repeats_within, resting_ms
from saf.cuda_graph import GraphPool, GraphReplay
from saf.errors import UnsupportedError
from saf.ops import FrozenHeads, frozen_attention, live_attention, split_attention
from saf.pattern import CompactPattern

Function = Callable[..., tuple[Tensor, ...]]
WORKING_SET = 128 << 20
"""Bytes that the operands of all buffers take at least, more than twice the largest second-level cache."""
MOST_BUFFERS = 12


class OpSubject:
    """One arm of one case, over several buffers used in turn so that no cache holds them."""

    def __init__(self, case: OpCase, arm: Arm, pool: GraphPool, *, compiled: bool):
        self._case, self._arm, self._pool = case, arm, pool
        self._pattern: CompactPattern | None = None
        function = ordinary(case, arm) if arm.backend is None else self._mixed(arm)
        # Frozen heads alone, and ordinary kernels, are one operator each: there is nothing to fuse.
        fusible = arm.kernel == FLEX if arm.backend is None else case.part == "layer"
        self._function: Function = torch.compile(function) if compiled and fusible else function
        self._inputs = self._buffers(case.operands(arm))
        self._gradients: list[tuple[Tensor, ...]] = []
        self._passes: dict[str, tuple[Callable[[], Any], int]] = {}

    def _mixed(self, arm: Arm) -> Function:
        case, layout = self._case, self._case.layout(arm.rate)
        if arm.kernel == FLEX:
            raise UnsupportedError("flex is measured for ordinary attention only")
        generator = torch.Generator().manual_seed(case.settings.seed)
        self._pattern = synthetic_patterns(layout.num_frozen, case.point.length, generator, case.device)
        kv_head = layout.kv_head if case.part == "layer" else None
        frozen = FrozenHeads.from_patterns(
            self._pattern, backend=str(arm.backend), dtype=case.dtype, device=case.device, kv_head=kv_head
        )
        if case.part == "frozen":
            return lambda value: (frozen_attention(value, frozen),)

        def layer(*operands: Tensor) -> tuple[Tensor, ...]:
            if len(operands) == 1:
                return (frozen_attention(operands[0], frozen),)
            query, key, value = operands
            parts = split_attention(query, key, value, frozen, kernel=arm.live_kernel)
            return tuple(part for part in parts if part is not None)

        return layer

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

    def _run(self, direction: str, number: int) -> tuple[Tensor, ...]:
        """Call once on buffer `number`: outputs, or after "both" the operands' gradients."""
        inputs = self._inputs[number]
        if direction == "forward":
            with torch.no_grad():
                return self._function(*inputs)
        return torch.autograd.grad(self._function(*inputs), inputs, self._gradients[number])

    def warm_up(self) -> None:
        """Compare with float64, run untimed, capture graphs; raise AccuracyError for a wrong result."""
        settings, device = self._case.settings, self._case.device
        outputs = self._run("forward", 0)
        generator = torch.Generator(device).manual_seed(settings.seed + 1)
        heads = [output.shape[1] for output in outputs]
        self._gradients = [tuple(self._random(n, generator) for n in heads) for _ in self._inputs]
        if self._arm.backend not in (None, FREE):
            self._check(outputs[-1])
        for variant in variants_of(settings, device):
            direction, way = variant.split()

            def every(direction: str = direction) -> None:
                for number in range(len(self._inputs)):
                    self._run(direction, number)

            for _ in range(settings.warmup):
                every()
            call = GraphReplay(every, device=device, pool=self._pool) if way == "graph" else every
            once = event_block(call, repeats=2, device=device)
            self._passes[variant] = call, repeats_within(settings.block_ms, once, settings.repeats)

    def _check(self, output: Tensor) -> None:
        layout, part = self._case.layout(self._arm.rate), self._case.part
        gradients = self._run("both", 0) if "both" in self._case.settings.directions and not layout.grouped else None
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
        """Return the kernels of one call, with its backward pass if that is timed."""
        direction = "both" if "both" in self._case.settings.directions else "forward"
        return kernels_of(lambda: self._run(direction, 0), self._case.device)


def ordinary(case: OpCase, arm: Arm) -> Function:
    """Return ordinary attention on an arm's kernel."""
    if arm.kernel == FLEX:
        flex = FlexAttention(causal_blocks(case.point.length, case.device))
        return lambda query, key, value: tuple(flex(query, key, value, None, None))
    return lambda query, key, value: (live_attention(query, key, value, kernel=arm.kernel),)
