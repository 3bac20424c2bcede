"""The four speed benchmarks: one layer's attention, whole updates, whole prompts, and one more token.

Settings are a dataclass each; `measure` takes them and returns the record (`saf.bench.protocol`). What a timed call
contains stands in `OpSubject`, `UpdateSubject` and `Passes`.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saf.bench.models import (
    FlexAttention,
    ModelPlan,
    Placement,
    attention_work,
    causal_blocks,
    free_backend,
    is_folder,
    mixing_work,
    random_tokens,
    read_folder,
    shape_of,
    synthetic_patterns,
)
from saf.bench.processes import FreshSubject, compile_in_advance, measure_memory
from saf.bench.protocol import (
    CALL,
    FLEX,
    FREE,
    GRAPH,
    OUT_OF_TIME,
    PRUNED,
    REST_MS,
    SETTLE_MS,
    Arm,
    Case,
    Comparison,
    Point,
    Session,
    Subject,
    Work,
    clean_process,
    compare,
    event_block,
    kernels_of,
    plan,
    repeats_within,
    say_on_stderr,
    wait_for,
    wall_block,
    ways_of,
)
from saf.errors import AccuracyError, InputError, UnsupportedError
from saf.heads import HeadLayout
from saf.machine.cuda_graphs import Call, GraphPool, GraphReplay
from saf.machine.execution import Compile, Device, Execution, own_program
from saf.machine.processes import agreed, gathered, group_place
from saf.ops import BACKENDS, FrozenHeads, for_graphs, frozen_attention, live_attention, split_attention
from saf.ops.live import KERNELS, SPLIT
from saf.patterns import CompactPattern, Pattern
from saf.patterns.pattern import pattern_for_each_head
from saf.prefill import LastToken
from saf.train.optimizer import build_optimizer
from saf.train.parallel import Alone
from saf.train.sharing import micro_batches_of_one, parallel_of
from saf.train.updater import Updater

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BEGIN_SHARE = 0.5
"""A point begins when this share of the longest before it is left; it then ends with fewer pairs."""


@dataclass(kw_only=True)
class Speed:
    """What every speed benchmark takes."""

    kind: ClassVar[str]
    micro_batches: ClassVar[int | None] = None
    """Of a point that does not say; None where a point has none."""
    more_kernels: ClassVar[tuple[str, ...]] = ()

    model: str = "124m"
    """Preset with random weights, or a folder with its own frozen heads: a checkpoint, a run, what saf.save or
    save_pretrained wrote."""
    points: tuple[str, ...] = ("4096x8",)
    """Shapes, as context x sequences (x micro-batches of an update): 4096x8 or 4096x8x15."""
    rates: tuple[float, ...] = ()
    """Shares of heads to freeze; 0.25 and 0.5 by default, the folder's own heads of a folder."""
    backends: tuple[str, ...] = ()
    """Backends of frozen heads; by default toeplitz and, on CUDA, fused, the paper's execution; the folder's own."""
    kernels: tuple[str, ...] = ()
    """Attention kernels of live heads, on both sides of a ratio; by default cudnn on CUDA, auto on a CPU."""
    others: tuple[str, ...] | None = None
    """More kernels of ordinary attention to compare with the first: auto, cudnn, flash, efficient, math, flex. By
    default auto, flash and flex on CUDA, none on a CPU; --others alone is none."""
    free: bool = True
    """Also measure the free bound: frozen heads whose mixing costs nothing."""
    pairs: int = 8
    """Alternating pairs of each arm with its baseline; 0, beside --memory, times nothing."""
    repeats: int = 1
    """Timed calls in a timed block; the block's time is their median."""
    warmup: int = 3
    """Untimed calls of each arm."""
    tolerance: float = 0.01
    """How far from 1 the ratio of two ordinary models may be before a comparison is refused."""
    seed: int = 0
    """Random seed for weights, inputs, patterns and the choice of heads."""
    device: Device = "auto"
    """CUDA if there is one."""
    compile: Compile = "auto"
    """torch.compile: on for CUDA, off for a CPU; layers compiles decoder layers by themselves, for updates."""
    profile: bool = True
    """Record the kernels that one pass of each arm runs."""
    seconds: float | None = None
    """Stop cleanly where another measurement would not end within this, and record what was left out."""

    @property
    def execution(self) -> Execution:
        """Return the resolved device, precision and compilation."""
        return Execution.of(self.device, compile=self.compile)

    def check(self) -> list[tuple[bool, str]]:
        """Return conditions that settings must meet, each with the message where one does not."""
        kernels, known = (*self.kernels, *(self.others or ())), ("auto", FLEX, *KERNELS, *self.more_kernels)
        strange = next((name for name in kernels if name not in known), None)
        unknown = next((name for name in self.backends if name not in BACKENDS), None)
        execution = self.execution
        uncompiled = FLEX in kernels and execution.device.type == "cuda" and not execution.compile
        return [
            (min(self.pairs, self.warmup, self.seed) >= 0, "pairs, warmup and seed must be at least 0"),
            (self.repeats >= 1, f"repeats must be at least 1; got {self.repeats}"),
            (self.tolerance > 0, f"tolerance must be above 0; got {self.tolerance}"),
            (self.seconds is None or self.seconds > 0, f"seconds must be above 0; got {self.seconds}"),
            (all(0 <= rate <= 1 for rate in self.rates), f"rates must be shares in [0, 1]; got {self.rates}"),
            (strange is None, f"attention kernel must be one of {', '.join(known)}; got {strange!r}"),
            (unknown is None, f"backend must be one of {', '.join(BACKENDS)}; got {unknown!r}"),
            (not uncompiled, "flex attention is a kernel only where it is compiled; use --compile on, or leave it out"),
            (not (is_folder(self.model) and self.rates), "rates must be left out of a folder, which has its own heads"),
            (group_place()[1] == 1 or self.kind == "update", f"{self.kind} must be measured by one process"),
        ]

    def parsed_points(self) -> list[Point]:
        """Return the points; InputError for one that is not numbers joined by x."""
        most, found = 2 if self.micro_batches is None else 3, []
        for text in self.points:
            numbers = [int(part) if part.isdigit() else 0 for part in text.lower().split("x")]
            if not 2 <= len(numbers) <= most or min(numbers) < 1:
                form = (
                    "4096x8x15 (context x sequences x micro-batches)" if most == 3 else "4096x8 (context x sequences)"
                )
                raise InputError(f"a point of {self.kind} must be written {form}; got {text!r}")
            accumulation = self.micro_batches if len(numbers) == 2 else numbers[2]
            found.append(Point(numbers[0], numbers[1], accumulation))
        return found

    def comparisons(self, rates: Sequence[float], *, own: str | None = None, more: bool = True) -> list[Comparison]:
        """Return the comparisons of a point at some rates; `own` is the backend of a folder's heads.

        Unless `more`, neither other kernels nor the free bound are among them.
        """
        cuda, compiled = self.execution.device.type == "cuda", self.execution.compile
        usual = (own,) if own else ("toeplitz", "fused") if cuda else ("toeplitz",)
        others = self.others
        if others is None:
            others = ("auto", "flash", *([FLEX] if compiled else [])) if cuda else ()
        return plan(
            kernels=self.kernels or (("cudnn",) if cuda else ("auto",)),
            others=others if more else (),
            backends=self.backends or usual,
            rates=[rate for rate in dict.fromkeys(rates) if rate > 0],
            free=self.free and more,
        )

    def run(self, session: Session) -> None:
        """Measure everything that there is time for."""
        raise NotImplementedError


