"""One layer's attention without projections: frozen heads alone, and the mixed layer, called and replayed as graphs.

Live and frozen heads stay separate results, as in training, forward passes alone too; inference, whose operator
includes the output product, is timed by prefill.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from saf.bench.models import (
    FlexAttention,
    FolderLayer,
    ModelPlan,
    causal_blocks,
    drawn_patterns,
)
from saf.bench.protocol import FLEX, FREE, Arm, Case, Point, Session
from saf.bench.speed import Speed, require
from saf.bench.timing import GRAPH, REST_MS, event_block, kernels_of, launch_modes, repeats_within
from saf.errors import AccuracyError, UnsupportedError
from saf.heads import HeadLayout
from saf.machine import GraphPool, GraphReplay
from saf.ops import FrozenHeads, attention_parts, frozen_attention, live_attention
from saf.patterns import Pattern, pattern_for_each_head

TOLERANCE = {torch.bfloat16: 4.5e-3, torch.float16: 1e-3, torch.float32: 1e-6, torch.float64: 1e-12}
"""Largest relative L2 error of frozen heads and of their values' gradients, inputs being in the dtype already."""
SAMPLES = 64
"""Positions compared with float64, evenly spread: all would take longer than what is timed."""
WORKING_SET = 128 << 20
"""Bytes that the operands of all buffers take at least, more than twice the largest second-level cache."""
MAX_BUFFERS = 12
BLOCK_MS = 15.0
"""Fewer repeats where a timed block would take longer than this, milliseconds."""


@dataclass(kw_only=True)
class Op(Speed):
    """Time one layer's attention without projections: frozen heads alone, and the mixed layer.

    Ratios are the baseline's time over the arm's: above 1 the arm is faster.
    """

    kind: ClassVar[str] = "op"

    points: tuple[str, ...] = ("4096x8", "16384x2")
    layer: int | None = None
    """Time this layer of a folder: by default the one with the most frozen heads."""
    parts: tuple[Literal["frozen", "layer"], ...] = ("frozen", "layer")
    """The frozen heads against the same heads as ordinary attention; the mixed layer against an ordinary one."""
    directions: tuple[Literal["forward", "both"], ...] = ("forward", "both")
    """Forward alone; forward and backward."""
    graphs: Literal["off", "on", "both"] = "both"
    """Time eager calls, replays of a CUDA graph (no launch cost, layers compiled), or both."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Dtype of the operands: bf16 on CUDA, fp32 on a CPU."""
    repeats: int = 20

    def check(self) -> None:
        super().check()
        require(self.pairs >= 1, f"pairs must be at least 1; got {self.pairs}")
        for point in self.parsed_points():
            self.folder_layer(point)
        launch_modes(self.graphs, self.execution.device)

    def folder_layer(self, point: Point) -> FolderLayer | None:
        """Return the layer of a folder's model; None for a preset."""
        folder = self.plan(point).folder
        require(folder is not None or self.layer is None, "layer must be left out of a preset, whose layers are alike")
        return folder and folder.layer(self.layer)

    def cases(self, session: Session) -> Iterator[Case]:
        for point, part in product(self.parsed_points(), self.parts):
            chosen, rates = self.folder_layer(point), list(self.rates or (0.25, 0.5))
            if chosen:
                rates = [chosen.layout.num_frozen / chosen.layout.num_heads]
            for some in [[rate] for rate in dict.fromkeys(rates)] if part == "frozen" else [rates]:
                layer = Layer(self, point, part, some, chosen)
                if (reason := layer.unsupported_reason()) is None:
                    yield layer.case()
                else:
                    session.skip(layer.name, reason)


