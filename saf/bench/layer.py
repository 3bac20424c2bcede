"""One layer's attention without projections: frozen heads alone, and the mixed layer, called and replayed as graphs.

Live and frozen heads come apart, as in training, forward passes alone too: inference, whose operator has the output
product inside, is timed by prefill.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from saf.bench.models import (
    FlexAttention,
    attention_work,
    causal_blocks,
    is_folder,
    read_folder,
    shape_of,
    synthetic_patterns,
)
from saf.bench.protocol import (
    FLEX,
    FREE,
    GRAPH,
    OUT_OF_TIME,
    REST_MS,
    Arm,
    Case,
    Point,
    Session,
    Work,
    clean_process,
    compare,
    event_block,
    kernels_of,
    repeats_within,
    ways_of,
)
from saf.bench.speed import BEGIN_SHARE, DTYPES, Speed
from saf.errors import AccuracyError, InputError, UnsupportedError
from saf.heads import HeadLayout
from saf.machine.cuda_graphs import GraphPool, GraphReplay
from saf.ops import FrozenHeads, frozen_attention, live_attention, split_attention
from saf.patterns import CompactPattern, Pattern
from saf.patterns.pattern import pattern_for_each_head


@dataclass(kw_only=True)
class Op(Speed):
    """Time one layer's attention without projections: frozen heads alone, and the mixed layer.

    Ratios are the baseline's time over the arm's: above 1 the arm is faster.
    """

    kind: ClassVar[str] = "op"

    points: tuple[str, ...] = ("4096x8", "16384x2")
    layer: int | None = None
    """Layer of a folder whose heads are timed; by default the one with most frozen heads."""
    num_heads: int | None = None
    """Query heads, instead of the model's."""
    num_kv_heads: int | None = None
    """Key and value heads, instead of the model's."""
    head_dim: int | None = None
    """Channels of a head, instead of the model's."""
    whole_groups: bool = False
    """Freeze whole groups of heads that share keys, instead of heads by themselves."""
    parts: tuple[Literal["frozen", "layer"], ...] = ("frozen", "layer")
    """The frozen heads against the same heads as ordinary attention; the mixed layer against an ordinary one."""
    directions: tuple[Literal["forward", "both"], ...] = ("forward", "both")
    """Forward alone; forward and backward."""
    graphs: Literal["off", "on", "both"] = "both"
    """Time eager calls, replays of a CUDA graph (no launch cost, layers compiled), or both."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Of the operands; bf16 on CUDA, fp32 on a CPU."""
    repeats: int = 20
    block_ms: float = 15.0
    """Fewer repeats where a timed block would take longer than this, milliseconds."""
    rest_ms: float | None = None
    """Idle time before every timed block, so that each begins at full clocks; by default 200 ms on CUDA."""

    def check(self) -> list[tuple[bool, str]]:
        """Return conditions that settings must meet, each with its message."""
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim)
        graphed = GRAPH in ways_of(self.graphs, self.execution.device)
        compiled = self.compile != "on" or FLEX in (*self.kernels, *(self.others or ()))
        folder = is_folder(self.model)
        if folder:
            folder_layer(self)
        else:
            shape_of(self.model, 1)
        return [
            *super().check(),
            (self.pairs >= 1, f"pairs must be at least 1; got {self.pairs}"),
            (all(size is None or size >= 1 for size in sizes), f"sizes of a layer must be at least 1; got {sizes}"),
            (bool(self.parts and self.directions), "parts and directions must name one at least"),
            (self.block_ms > 0, f"block_ms must be above 0; got {self.block_ms}"),
            (self.compile != "layers", "compile='layers' is for updates; use 'auto', 'on' or 'off'"),
            (compiled or "layer" in self.parts, "compile='on' has no effect on frozen heads alone; use --compile auto"),
            (compiled or graphed, "compile='on' has no effect on calls, which are eager; time graphs, or leave it out"),
            (self.layer is None or folder, "layer has no effect on a preset; leave it out"),
            (not folder or not any(sizes), "sizes of a layer must be left out of a folder, which has its own"),
        ]

    def run(self, session: Session) -> None:
        """Measure every point and part that there is time for."""
        longest = 0.0
        for point in self.parsed_points():
            for part in self.parts:
                for rates in self._rates(part):
                    layer = OpLayer(self, point, part, rates[0], session.execution.device)
                    name = f"{point.name} {part}" + (f" {100 * rates[0]:g}%" if part == "frozen" else "")
                    reason = layer.reason_against
                    if reason is None and not session.fits(BEGIN_SHARE * longest):
                        reason = OUT_OF_TIME
                    if reason:
                        session.leave_out(name, reason)
                        continue
                    began = session.spent
                    with clean_process():
                        case = layer.case(name, rates, compiled=session.execution.compile)
                        compare(session, case, pairs=self.pairs, tolerance=self.tolerance, profile=self.profile)
                    longest = max(longest, session.spent - began)

    def _rates(self, part: str) -> list[list[float]]:
        """Return rates that share a baseline: all of a whole layer, each by itself of frozen heads alone."""
        rates = [rate for rate in dict.fromkeys(self.rates or (0.25, 0.5)) if rate > 0]
        if is_folder(self.model):
            layout, _, _ = folder_layer(self)
            rates = [layout.num_frozen / layout.num_heads]
        return [[rate] for rate in rates] if part == "frozen" else [rates]