def measure(settings: Speed, *, out: Path | None = None, say: Callable[[str], None] = say_on_stderr) -> dict[str, Any]:
    """Run a benchmark and return its record, written to `out` after every point.

    Raises:
        InputError: Settings that name something unknown or have no effect here, or `out` exists.
        UnsupportedError: A device that is not there.
    """
    with agreed():
        settings.parsed_points()
        for holds, message in settings.check():
            if not holds:
                raise InputError(message)
        values = {field.name: getattr(settings, field.name) for field in fields(settings)}
        session = Session(settings.kind, values, settings.execution, out=out, seconds=settings.seconds, say=say)
    with session, free_backend():
        settings.run(session)
    return session.record


# One layer's attention


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


# Whole models


@dataclass(kw_only=True)
class ModelSpeed(Speed):
    """What benchmarks of whole models take."""

    graphed: ClassVar[tuple[str, ...]] = ()
    transformers_only: ClassVar[str | None] = None
    """Why this project's decoder cannot be measured; None where it can."""

    num_layers: int | None = None
    """Layers, instead of the preset's: compiling all of a large model takes minutes."""
    placement: Placement = "early"
    """Which layers have frozen heads: mostly early ones, as measured on trained models, or all alike; groups are whole
    groups of heads that share keys, in early layers."""
    per_layer: tuple[int, ...] = ()
    """Frozen heads of each layer, instead of --rates and --placement."""
    pruned: bool = False
    """Also measure each rate with the same heads pruned: their values and output columns are gone too."""
    graphs: Literal["off", "on", "both"] = "off"
    """Launch kernel by kernel, replay CUDA graphs, or both; in all arms."""
    fresh: bool = False
    """Take every timed block in a process of its own."""
    memory: bool = False
    """Also measure peak memory, one arm a process."""
    precompile: bool = False
    """First compile all arms in processes of their own, for the compiler's cache on disk."""
    workers: int = 1
    """Processes of --memory and --precompile at a time."""

    def check(self) -> list[tuple[bool, str]]:
        """Return conditions that settings must meet, each with its message."""
        folder, timed = is_folder(self.model), self.pairs > 0
        plans = [self.plan(point) for point in self.cases()]
        for each in plans:
            each.heads(Arm("auto", FREE, each.own_rate or 0.5))  # raises where a layer has fewer
        self.variants()
        idle = self.fresh or self.precompile
        compiles = self.execution.compile
        return [
            *super().check(),
            (self.num_layers is None or self.num_layers >= 1, "num_layers must be at least 1"),
            (self.workers >= 1, f"workers must be at least 1; got {self.workers}"),
            (not (self.per_layer and self.rates), "per_layer must be left out where rates are given"),
            (not self.per_layer or (min(self.per_layer) >= 0 < sum(self.per_layer)), "per_layer must freeze some head"),
            (not folder or not (self.per_layer or self.num_layers), "a folder has its own heads and layers"),
            (timed or self.memory, "pairs must be at least 1 unless memory is measured"),
            (timed or not idle, "fresh and precompile have no effect with pairs=0, which times nothing"),
            (not (self.precompile and self.fresh), "precompile has no effect with fresh, where every process compiles"),
            (compiles or not self.precompile, "precompile has no effect where models are not compiled"),
            (self.workers == 1 or self.memory or self.precompile, "workers has no effect without memory or precompile"),
            (
                self.transformers_only is None or not any(each.own_decoder for each in plans),
                f"{self.model} {self.transformers_only}",
            ),
            (
                not self.execution.by_layer or self.kind == "update",
                "compile='layers' is for updates; use 'on' or 'off'",
            ),
        ]

    def plan(self, point: Point) -> ModelPlan:
        """Return the models of a point."""
        return ModelPlan(
            model=self.model,
            length=point.length,
            device=self.execution.device,
            seed=self.seed,
            num_layers=self.num_layers,
            placement=self.placement,
            counts=self.per_layer,
        )

    def cases(self) -> list[Point]:
        """Return the points with everything that varies filled in."""
        return self.parsed_points()

    def variants(self) -> tuple[str, ...]:
        """Return what is timed of each arm; UnsupportedError for graphs without CUDA."""
        return ways_of(self.graphs, self.execution.device)

    def arms(self, point: Point) -> list[Comparison]:
        """Return the comparisons of a point."""
        plan = self.plan(point)
        if plan.folder and not plan.folder.frozen:
            rate = plan.own_rate or 0.0
            return [
                each._replace(arm=replace(each.arm, backend=PRUNED), role="pruned") if each.role == "free" else each
                for each in replace(self, free=True, backends=()).comparisons([rate], own=PRUNED)
                if each.role != "frozen"
            ]
        rates = self.rates or (0.25, 0.5) if plan.own_rate is None else [plan.own_rate]
        found = self.comparisons(rates, own=plan.folder and plan.folder.backend)
        free = {each.arm: each for each in found if each.role in ("free", "frozen")}
        pruned = dict.fromkeys((each.baseline, replace(arm, backend=PRUNED)) for arm, each in free.items())
        return found + [Comparison(*pair, "pruned") for pair in pruned] * self.pruned

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        """Return an arm that is ready to be warmed up in this process."""
        raise NotImplementedError

    def work(self, point: Point, arm: Arm) -> Work:
        """Return the work of one timed call."""
        raise NotImplementedError

    def describe(self, point: Point, arm: Arm) -> Mapping[str, Any]:
        """Return what a row says of an arm."""
        return self.plan(point).describe(arm)

    def run(self, session: Session) -> None:
        """Measure the memory, then the speed, of every arm at every point that there is time for."""
        longest = 0.0
        for point in self.cases():
            if not session.fits(BEGIN_SHARE * longest):
                session.leave_out(point.name, OUT_OF_TIME)
                continue
            began = session.spent
            comparisons = self.arms(point)
            arms = dict.fromkeys(arm for each in comparisons for arm in each[:2] if not arm.control)
            if self.memory:
                measure_memory(session, self, point, list(arms))
            if self.pairs and self.precompile:
                compile_in_advance(session, self, point, list(arms))
            if self.pairs:
                with clean_process(compiles=session.execution.compile):
                    case = self._case(session, point, comparisons)
                    compare(session, case, pairs=self.pairs, tolerance=self.tolerance, profile=self.profile)
            longest = max(longest, session.spent - began)

    def _case(self, session: Session, point: Point, comparisons: Sequence[Comparison]) -> Case:
        """Return everything that a point compares."""
        pool = GraphPool()
        return Case(
            name=point.name,
            fields={"model": self.plan(point).name, "point": point.to_dict()},
            comparisons=comparisons,
            build=lambda arm: FreshSubject(session, self, point, arm) if self.fresh else self.build(point, arm, pool),
            variants=self.variants(),
            work=lambda arm, _: self.work(point, arm),
            describe=lambda arm, _: self.describe(point, arm),
            sixteen_bit=(point.precision or session.execution.precision) != "fp32",
        )


