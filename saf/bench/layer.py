"""The benchmark of one attention layer (`Op`): frozen heads alone, and the mixed layer, each checked in float64."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from saf.bench.models import FlexAttention, ModelShape, is_folder, shape_of
from saf.bench.protocol import (
    Arm,
    Case,
    Point,
    Ready,
    Speed,
    WarmUp,
    median_block,
    repeats_within,
    require,
)
from saf.bench.record import Row, Session, kernels_of
from saf.errors import AccuracyError, UnsupportedError
from saf.heads import HeadLayout
from saf.machine import Call, GraphPool, GraphReplay, wait_for
from saf.ops import FrozenHeads, attention_parts, frozen_attention, live_attention
from saf.patterns import Pattern, pattern_for_each_head
from saf.synthetic import draw_patterns

TOLERANCE = {torch.bfloat16: 4.5e-3, torch.float16: 1e-3, torch.float32: 1e-6, torch.float64: 1e-12}
"""Largest relative L2 error of frozen heads and of their values' gradients, inputs being in the dtype already."""
SAMPLES = 64
"""Positions compared with float64, evenly spread: comparing all takes longer than the timed work."""
WORKING_SET = 128 << 20
"""Bytes that the operands of all buffers take at least, more than twice the largest second-level cache."""
MAX_BUFFERS = 12
BLOCK_MS = 15.0
"""Fewer repeats where a timed block would take longer than this, milliseconds."""
REST_MS = 200.0
"""Idle time before a timed block on CUDA, ms: clocks are at their highest again after about 150."""


@dataclass(kw_only=True)
class Op(Speed):
    """Time one layer's attention without projections: frozen heads alone, and the mixed layer.

    Live and frozen heads stay separate results, as in training. Each is timed forward, and forward and backward. A
    ratio is the ordinary layer's time over the other's: above 1 the other is faster.
    """

    kind: ClassVar[str] = "op"

    model: str = "124m"
    """Time a layer of this preset's sizes, its frozen heads drawn."""
    points: tuple[str, ...] = ("4096x8", "16384x2")
    graphs: Literal["off", "on", "both"] = "both"
    """Time eager calls, replays of a CUDA graph (no launch cost, layers compiled), or both."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of the operands: bf16 on CUDA, fp32 on a CPU."""
    repeats: int = 20

    def cases(self, session: Session) -> list[Case]:
        """Return the frozen heads alone at each rate, and the whole layer at all rates."""
        require(not is_folder(self.model), f"model must be a preset, got {self.model}; time a folder by prefill")
        whole = self.num_layers is None and not self.pruned and not self.memory
        require(whole, "num_layers, pruned and memory are settings of whole models; leave them out")
        cases = []
        for point in self.parsed_points():
            shape, rates = shape_of(self.model, point.length), []
            for rate in dict.fromkeys(self.rates or (0.25, 0.5)):
                count = round(rate * shape.num_heads)
                if not count:
                    session.skip(point.name, f"a rate of {rate:g} freezes none of {shape.num_heads} heads")
                    continue
                rates.append(rate)
                # With grouped queries frozen heads share values: alone they are no product of as many heads.
                if shape.num_heads == shape.num_kv_heads:
                    cases.append(self._case(point, shape, [rate], alone=count))
            if rates:
                cases.append(self._case(point, shape, rates))
        return cases

    def _case(self, point: Point, shape: ModelShape, rates: Sequence[float], *, alone: int | None = None) -> Case:
        """Return the comparisons of a layer, or of as many frozen heads `alone` with as many ordinary ones."""
        comparisons = self.comparisons(rates)
        if alone:  # free heads alone do nothing, and the whole layer compares other kernels
            comparisons = [(baseline, arm) for baseline, arm in comparisons if arm.role in ("control", "frozen")]
        fields = {"part": "frozen" if alone else "layer", "alone": alone, "point": point.to_dict()}
        fields["layer"] = {each: getattr(shape, each) for each in ("num_heads", "num_kv_heads", "head_dim")}
        fields["dtype"] = str(self.dtype_of(self.dtype)).removeprefix("torch.")
        return Case(
            name=f"{point.name} frozen {100 * rates[0]:g}%" if alone else f"{point.name} layer",
            fields=fields,
            comparisons=comparisons,
            build=partial(self.build, point, alone),
            describe=lambda arm: {"heads": self.layout(shape, arm, alone).num_frozen},
        )

    def layout(self, shape: ModelShape, arm: Arm, alone: int | None) -> HeadLayout:
        """Return an arm's heads, the frozen ones of a layer drawn by the seed; `alone` there are no others."""
        if alone:
            return HeadLayout(alone, alone, tuple(range(alone)) if arm.backend else ())
        drawn = torch.randperm(shape.num_heads, generator=torch.Generator().manual_seed(self.seed)).tolist()
        frozen = sorted(drawn[: round(arm.rate * shape.num_heads)])
        return HeadLayout(shape.num_heads, shape.num_kv_heads, tuple(frozen))

    def build(self, point: Point, alone: int | None, arm: Arm, pool: GraphPool) -> WarmUp:
        shape = shape_of(self.model, point.length)
        layer = Layer(self, point, arm, self.layout(shape, arm, alone), shape.head_dim)
        return partial(layer.warm_up, pool)