@dataclass(frozen=True)
class Layer:
    """The whole layer of one point at several rates, or its frozen heads alone at one rate.

    Ordinary arms of "frozen" have as many heads as are frozen.
    """

    settings: Op
    point: Point
    part: str
    rates: Sequence[float]
    of_folder: FolderLayer | None
    """The layer of a folder's model; None for a preset."""

    @property
    def device(self) -> torch.device:
        """The device that is measured."""
        return self.settings.execution.device

    @cached_property
    def plan(self) -> ModelPlan:
        """The model that the layer is of."""
        return self.settings.plan(self.point)

    @property
    def name(self) -> str:
        """A label: "T=4096 B=8 frozen 25%"."""
        return f"{self.point.name} {self.part}" + (f" {100 * self.rates[0]:g}%" if self.part == "frozen" else "")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the operands."""
        return self.settings.dtype_of(self.settings.dtype)

    def unsupported_reason(self) -> str | None:
        """Return why this is not measured; None where it is."""
        shape = self.plan.shape
        if self.part == "frozen" and shape.num_heads != shape.num_kv_heads:
            return "with grouped queries frozen heads share values; only the whole layer is compared"
        if few := [rate for rate in self.rates if not self.layout(rate).num_frozen]:
            return f"a rate of {few[0]:g} freezes none of {shape.num_heads} heads"
        return None

    def layout(self, rate: float) -> HeadLayout:
        """Return the layer's heads, a preset's frozen ones drawn by the seed."""
        if self.of_folder:
            return self.of_folder.layout
        shape, generator = self.plan.shape, torch.Generator().manual_seed(self.settings.seed)
        drawn = torch.randperm(shape.num_heads, generator=generator)[: round(rate * shape.num_heads)].tolist()
        return HeadLayout(shape.num_heads, shape.num_kv_heads, tuple(sorted(drawn)))

    def operands(self, arm: Arm) -> tuple[int, int, int]:
        """Return how many query, key and value heads an arm reads."""
        layout, kv_heads = self.layout(arm.rate if arm.backend else self.rates[0]), self.plan.shape.num_kv_heads
        if self.part == "frozen":
            live = 0 if arm.backend else layout.num_frozen
            return live, live, layout.num_frozen
        if arm.backend is None:
            return layout.num_heads, kv_heads, kv_heads
        return layout.num_live, len(set(layout.kv_head[: layout.num_live])), kv_heads

    def compiled(self, arm: Arm, variant: str) -> bool:
        """Return whether an arm's function is compiled.

        Layers with frozen heads are compiled where they are replayed as graphs, as inside a compiled model, and eager
        where they are called: a compiled function checks its guards at every call, a model once for all its layers.
        Ordinary attention and frozen heads alone are one operator each, and eager; flex is a kernel only compiled.
        """
        layer = arm.backend is not None and self.part == "layer" and variant.endswith(GRAPH)
        flex = arm.backend is None and arm.kernel == FLEX
        return self.settings.execution.compile and (layer or flex)

    def case(self) -> Case:
        """Return everything that is compared; frozen heads alone have no free bound, and other kernels once."""
        alone, settings, shape = self.part == "frozen", self.settings, self.plan.shape
        comparisons = settings.comparisons(self.rates, backend=self.of_folder and self.of_folder.backend)
        if alone:
            skipped = ("free", "kernel") if "layer" in settings.parts else ("free",)
            comparisons = [each for each in comparisons if each.role not in skipped]
        sizes = {name: getattr(shape, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
        modes, pool = [*reversed(launch_modes(settings.graphs, self.device))], GraphPool()
        variants = [f"{direction} {mode}" for direction in settings.directions for mode in modes]
        return Case(
            name=self.name,
            fields={
                "part": self.part,
                "alone": self.layout(self.rates[0]).num_frozen if alone else None,
                "point": self.point.to_dict(),
                "layer": sizes,
                "number": self.of_folder and self.of_folder.number,
                "dtype": str(self.dtype).removeprefix("torch."),
            },
            comparisons=comparisons,
            build=lambda arm: LayerSubject(self, arm, pool, variants),
            variants=variants,
            describe=lambda arm: {"heads": self.layout(arm.rate).num_frozen if arm.backend else 0},
        )

    def function(self, arm: Arm) -> tuple[Callable[..., tuple[Tensor, ...]], Any]:
        """Return an arm's function of its operands, and the patterns of its frozen heads."""
        if arm.backend is None:
            if arm.kernel == FLEX:
                return FlexAttention(causal_blocks(self.point.length, self.device)), None
            return (lambda query, key, value: (live_attention(query, key, value, kernel=arm.kernel),)), None
        if arm.kernel == FLEX:
            raise UnsupportedError("flex is measured for ordinary attention only")
        layout, length, seed = self.layout(arm.rate), self.point.length, self.settings.seed
        pattern = self.of_folder.patterns if self.of_folder else None
        if pattern is None:
            pattern = drawn_patterns(arm.backend, layout.num_frozen, length, seed, self.device)
        kv_head = layout.kv_head if self.part == "layer" else None
        frozen = FrozenHeads.from_patterns(
            pattern, backend=arm.backend, dtype=self.dtype, device=self.device, kv_head=kv_head
        )

        def layer(*operands: Tensor) -> tuple[Tensor, ...]:
            """Return live and frozen heads as a model with a split output projection takes them."""
            if len(operands) == 1:
                return (frozen_attention(operands[0], frozen),)
            query, key, value = operands
            parts = attention_parts(query, key, value, frozen, kernel=arm.live_kernel)
            return parts if len(parts) == 2 else parts[0].split([query.shape[1], frozen.num_frozen], 1)

        return layer, pattern