LEARNING_RATE = 6e-8
"""The first update's of the trainer's warm-up to 6e-4 over 10,000 updates: so small that the weights stay ordinary."""
CLIP = 1.0
"""Largest gradient norm, the trainer's default."""
PRELOADED = 4
"""Micro-batches kept on the device and used in turn."""


@dataclass(kw_only=True)
class Update(ModelSpeed):
    """Time whole optimiser updates: accumulation, backward, clipping, AdamW, gradient reset; no data loading.

    Ratios are the baseline's time over the arm's: above 1 the arm is faster. With --parallel, the processes that
    `torchrun --nproc-per-node N -m saf bench update ...` started share updates.
    """

    kind: ClassVar[str] = "update"
    micro_batches: ClassVar[int | None] = 15

    points: tuple[str, ...] = ("4096x8x4",)
    warmup: int = 2
    repeats: int = 2
    """Updates in a timed block, timed as one; its time is their mean."""
    activation_checkpointing: bool = False
    """Keep only what enters each decoder layer and compute it again in the backward pass, in all arms; one more
    ordinary arm keeps everything, and shows what that costs."""
    parallel: Literal["none", "ddp", "fsdp"] = "none"
    """How the processes that torchrun started share updates. A block's time is the slowest one's. In one more arm each
    process updates an ordinary model by itself: what that takes less is what messages cost."""

    @property
    def execution(self) -> Execution:
        """Return device, precision and compilation as the trainer resolves them."""
        again = self.activation_checkpointing
        return Execution.of(self.device, compile=self.compile, activation_checkpointing=again)

    def check(self) -> list[tuple[bool, str]]:
        """Return conditions that settings must meet, each with its message."""
        together, graphed = self.parallel != "none", self.graphs != "off"
        parallel_of(self.parallel, parameters=0, execution=self.execution, trained_patterns=False)
        return [
            *super().check(),
            (not together or not (self.memory or self.fresh or self.precompile), "memory, fresh and precompile must be "
             "left out in a group of processes"),
            (not graphed or not (self.activation_checkpointing or self.memory or together),
             "activation_checkpointing, memory and parallel must be left out with CUDA graphs"),
        ]  # fmt: skip

    def variants(self) -> tuple[str, ...]:
        """Return "update", and "update graph" where passes are replayed."""
        return tuple("update" if way == CALL else f"update {way}" for way in super().variants())

    def arms(self, point: Point) -> list[Comparison]:
        """Return the comparisons; with activation checkpointing one without it, in a group one apart."""
        found = super().arms(point)
        first = found[0].baseline
        if self.activation_checkpointing:
            found.append(Comparison(first, replace(first, keeping=True), "keeping"))
        if self.parallel != "none":
            found.append(Comparison(first, replace(first, apart=True), "apart"))
        return found

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        """Return an arm that is ready to be warmed up in this process."""
        execution, (rank, processes) = self.execution, group_place()
        if arm.keeping:
            execution = replace(execution, activation_checkpointing=False)
        parallel = None
        if not arm.apart:
            parallel, _ = parallel_of(self.parallel, parameters=0, execution=execution, trained_patterns=False)
        accumulation = micro_batches_of_one(point.accumulation or 1, processes, batch_size=point.batch_size)
        plan = self.plan(point)
        tokens = random_tokens(
            min(PRELOADED, accumulation),
            point.batch_size,
            point.length,
            plan.shape.vocab_size,
            torch.Generator().manual_seed(self.seed + rank),
            execution.device,
        )
        model = plan.build(arm)
        model = model if plan.own_decoder else NextTokenLoss(model)
        how = {"parallel": parallel, "graphs": self.graphs, "warmup": self.warmup, "repeats": self.repeats}
        return UpdateSubject(model, execution, batches=tokens, accumulation=accumulation, **how)

    def work(self, point: Point, arm: Arm) -> Work:
        """Return the work of one update of an arm, of which each process has its share."""
        accumulation = (point.accumulation or 1) // group_place()[1]
        return update_work(
            self.plan(point), arm, batch=point.batch_size, length=point.length, accumulation=accumulation
        )