class Layer:
    """One arm's layer, its function and operands: several buffers in turn, so that no cache holds them."""

    def __init__(self, settings: Op, point: Point, arm: Arm, layout: HeadLayout, head_dim: int):
        self.settings, self.arm, self.layout = settings, arm, layout
        self.device, self.dtype = settings.execution.device, settings.dtype_of(settings.dtype)
        self.shape = point.batch_size, point.length, head_dim
        self.pattern: Any = None  # of the frozen heads
        self.eager = self._function()
        self.compiled = torch.compile(self.eager)
        operands = [heads for role in ("query", "key", "value") if (heads := len(layout.rows[role]))]
        results = [heads for heads in (layout.num_live, layout.num_frozen) if heads]
        # In a model the layers between two calls replace the cache's content; several buffers in turn do it here.
        size = math.prod(self.shape) * sum(operands) * self.dtype.itemsize
        self.buffers = min(MAX_BUFFERS, math.ceil(WORKING_SET / size)) if settings.cuda else 1
        self.inputs = [[x.requires_grad_() for x in each] for each in self._draw(operands, settings.seed)]
        self.gradients = list(self._draw(results, settings.seed + 1))

    def _draw(self, heads: Sequence[int], seed: int) -> Iterator[list[Tensor]]:
        """Draw `[B, heads, T, D]` for each buffer, laid out as projections leave them, `[B, T, heads, D]`."""
        generator, (batch_size, length, head_dim) = torch.Generator(self.device).manual_seed(seed), self.shape
        for _ in range(self.buffers):
            shapes = [(batch_size, length, count, head_dim) for count in heads]
            # Drawn in float32, so that all dtypes round the same numbers.
            drawn = [torch.randn(shape, generator=generator, device=self.device) for shape in shapes]
            yield [x.to(self.dtype).transpose(1, 2) for x in drawn]

    def _function(self) -> Callable[..., tuple[Tensor, ...]]:
        """Return ordinary attention, the mixed layer, or without live heads its frozen ones, which take only values."""
        arm, layout = self.arm, self.layout
        if arm.backend is None and arm.kernel == "flex":
            return FlexAttention(self.shape[1], self.device)
        if arm.backend is None:
            return lambda query, key, value: (live_attention(query, key, value, kernel=arm.kernel),)
        if arm.kernel == "flex":
            raise UnsupportedError("flex is measured for ordinary attention only")
        self.pattern = draw_patterns(arm.backend, layout.num_frozen, self.shape[1], self.settings.seed, self.device)
        kv_head = layout.kv_head if layout.num_live or layout.grouped else None
        frozen = FrozenHeads.from_patterns(
            self.pattern, backend=arm.backend, dtype=self.dtype, device=self.device, kv_head=kv_head
        )
        if not layout.num_live:
            return lambda value: (frozen_attention(value, frozen),)

        def layer(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
            """Return live and frozen heads as a model with a split output projection takes them."""
            parts = attention_parts(query, key, value, frozen, kernel=arm.live_kernel)
            return parts if len(parts) == 2 else parts[0].split([query.shape[1], frozen.num_frozen], 1)

        return layer

    def run(self, direction: str, mode: str, buffer: int) -> tuple[Tensor, ...]:
        """Return the outputs of the direction "forward", or the operands' gradients of "both"."""
        # Layers with frozen heads are compiled where they are replayed as graphs, as inside a compiled model, and eager
        # where they are called: a compiled function checks its guards at every call, a model once for all its layers.
        # Ordinary attention and frozen heads alone are one operator each, and eager; flex is a kernel only compiled.
        in_graph = self.arm.backend is not None and self.layout.num_live > 0 and mode == "graph"
        compiled = in_graph or self.arm.kernel == "flex"
        function = self.compiled if compiled and self.settings.execution.compile else self.eager
        inputs = self.inputs[buffer]
        if direction == "forward":
            with torch.no_grad():
                return function(*inputs)
        return torch.autograd.grad(function(*inputs), inputs, self.gradients[buffer])

    def warm_up(self, pool: GraphPool) -> Ready:
        """Check the frozen heads in each launch mode, capture what is replayed, and choose the repeats of a block."""
        modes = self.settings.launch_modes()[::-1]  # graphs first, the order of their rows in a record
        blocks, calls = {}, {}
        for mode in modes if self.arm.backend not in (None, "free") else ():
            self.check(mode)
        for direction, mode in product(("forward", "both"), modes):

            def every(direction: str = direction, mode: str = mode) -> None:
                for buffer in range(self.buffers):
                    self.run(direction, mode, buffer)

            for _ in range(self.settings.warmup):
                every()
            call = GraphReplay(every, device=self.device, pool=pool) if mode == "graph" else every
            once = self.timed_block(call, 2, rest_ms=0.0) * self.buffers
            repeats = repeats_within(BLOCK_MS, once, self.settings.repeats)
            calls[mode] = call  # the last one stays, forward and backward
            blocks[f"{direction} {mode}"] = partial(self.timed_block, call, repeats)
        return Ready(blocks, partial(self.kernels, calls[modes[0]]), {})

    def check(self, mode: str) -> None:
        """Compare sampled outputs, and but for grouped queries gradients of the values, with Eq. (3) in float64."""
        layout, length = self.layout, self.shape[1]
        slots = list(layout.kv_head[layout.num_live :])
        at = torch.linspace(0, length - 1, min(SAMPLES, length), device=self.device).round().long()
        every = torch.arange(length, device=self.device)
        patterns = [each.prefix(length).to(device=self.device) for each in pattern_for_each_head(self.pattern)]
        rows = [_entries(each, at[:, None], every[None]) for each in patterns]
        output = self.run("forward", mode, 0)[-1]
        _compare("output", output[:, :, at], rows, self.inputs[0][-1].detach()[:, slots])
        if not layout.grouped:
            gradient = self.run("both", mode, 0)[-1][:, slots]
            columns = [_entries(each, every[None], at[:, None]) for each in patterns]
            _compare("gradient of the values", gradient[:, :, at], columns, self.gradients[0][-1])

    def timed_block(self, call: Call, repeats: int, *, rest_ms: float = REST_MS) -> float:
        """Return the median milliseconds of the layer in `repeats` calls, on CUDA between events, after an idle time.

        A GPU at its power limit lowers its clocks some 20 ms after a demanding arm began and raises them over more than
        100 ms: short blocks after a rest see neither (docs/log.md).
        """
        if not self.settings.cuda:
            return median_block(call, repeats=repeats, device=self.device) / self.buffers
        wait_for(self.device)
        time.sleep(1e-3 * rest_ms)
        # Events, not the host's clock: calls of microseconds are submitted without waiting for the one before.
        events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
        for start, end in events:
            start.record()
            call()
            end.record()
        wait_for(self.device)
        return statistics.median(start.elapsed_time(end) for start, end in events) / self.buffers

    def kernels(self, call: Call) -> list[Row]:
        # A call runs the layer once on each buffer.
        kernels, count = kernels_of(call, self.device), self.buffers
        return [kernel | {"calls": kernel["calls"] // count, "ms": kernel["ms"] / count} for kernel in kernels]


def _entries(pattern: Pattern, query: Tensor, key: Tensor) -> Tensor:
    """Return entries of one head's pattern in float64, of a compact one without its matrix."""
    if (compact := pattern.compact()) is None:
        return pattern.dense().double()[query, key]
    lag = query - key
    alpha, rho, log_z = compact.alpha.double(), compact.rho.double(), compact.log_z.double()
    # Eq. (3): P(i, j) = exp(alpha(j) + rho(i - j)) / Z(i), and 0 for later keys
    return torch.where(lag >= 0, (alpha[key] + rho[lag.clamp(min=0)] - log_z[query]).exp(), 0.0)


def _compare(name: str, result: Tensor, weights: Sequence[Tensor], mixed: Tensor) -> None:
    """Raise AccuracyError where `result [B, F, S, D]` is not `weights` (`[S, T]` a head) times `mixed [B, F, T, D]`."""
    exact = torch.stack([each @ mixed[:, head].double() for head, each in enumerate(weights)], 1)
    error, limit = ((result.double() - exact).norm() / exact.norm()).item(), TOLERANCE[result.dtype]
    if not error <= limit:
        raise AccuracyError(f"the error against float64 of the {name} is {error:.2e}, above {limit:.1e}")