def folder_layer(settings: Op) -> tuple[HeadLayout, list[Pattern], str]:
    """Return the layout of a folder's layer, the patterns of its frozen heads, and the backend that executes them."""
    folder = read_folder(settings.model, settings.execution.device)
    counts = [sum(at == layer for at, _ in folder.frozen) for layer in range(folder.shape.num_layers)]
    layer = counts.index(max(counts)) if settings.layer is None else settings.layer
    if not 0 <= layer < len(counts) or not counts[layer] or folder.pruned.in_layer(layer):
        raise InputError(f"layer must be one with frozen heads and none pruned; got {layer} of {counts}")
    heads = tuple(head for at, head in sorted(folder.frozen) if at == layer)
    layout = HeadLayout(folder.shape.num_heads, folder.shape.num_kv_heads, heads)
    return layout, [folder.frozen[layer, head] for head in heads], str(folder.backend)


@dataclass(frozen=True)
class OpLayer:
    """One part of one point: its heads, operands and functions. Of "frozen" ordinary arms have as many heads."""

    settings: Op
    point: Point
    part: str
    rate: float
    device: torch.device

    @property
    def own(self) -> tuple[HeadLayout, list[Pattern], str] | None:
        """Return a folder's layout, patterns and backend; None for a preset."""
        return folder_layer(self.settings) if is_folder(self.settings.model) else None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return query heads, KV heads and channels."""
        own, device = self.settings, self.settings.execution.device
        usual = read_folder(own.model, device).shape if self.own else shape_of(own.model, self.point.length)
        kv_heads = own.num_kv_heads or own.num_heads or usual.num_kv_heads
        return own.num_heads or usual.num_heads, kv_heads, own.head_dim or usual.head_dim

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the operands."""
        usual = "bf16" if self.device.type == "cuda" else "fp32"
        return DTYPES[usual if self.settings.dtype == "auto" else self.settings.dtype]

    @property
    def variants(self) -> list[str]:
        """Return what is timed: a direction, then "graph" or "call"; UnsupportedError for graphs without CUDA."""
        ways = [*reversed(ways_of(self.settings.graphs, self.device))]
        return [f"{direction} {way}" for direction in self.settings.directions for way in ways]

    @property
    def reason_against(self) -> str | None:
        """Return why this cannot be measured; None where it can."""
        heads, kv_heads, _ = self.shape
        if self.part == "frozen" and round(self.rate * heads) == 0:
            return f"a rate of {self.rate:g} freezes none of {heads} heads"
        if self.part == "frozen" and heads != kv_heads:
            return "with grouped queries frozen heads share values; only the whole layer is compared"
        return None

    def layout(self, rate: float) -> HeadLayout:
        """Return the layer's heads, the frozen ones drawn from the seed; InputError where there are none."""
        if self.own:
            return self.own[0]
        heads, kv_heads, _ = self.shape
        size = heads // kv_heads if self.settings.whole_groups else 1
        count = round(rate * heads / size)
        if count == 0:
            raise InputError(f"a rate of {rate:g} freezes none of {heads} heads" + ", whole groups" * (size > 1))
        drawn = torch.randperm(heads // size, generator=torch.Generator().manual_seed(self.settings.seed))[:count]
        return HeadLayout(heads, kv_heads, tuple(sorted(size * one + i for one in drawn.tolist() for i in range(size))))

    def operands(self, arm: Arm) -> tuple[int, int, int]:
        """Return how many query, key and value heads an arm reads."""
        heads, kv_heads, _ = self.shape
        if self.part == "frozen":
            frozen = self.layout(self.rate).num_frozen
            return (0, 0, frozen) if arm.backend else (frozen, frozen, frozen)
        if arm.backend is None:
            return heads, kv_heads, kv_heads
        layout = self.layout(arm.rate)
        return layout.num_live, len(set(layout.kv_head[: layout.num_live])), kv_heads

    def compiled(self, arm: Arm, variant: str) -> bool:
        """Return whether an arm's function is compiled where compilation is on.

        Layers with frozen heads are compiled where they are replayed as graphs, as inside a compiled model, and eager
        where they are called: a compiled function checks its guards at every call, a model once for all its layers.
        Ordinary attention and frozen heads alone are one operator each, and eager; flex is a kernel only compiled.
        """
        layer = arm.backend is not None and self.part == "layer" and variant.endswith(GRAPH)
        return layer or (arm.backend is None and arm.kernel == FLEX)

    def work(self, arm: Arm, variant: str) -> Work:
        """Return the work of one call."""
        query, key, _ = self.operands(arm)
        return attention_work(
            batch=self.point.batch_size,
            length=self.point.length,
            dim=self.shape[2],
            live=query,
            frozen=self.layout(arm.rate).num_frozen if arm.backend else 0,
            kv_heads=key,
            backward=variant.startswith("both"),
            element=self.dtype.itemsize,
            free=arm.backend == FREE,
        )

    def case(self, name: str, rates: Sequence[float], *, compiled: bool) -> Case:
        """Return everything that is compared."""
        heads, kv_heads, dim = self.shape
        alone, settings, pool = self.part == "frozen", self.settings, GraphPool()
        more = not alone or "layer" not in settings.parts
        comparisons = settings.comparisons(rates, own=self.own and self.own[2], more=more)
        if alone:
            comparisons = [each for each in comparisons if each.role != "free"]
        return Case(
            name=name,
            fields={
                "part": self.part,
                "alone": self.layout(self.rate).num_frozen if alone else None,
                "point": self.point.to_dict(),
                "layer": {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim},
                "dtype": str(self.dtype).removeprefix("torch."),
            },
            comparisons=comparisons,
            build=lambda arm: OpSubject(self, arm, pool, compiled=compiled),
            variants=self.variants,
            work=self.work,
            describe=lambda arm, variant: {
                "heads": self.layout(arm.rate).num_frozen if arm.backend else 0,
                "ran": "compiled" if compiled and self.compiled(arm, variant) else "eager",
            },
            sixteen_bit=self.dtype.itemsize == 2,
        )

    def function(self, arm: Arm) -> tuple[Callable[..., tuple[Tensor, ...]], Sequence[Pattern] | CompactPattern | None]:
        """Return an arm's function of its operands, and the patterns of its frozen heads."""
        if arm.backend is None:
            if arm.kernel == FLEX:
                flex = FlexAttention(causal_blocks(self.point.length, self.device))
                return (lambda query, key, value: flex(query, key, value, None, None)), None
            return (lambda query, key, value: (live_attention(query, key, value, kernel=arm.kernel),)), None
        if arm.kernel == FLEX:
            raise UnsupportedError("flex is measured for ordinary attention only")
        layout = self.layout(arm.rate)
        generator = torch.Generator().manual_seed(self.settings.seed)
        drawn = partial(synthetic_patterns, layout.num_frozen, self.point.length, generator, self.device)
        pattern = self.own[1] if self.own else drawn()
        kv_head = layout.kv_head if self.part == "layer" else None
        frozen = FrozenHeads.from_patterns(
            pattern, backend=str(arm.backend), dtype=self.dtype, device=self.device, kv_head=kv_head
        )

        def layer(*operands: Tensor) -> tuple[Tensor, ...]:
            """Return live and frozen heads apart, as a model with a split output projection takes them."""
            if len(operands) == 1:
                return (frozen_attention(operands[0], frozen),)
            query, key, value = operands
            parts = split_attention(query, key, value, frozen, kernel=arm.live_kernel)
            return tuple(part for part in parts if part is not None)

        return (layer if self.part == "layer" else lambda value: (frozen_attention(value, frozen),)), pattern


WORKING_SET = 128 << 20
"""Bytes that the operands of all buffers take at least, more than twice the largest second-level cache."""
MOST_BUFFERS = 12
SAMPLES = 64
"""Positions compared with float64, evenly spread: all would take longer than what is timed."""
TOLERANCE = {torch.bfloat16: 4.5e-3, torch.float16: 1e-3, torch.float32: 1e-6, torch.float64: 1e-12}
"""Largest relative L2 error of frozen heads' outputs and gradients, inputs being in the dtype already."""


class OpSubject:
    """One arm of one layer: checked, captured and timed over several buffers in turn, so that no cache holds them."""

    def __init__(self, layer: OpLayer, arm: Arm, pool: GraphPool, *, compiled: bool):
        self._layer, self._arm, self._pool, self._compiled = layer, arm, pool, compiled
        function, self._pattern = layer.function(arm)
        self._functions = {False: function, True: torch.compile(function)}
        self._inputs = self._buffers(layer.operands(arm))
        self._gradients: list[tuple[Tensor, ...]] = []
        self._passes: dict[str, tuple[Callable[[], Any], int]] = {}

    def _buffers(self, heads: Sequence[int]) -> list[tuple[Tensor, ...]]:
        """Draw random operands `[B, heads, T, D]`, laid out as projections leave them, `[B, T, heads, D]`."""
        layer = self._layer
        size = layer.point.batch_size * layer.point.length * layer.shape[2] * sum(heads) * layer.dtype.itemsize
        count = min(MOST_BUFFERS, math.ceil(WORKING_SET / size)) if layer.device.type == "cuda" else 1
        generator = torch.Generator(layer.device).manual_seed(layer.settings.seed)
        return [tuple(self._random(n, generator).requires_grad_() for n in heads if n) for _ in range(count)]

    def _random(self, heads: int, generator: torch.Generator) -> Tensor:
        layer = self._layer
        shape = (layer.point.batch_size, layer.point.length, heads, layer.shape[2])
        drawn = torch.randn(shape, generator=generator, device=layer.device, dtype=torch.float32)
        return drawn.to(layer.dtype).transpose(1, 2)

    def _is_compiled(self, variant: str) -> bool:
        return self._compiled and self._layer.compiled(self._arm, variant)

    def _run(self, variant: str, number: int) -> tuple[Tensor, ...]:
        """Call once on buffer `number`: outputs, or of "both" the operands' gradients."""
        inputs, function = self._inputs[number], self._functions[self._is_compiled(variant)]
        if variant.startswith("forward"):
            with torch.no_grad():
                return function(*inputs)
        return torch.autograd.grad(function(*inputs), inputs, self._gradients[number])

    def warm_up(self) -> None:
        """Compare with float64, run untimed, capture graphs; AccuracyError for a wrong result."""
        settings, device, variants = self._layer.settings, self._layer.device, self._layer.variants
        # Each function is checked once, however many variants it serves.
        for way in {self._is_compiled(variant): variant.split()[1] for variant in variants}.values():
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
        """Compare sampled outputs, and gradients of the values where there are any, with Eq. (3) in float64."""
        layer = self._layer
        layout = layer.layout(self._arm.rate)
        slots = list(range(layout.num_frozen) if layer.part == "frozen" else layout.kv_head[layout.num_live :])
        value, length = self._inputs[0][-1].detach()[:, slots], output.shape[-2]
        at = torch.linspace(0, length - 1, min(SAMPLES, length), device=output.device).round().long()
        every = torch.arange(length, device=output.device)
        assert self._pattern is not None
        patterns = [each.prefix(length).to(device=output.device) for each in pattern_for_each_head(self._pattern)]
        rows = [_entries(each, at[:, None], every[None]) for each in patterns]
        _compare("outputs", output[:, :, at], rows, value)
        if "both" in layer.settings.directions and not layout.grouped:
            gradient = self._run(f"both {way}", 0)[-1][:, slots]
            columns = [_entries(each, every[None], at[:, None]) for each in patterns]
            _compare("value gradients", gradient[:, :, at], columns, self._gradients[0][-1])

    def timed_block(self, variant: str) -> float:
        """Return the median milliseconds of one call."""
        (call, repeats), device = self._passes[variant], self._layer.device
        rest = self._layer.settings.rest_ms
        rest = rest if rest is not None else REST_MS if device.type == "cuda" else 0.0
        return event_block(call, repeats=repeats, device=device, rest_ms=rest) / len(self._inputs)

    def kernels(self) -> list[dict[str, Any]]:
        """Return the kernels of one call, with its backward pass if that is timed; those of a graph where one is."""
        direction = "both" if "both" in self._layer.settings.directions else "forward"
        timed = [variant for variant in self._passes if variant.startswith(direction)]
        call, _ = self._passes[max(timed, key=lambda variant: variant.endswith(GRAPH))]
        count, found = len(self._inputs), kernels_of(call, self._layer.device)
        return [kernel | {"calls": kernel["calls"] // count, "ms": kernel["ms"] / count} for kernel in found]


def _entries(pattern: Pattern, query: Tensor, key: Tensor) -> Tensor:
    """Return entries of one head's pattern in float64, of a compact one without its matrix."""
    if (compact := pattern.compact()) is None:
        return pattern.dense().double()[query, key]
    lag = query - key
    alpha, rho, log_z = compact.alpha.double(), compact.rho.double(), compact.log_z.double()
    return torch.where(lag >= 0, (alpha[key] + rho[lag.clamp(min=0)] - log_z[query]).exp(), 0.0)


def _compare(name: str, found: Tensor, weights: Sequence[Tensor], mixed: Tensor) -> None:
    """Raise AccuracyError where `found [B, F, S, D]` is not `weights` (`[S, T]` a head) times `mixed [B, F, T, D]`."""
    exact = torch.stack([each @ mixed[:, head].double() for head, each in enumerate(weights)], 1)
    error, limit = ((found.double() - exact).norm() / exact.norm()).item(), TOLERANCE[found.dtype]
    if not error <= limit:
        raise AccuracyError(f"{name} are wrong: relative error {error:.2e} against float64, the limit is {limit:.1e}")