class NextTokenLoss(nn.Module):
    """A model of transformers that is called as this project's decoder: inputs and targets to their mean loss."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module  # under this name adapters look through it

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, nats per token, from float32 logits."""
        logits = self.module(input_ids=inputs, use_cache=False).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Preloaded:
    """Micro-batches that are on the device already, in place of the loader."""

    def __init__(self, batches: Sequence[tuple[Tensor, Tensor]]):
        self._batches, self._taken = batches, 0

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the next inputs and targets."""
        self._taken += 1
        return self._batches[self._taken % len(self._batches)]


class UpdateSubject:
    """Updates of one model with its optimiser, by the trainer's own code."""

    def __init__(
        self,
        model: nn.Module,
        execution: Execution,
        *,
        batches: Sequence[tuple[Tensor, Tensor]],
        accumulation: int,
        warmup: int,
        repeats: int,
        parallel: Any = None,
        graphs: str = "off",
    ):
        self.warmup, self.repeats, self.device = warmup, repeats, execution.device
        optimizer = build_optimizer(model.train())
        self.updaters = {
            way: Updater(
                model=model,
                optimizer=optimizer,
                batches=Preloaded(batches),
                execution=execution,
                accumulation=accumulation,
                clip=CLIP,
                parallel=parallel or Alone(),
                graphed=way == GRAPH,
            )
            for way in ways_of(graphs, execution.device)
        }
        """What makes the updates in each way that is timed."""

    def warm_up(self) -> None:
        """Compile, capture graphs where they are asked for, and run untimed updates."""
        for updater in self.updaters.values():
            # The first micro-batch runs as it is: of one in an update the second update captures.
            for _ in range(max(self.warmup, 2 * updater.graphed)):
                updater.update(LEARNING_RATE)

    def timed_block(self, variant: str) -> float:
        """Return the mean milliseconds of `repeats` updates in a row, synchronised before and after.

        Of several processes it is the time of the slowest.
        """
        return max(gathered(updates_in_a_row(self.updaters[way_of(variant)], self.repeats)))

    def kernels(self) -> list[dict[str, Any]]:
        """Return the kernels of one update, replayed where graphs are timed."""
        updater = list(self.updaters.values())[-1]
        return kernels_of(lambda: updater.update(LEARNING_RATE), self.device)