class LayerSubject:
    """One arm of one layer: checked, captured and timed over several buffers in turn, so that no cache holds them."""

    def __init__(self, layer: Layer, arm: Arm, pool: GraphPool, variants: Sequence[str]):
        self._layer, self._arm, self._pool, self._variants = layer, arm, pool, variants
        self.facts: dict[str, Any] = {}
        function, self._pattern = layer.function(arm)
        self._functions = {False: function, True: torch.compile(function)}
        heads, point = layer.operands(arm), layer.point
        size = point.batch_size * point.length * layer.plan.shape.head_dim * sum(heads) * layer.dtype.itemsize
        count = min(MAX_BUFFERS, math.ceil(WORKING_SET / size)) if layer.settings.cuda else 1
        generator = torch.Generator(layer.device).manual_seed(layer.settings.seed)
        self._inputs = [tuple(self._draw(n, generator).requires_grad_() for n in heads if n) for _ in range(count)]
        self._gradients: list[tuple[Tensor, ...]] = []
        self._passes: dict[str, tuple[Callable[[], Any], int]] = {}

    def _draw(self, heads: int, generator: torch.Generator) -> Tensor:
        """Draw `[B, heads, T, D]`, laid out as projections leave them, `[B, T, heads, D]`."""
        layer = self._layer
        shape = (layer.point.batch_size, layer.point.length, heads, layer.plan.shape.head_dim)
        drawn = torch.randn(shape, generator=generator, device=layer.device, dtype=torch.float32)
        return drawn.to(layer.dtype).transpose(1, 2)

    def _run(self, variant: str, number: int) -> tuple[Tensor, ...]:
        inputs, function = self._inputs[number], self._functions[self._layer.compiled(self._arm, variant)]
        if variant.startswith("forward"):
            with torch.no_grad():
                return function(*inputs)
        return torch.autograd.grad(function(*inputs), inputs, self._gradients[number])

    def warm_up(self) -> None:
        settings, device = self._layer.settings, self._layer.device
        for mode in dict.fromkeys(variant.split()[1] for variant in self._variants):
            outputs = self._run(f"forward {mode}", 0)
            generator = torch.Generator(device).manual_seed(settings.seed + 1)
            self._gradients = [tuple(self._draw(each.shape[1], generator) for each in outputs) for _ in self._inputs]
            if self._arm.backend not in (None, FREE):
                self._check(outputs[-1], mode)
        for variant in self._variants:

            def every(variant: str = variant) -> None:
                for number in range(len(self._inputs)):
                    self._run(variant, number)

            for _ in range(settings.warmup):
                every()
            call = GraphReplay(every, device=device, pool=self._pool) if variant.endswith(GRAPH) else every
            once = event_block(call, repeats=2, device=device)
            self._passes[variant] = call, repeats_within(BLOCK_MS, once, settings.repeats)

    def _check(self, output: Tensor, mode: str) -> None:
        """Compare sampled outputs, and gradients of the values where these are timed, with Eq. (3) in float64."""
        layer, length = self._layer, output.shape[-2]
        layout = layer.layout(self._arm.rate)
        slots = list(range(layout.num_frozen) if layer.part == "frozen" else layout.kv_head[layout.num_live :])
        at = torch.linspace(0, length - 1, min(SAMPLES, length), device=output.device).round().long()
        every = torch.arange(length, device=output.device)
        patterns = [each.prefix(length).to(device=output.device) for each in pattern_for_each_head(self._pattern)]
        rows = [_entries(each, at[:, None], every[None]) for each in patterns]
        _compare("output", output[:, :, at], rows, self._inputs[0][-1].detach()[:, slots])
        if "both" in layer.settings.directions and not layout.grouped:
            gradient = self._run(f"both {mode}", 0)[-1][:, slots]
            columns = [_entries(each, every[None], at[:, None]) for each in patterns]
            _compare("gradient of the values", gradient[:, :, at], columns, self._gradients[0][-1])

    def timed_block(self, variant: str) -> float:
        call, repeats = self._passes[variant]
        rest = REST_MS if self._layer.settings.cuda else 0.0
        return event_block(call, repeats=repeats, device=self._layer.device, rest_ms=rest) / len(self._inputs)

    def kernels(self) -> list[dict[str, Any]]:
        timed = sorted(self._passes, key=lambda variant: (variant.startswith("both"), variant.endswith(GRAPH)))
        call, count = self._passes[timed[-1]][0], len(self._inputs)
        kernels = kernels_of(call, self._layer.device)
        return [kernel | {"calls": kernel["calls"] // count, "ms": kernel["ms"] / count} for kernel in kernels]


def _entries(pattern: Pattern, query: Tensor, key: Tensor) -> Tensor:
    """Return entries of one head's pattern in float64, of a compact one without its matrix."""
    if (compact := pattern.compact()) is None:
        return pattern.dense().double()[query, key]
    lag = query - key
    alpha, rho, log_z = compact.alpha.double(), compact.rho.double(), compact.log_z.double()
    return torch.where(lag >= 0, (alpha[key] + rho[lag.clamp(min=0)] - log_z[query]).exp(), 0.0)


def _compare(name: str, result: Tensor, weights: Sequence[Tensor], mixed: Tensor) -> None:
    """Raise AccuracyError where `result [B, F, S, D]` is not `weights` (`[S, T]` a head) times `mixed [B, F, T, D]`."""
    exact = torch.stack([each @ mixed[:, head].double() for head, each in enumerate(weights)], 1)
    error, limit = ((result.double() - exact).norm() / exact.norm()).item(), TOLERANCE[result.dtype]
    if not error <= limit:
        raise AccuracyError(f"the error against float64 of the {name} is {error:.2e}, above {limit:.1e}")