def way_of(variant: str) -> str:
    """Return how a variant runs: "graph" or "call"."""
    return GRAPH if variant.endswith(f" {GRAPH}") else CALL


def updates_in_a_row(updater: Updater, count: int) -> float:
    """Return the mean milliseconds of updates in a row, synchronised before the first and after the last."""
    device = updater.execution.device
    wait_for(device)
    began = time.perf_counter()
    for _ in range(count):
        updater.update(LEARNING_RATE)
    wait_for(device)
    return 1e3 * (time.perf_counter() - began) / count


def update_work(plan: ModelPlan, arm: Arm, *, batch: int, length: int, accumulation: int) -> Work:
    """Return the work of one optimiser update: products of all matrices, attention, AdamW in float32.

    Activations between layers are not counted as traffic: how often they move is the compiler's choice.
    """
    # An entry of a matrix: a multiplication and an addition, forward and for both gradients; 12 bytes a micro-batch:
    # its 16 bits are read forward and backward and its float32 gradient is read and written; 28 bytes by AdamW, which
    # reads weight, gradient and two moments and writes all but the gradient.
    entries = plan.shape.model_entries(plan.layouts(arm))
    mixing = mixing_work(plan, arm, batch=batch, length=length, backward=True)
    flops = accumulation * (6.0 * entries * batch * length + mixing.flops)
    return Work(flops, accumulation * (12.0 * entries + mixing.bytes) + 28.0 * entries)


@dataclass(kw_only=True)
class PassSpeed(ModelSpeed):
    """What benchmarks of forward passes take."""

    repeats: int = 40
    """Timed passes in a timed block; the block's time is their median."""
    block_ms: float = 200.0
    """Fewer repeats where a timed block would take longer than this, milliseconds."""
    settle_ms: float | None = None
    """Untimed passes before every timed block for about this long; by default 400 ms on CUDA, none on a CPU."""

    def check(self) -> list[tuple[bool, str]]:
        """Return conditions that settings must meet, each with its message."""
        settle = self.settle_ms is None or self.settle_ms >= 0
        return [*super().check(), (self.block_ms > 0 and settle, "block_ms must be above 0, settle_ms at least 0")]

    def weights(self, name: str) -> torch.dtype:
        """Return the dtype of weights by its name; "auto" is bfloat16 on CUDA."""
        usual = "bf16" if self.execution.device.type == "cuda" else "fp32"
        return DTYPES[usual if name == "auto" else name]


SAME = 2e-2
"""How far a graph's logits may be from those of a call, relative: some roundings of bfloat16. Chosen, not measured."""


class Passes:
    """Forward passes of one model, called and replayed as a CUDA graph, each a program of its own."""

    def __init__(self, settings: PassSpeed, model: nn.Module, program: Callable[[], Call], *, pool: GraphPool):
        """Take the model and what returns a new program of it, whose call returns logits without gradients."""
        self.model, self._settings, self._program, self._pool = model, settings, program, pool
        self._device = settings.execution.device
        self._calls: dict[str, tuple[Call, int, int]] = {}

    def warm_up(self) -> None:
        """Compile, run untimed, check the logits, capture the graph if one is timed and check it against a call.

        Raises:
            InputError: The logits are not finite.
            AccuracyError: Those of the graph are others.
        """
        settings = self._settings
        for way in settings.variants():
            call = self._program()
            with for_graphs(self.model) if way == GRAPH else nullcontext():
                for _ in range(settings.warmup):
                    call()
                logits = call().float()
                if not bool(logits.isfinite().all()):
                    raise InputError("the logits are not finite")
                if way == GRAPH:
                    call = self._captured(call, logits)
            once = wall_block(call, repeats=2, device=self._device)
            usual = SETTLE_MS if self._device.type == "cuda" else 0.0
            settle = usual if settings.settle_ms is None else settings.settle_ms
            self._calls[way] = call, repeats_within(settings.block_ms, once, settings.repeats), int(settle / once)

    def _captured(self, call: Call, logits: Tensor) -> GraphReplay:
        """Return the graph of a call, whose logits are compared with `logits`."""
        replay = GraphReplay(call, device=self._device, pool=self._pool)
        replay()
        error = ((replay.outcome.float() - logits).norm() / logits.norm()).item()
        if not error <= SAME:
            raise AccuracyError(f"a replayed pass is {error:.1e} from a called one, the limit is {SAME:g}")
        return replay

    def timed_block(self, variant: str) -> float:
        """Return the median milliseconds of one pass, synchronised before and after.

        Untimed passes come first: models run at the clocks that their own load leaves, which follow it slowly.
        """
        call, repeats, settle = self._calls[variant]
        return wall_block(call, repeats=repeats, device=self._device, settle=settle)

    def kernels(self) -> list[dict[str, Any]]:
        """Return the kernels of one pass, those of a graph where one is timed."""
        call, *_ = self._calls.get(GRAPH) or next(iter(self._calls.values()))
        return kernels_of(call, self._device)


PRECISIONS = {"autocast": ("bf16", torch.float32), "bf16": ("fp32", torch.bfloat16), "fp32": ("fp32", torch.float32)}
"""By name: the precision of autocast ("fp32" is none) and the dtype of weights."""


@dataclass(kw_only=True)
class Prefill(PassSpeed):
    """Time forward passes over whole prompts, with the output layer on the last token alone.

    Ratios are the baseline's time over the arm's: above 1 the arm is faster.
    """

    kind: ClassVar[str] = "prefill"

    precisions: tuple[str, ...] = ()
    """autocast (fp32 weights, bf16 autocast), bf16 (bf16 weights) or fp32; by default autocast on CUDA, fp32 on CPU."""

    def check(self) -> list[tuple[bool, str]]:
        """Return conditions that settings must meet, each with its message."""
        strange = [name for name in self.precisions if name not in PRECISIONS]
        return [*super().check(), (not strange, f"precisions must be {', '.join(PRECISIONS)}; got {strange}")]

    def cases(self) -> list[Point]:
        """Return every point at every precision."""
        usual = "autocast" if self.execution.device.type == "cuda" else "fp32"
        names = self.precisions or (usual,)
        return [replace(point, precision=name) for point in self.parsed_points() for name in names]

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        """Return passes of an arm over one batch of prompts, ready to be warmed up."""
        autocast, dtype = PRECISIONS[str(point.precision)]
        execution, plan = replace(self.execution, precision=autocast), self.plan(point)
        model = plan.build(arm, dtype).eval()
        generator = torch.Generator().manual_seed(self.seed)
        vocabulary = plan.shape.vocab_size
        drawn = random_tokens(1, point.batch_size, point.length, vocabulary, generator, execution.device)
        tokens = drawn[0][0].contiguous()
        if execution.compile:
            torch._dynamo.reset()  # what an earlier point compiled

        def program() -> Call:
            """Return what runs the model once, a program of its own where it is compiled."""
            last = LastToken(model)
            forward = last.compiled() if execution.compile else last

            def call() -> Tensor:
                with torch.no_grad(), execution.autocast():
                    return forward(tokens)

            return call

        return Passes(self, model, program, pool=pool)

    def work(self, point: Point, arm: Arm) -> Work:
        """Return the work of one forward pass with the output layer on the last token alone."""
        plan, shape = self.plan(point), self.plan(point).shape
        head, weight_bytes = shape.vocab_size * shape.hidden_size, PRECISIONS[str(point.precision)][1].itemsize
        entries = shape.model_entries(plan.layouts(arm))
        mixing = mixing_work(plan, arm, batch=point.batch_size, length=point.length, backward=False)
        products = 2.0 * point.batch_size * ((entries - head) * point.length + head)
        return Work(products + mixing.flops, weight_bytes * entries + mixing.bytes)


@dataclass(kw_only=True)
class Decode(PassSpeed):
    """Time one more token of every sequence after a filled cache of fixed size, and tell the cache's bytes.

    Ratios are the baseline's time over the arm's: above 1 the arm is faster.
    """

    kind: ClassVar[str] = "decode"
    more_kernels: ClassVar[tuple[str, ...]] = (SPLIT,)
    transformers_only: ClassVar[str | None] = "has no cache; take a model of transformers, such as llama-124m"

    model: str = "llama-124m"
    """A model of transformers: llama-124m and llama-7b, of one KV head each, qwen3-4b, of grouped queries, or a folder
    with its own frozen heads."""
    points: tuple[str, ...] = ("4096x1", "4096x8")
    """Tokens in the cache x sequences."""
    kernels: tuple[str, ...] = ("auto",)
    """Attention kernels of live heads, on both sides of a ratio. `split` takes frozen heads in its launch."""
    others: tuple[str, ...] | None = None
    """More kernels of ordinary attention to compare with the first; by default cudnn, efficient and math on CUDA, which
    take the mask that a cache of fixed size needs."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Of weights and cache; bf16 on CUDA, fp32 on a CPU."""
    graphs: Literal["off", "on", "both"] = "both"

    def comparisons(self, rates: Sequence[float], *, own: str | None = None, more: bool = True) -> list[Comparison]:
        """Return the comparisons of a point; toeplitz by default, the backend that decodes."""
        cuda = self.execution.device.type == "cuda"
        others = self.others if self.others is not None else ("cudnn", "efficient", "math") if cuda else ()
        chosen = replace(self, others=others, backends=self.backends or (own or "toeplitz",))
        return super(Decode, chosen).comparisons(rates, more=more)

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        """Return the steps of an arm after one filled cache, ready to be warmed up."""
        compiled, plan = self.execution.compile, self.plan(point)
        model = plan.build(arm, self.weights(self.dtype)).eval()
        generator = torch.Generator().manual_seed(self.seed)
        step = Step(model, point.batch_size, point.length, plan.shape.vocab_size, generator)
        if compiled:
            torch._dynamo.reset()  # what an earlier point compiled

        def program() -> Call:
            """Return what computes a step, a program of its own where it is compiled."""
            forward = step.compiled() if compiled else step

            def call() -> Tensor:
                with torch.no_grad():
                    return forward()

            return call

        return Passes(self, step, program, pool=pool)

    def cache_bytes(self, point: Point, arm: Arm) -> int:
        """Return the bytes of the keys and values of every layer, over all positions."""
        rows = [layout.rows[role] for layout in self.plan(point).layouts(arm) for role in ("key", "value")]
        position = self.plan(point).shape.head_dim * self.weights(self.dtype).itemsize
        return sum(map(len, rows)) * point.batch_size * point.length * position

    def work(self, point: Point, arm: Arm) -> Work:
        """Return the work of one step: every matrix and the cache read once; free heads read no values of their own."""
        plan, free = self.plan(point), arm.backend == FREE
        layouts, shape, element = plan.layouts(arm), plan.shape, self.weights(self.dtype).itemsize
        entries, tokens = shape.model_entries(layouts), point.batch_size * point.length * shape.head_dim
        live, frozen = sum(each.num_live for each in layouts), sum(each.num_frozen for each in layouts)
        mixing = 2.0 * tokens * (2 * live + (0 if free else frozen))
        unread = sum(len(each.rows["value"]) - len(each.rows["key"]) for each in layouts) if free else 0
        cached = self.cache_bytes(point, arm) - unread * tokens * element
        return Work(2.0 * point.batch_size * entries + mixing, float(element * entries + cached))

    def describe(self, point: Point, arm: Arm) -> Mapping[str, Any]:
        """Return what a row says of an arm: its heads, the bytes of its cache and of the baseline's."""
        sizes = {"cache_bytes": self.cache_bytes(point, arm)}
        sizes["baseline_cache_bytes"] = self.cache_bytes(point, Arm("auto"))
        return {**super().describe(point, arm), **sizes}


class Step(nn.Module):
    """The logits of one more token of every sequence, which stands at the last position of a cache."""

    def __init__(self, model: nn.Module, batch: int, positions: int, vocabulary: int, generator: torch.Generator):
        """Draw the token, and the keys and values before it."""
        from saf.integrations.random_model import random_cache

        super().__init__()
        self.model = model
        device = next(model.parameters()).device
        self.token, self.last = torch.randint(vocabulary, (batch, 1), generator=generator).to(device), positions - 1
        self.position = torch.full((batch, 1), self.last, device=device)
        self.cache, self.filled = random_cache(model, self.token, positions)

    def forward(self) -> Tensor:
        """Return logits `[B, 1, V]`."""
        self.filled.fill_(self.last)
        model: Any = self.model
        return model(input_ids=self.token, position_ids=self.position, past_key_values=self.cache).logits

    def compiled(self) -> Call:
        """Return this as a compiled program of its own."""
        return partial(torch.compile(own_program(_run), fullgraph=True, dynamic=False), self)


def _run(step: nn.Module) -> Tensor:
    """Return what a step computes."""
    return step()


KINDS: dict[str, type[Speed]] = {kind.kind: kind for kind in (Update, Prefill, Decode, Op)}
