"""What `saf bench` times: optimiser updates, prompts, one more token after a filled cache, and one attention layer.

Each benchmark is a class of settings whose `build` (of a layer, `cases`) returns the subject of an arm.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, product
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saf.bench.models import FlexAttention, causal_blocks, drawn_patterns, is_folder
from saf.bench.protocol import (
    CALL,
    FLEX,
    FREE,
    GRAPH,
    REST_MS,
    SETTLE_MS,
    Arm,
    Case,
    Point,
    Session,
    Subject,
    event_block,
    kernels_of,
    launch_modes,
    mean_block,
    repeats_within,
    wall_block,
)
from saf.bench.speed import ModelSpeed, Speed, require
from saf.distributed import all_gather, rank_and_size
from saf.errors import AccuracyError, InputError, UnsupportedError
from saf.heads import HeadLayout
from saf.machine import Call, Execution, GraphPool, GraphReplay, own_program
from saf.ops import FrozenHeads, attention_parts, for_graphs, frozen_attention, live_attention
from saf.patterns import Pattern, pattern_for_each_head
from saf.prefill import LastToken
from saf.train.step import Parallel, Updater, build_optimizer, micro_batches_per_rank, parallel_of

# --- updates

LEARNING_RATE = 6e-8
"""The first update's of the trainer's warm-up to 6e-4 over 10,000 updates: so small that the weights stay ordinary."""
CLIP = 1.0
"""Largest gradient norm, the trainer's default."""
PRELOADED = 4
"""Micro-batches that are on the device and used in turn."""


@dataclass(kw_only=True)
class Update(ModelSpeed):
    """Time whole optimiser updates: accumulation, backward, clipping, AdamW, gradient reset; no data loading.

    A ratio is the ordinary model's time over the other's: above 1 the other is faster. With --parallel, the processes
    of `torchrun --nproc-per-node N -m saf bench update ...` share updates.
    """

    kind: ClassVar[str] = "update"
    micro_batches: ClassVar[int | None] = 15

    points: tuple[str, ...] = ("4096x8x4",)
    warmup: int = 2
    repeats: int = 2
    """Updates in a timed block, timed as one; its time is their mean."""
    activation_checkpointing: bool = False
    """Keep only the input of each decoder layer and recompute the rest in the backward pass, in all arms."""
    parallel: Literal["none", "ddp", "fsdp"] = "none"
    """How the processes that torchrun started share updates; a block's time is the slowest one's."""

    @property
    def execution(self) -> Execution:
        return replace(super().execution, activation_checkpointing=self.activation_checkpointing)

    def check(self) -> None:
        super().check()
        self._parallel()
        alone = self.parallel == "none" or not (self.memory or self.fresh)
        require(alone, "memory and fresh must be left out in a group of processes")
        require(self.graphs == "off" or not self.memory, "memory must be left out with CUDA graphs")

    def _parallel(self) -> Parallel:
        # The number of parameters decides for "auto" alone, which is no value of this setting.
        return parallel_of(self.parallel, parameters=0, execution=self.execution)

    def variants(self) -> tuple[str, ...]:
        return tuple("update" if mode == CALL else f"update {mode}" for mode in super().variants())

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        rank, processes = rank_and_size()
        accumulation = micro_batches_per_rank(point.accumulation or 1, processes, batch_size=point.batch_size)
        models = self.plan(point)
        # Each rank has tokens of its own, as in training.
        batches = models.tokens(min(PRELOADED, accumulation), point.batch_size, seed=self.seed + rank)
        model = models.build(arm)
        if not models.own_decoder:
            model = NextTokenLoss(model)
        parallel = self._parallel()
        return UpdateSubject(self, model, batches=batches, accumulation=accumulation, parallel=parallel)


class NextTokenLoss(nn.Module):
    """A model of transformers with the signature of this project's decoder: inputs and targets to their mean loss."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module  # the name by which adapters look through wrappers

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.module(input_ids=inputs, use_cache=False).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class UpdateSubject(Subject):
    """Updates of one model with its optimiser, by the trainer's own code: one `Updater` for each launch mode."""

    def __init__(
        self,
        settings: ModelSpeed,
        model: nn.Module,
        *,
        batches: Sequence[tuple[Tensor, Tensor]],
        accumulation: int,
        parallel: Parallel | None = None,
    ):
        execution = settings.execution
        self.settings, self.device = settings, execution.device
        optimizer = build_optimizer(model.train())
        self.updaters = {
            mode: Updater(
                model=model,
                optimizer=optimizer,
                batches=cycle(batches),
                execution=execution,
                accumulation=accumulation,
                clip=CLIP,
                parallel=parallel or Parallel(),
                graphed=mode == GRAPH,
            )
            for mode in launch_modes(settings.graphs, execution.device)
        }

    def warm_up(self) -> None:
        for updater in self.updaters.values():
            # With one micro-batch an update, the second update captures: the first micro-batch runs as it is.
            for _ in range(max(self.settings.warmup, 2 if updater.graphed else 0)):
                updater.update(LEARNING_RATE)

    def timed_block(self, variant: str) -> float:
        # The slowest rank's time: all wait for it at the next exchange of gradients.
        return max(all_gather(updates_in_a_row(self.updaters[launch_mode(variant)], self.settings.repeats)))

    def kernels(self) -> list[dict[str, Any]]:
        updater = list(self.updaters.values())[-1]
        return kernels_of(lambda: updater.update(LEARNING_RATE), self.device)


def launch_mode(variant: str) -> str:
    """Return how a variant runs: "graph" or "call"."""
    return GRAPH if variant.endswith(f" {GRAPH}") else CALL


def updates_in_a_row(updater: Updater, count: int) -> float:
    """Return the mean milliseconds of updates in a row, as training makes them."""
    return mean_block(lambda: updater.update(LEARNING_RATE), repeats=count, device=updater.execution.device)


# --- forward passes

PASS_BLOCK_MS = 200.0
"""Fewer repeats where a timed block of passes would take longer than this, milliseconds."""
MAX_GRAPH_ERROR = 2e-2
"""Largest relative error of a graph's logits from a call's: some roundings of bfloat16, as layers may take other
kernels in graphs. Chosen, not measured."""


@dataclass(kw_only=True)
class PassSpeed(ModelSpeed):
    """Settings of benchmarks of forward passes."""

    repeats: int = 40
    """Timed passes in a timed block; the block's time is their median."""
    settle_ms: float | None = None
    """Untimed passes before every timed block for about this long; by default 400 ms on CUDA, none on a CPU."""


class Passes(Subject):
    """Forward passes of one module over fixed inputs, called and replayed as a graph, each a program of its own."""

    def __init__(
        self,
        settings: PassSpeed,
        model: Any,
        inputs: tuple[Any, ...],
        execution: Execution,
        pool: GraphPool,
        facts: dict[str, Any] | None = None,
    ):
        """Take a module with a method `compiled`, which returns a new compiled program of it."""
        self.model, self.facts = model, facts or {}
        self._settings, self._inputs, self._execution, self._pool = settings, inputs, execution, pool
        self._calls: dict[str, tuple[Call, int, int]] = {}

    def _program(self) -> Call:
        forward = self.model.compiled() if self._execution.compile else self.model

        def call() -> Tensor:
            with torch.no_grad(), self._execution.autocast():
                return forward(*self._inputs)

        return call

    def warm_up(self) -> None:
        """Compile, run untimed, check the logits, capture the graph if one is timed and check it against a call.

        Raises:
            InputError: The logits are not finite.
            AccuracyError: The graph's logits differ.
        """
        settings, device = self._settings, self._execution.device
        settle_ms = settings.settle_ms
        if settle_ms is None:
            settle_ms = SETTLE_MS if settings.cuda else 0.0
        for mode in settings.variants():
            call = self._program()
            with for_graphs(self.model) if mode == GRAPH else nullcontext():
                for _ in range(settings.warmup):
                    call()
                logits = call().float()
                if not logits.isfinite().all():
                    raise InputError("the logits are not finite")
                if mode == GRAPH:
                    call = GraphReplay(call, device=device, pool=self._pool)
                    call()
                    error = ((call.outcome.float() - logits).norm() / logits.norm()).item()
                    if not error <= MAX_GRAPH_ERROR:  # `not <=`, so that NaN is an error
                        raise AccuracyError(f"a graph's error is {error:.1e}; the limit is {MAX_GRAPH_ERROR:g}")
            once = wall_block(call, repeats=2, device=device)
            self._calls[mode] = call, repeats_within(PASS_BLOCK_MS, once, settings.repeats), int(settle_ms / once)

    def timed_block(self, variant: str) -> float:
        """Return the median milliseconds of one pass, synchronised before and after.

        Untimed passes come first: models run at the clocks that their own load leaves, which follow it slowly.
        """
        call, repeats, settle = self._calls[variant]
        return wall_block(call, repeats=repeats, device=self._execution.device, settle=settle)

    def kernels(self) -> list[dict[str, Any]]:
        call, *_ = self._calls.get(GRAPH) or next(iter(self._calls.values()))
        return kernels_of(call, self._execution.device)


PRECISIONS = {"autocast": ("bf16", torch.float32), "bf16": ("fp32", torch.bfloat16), "fp32": ("fp32", torch.float32)}
"""By name: the precision of autocast ("fp32" is none) and the dtype of weights."""


@dataclass(kw_only=True)
class Prefill(PassSpeed):
    """Time forward passes over whole prompts, with the output layer on the last token alone.

    A ratio is the ordinary model's time over the other's: above 1 the other is faster.
    """

    kind: ClassVar[str] = "prefill"

    precisions: tuple[Literal["autocast", "bf16", "fp32"], ...] = ()
    """autocast (fp32 weights, bf16 autocast), bf16 (bf16 weights) or fp32; by default autocast on CUDA, fp32 on CPU."""

    def all_points(self) -> list[Point]:
        names = self.precisions or ("autocast" if self.cuda else "fp32",)
        return [replace(point, precision=name) for point in self.parsed_points() for name in names]

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        precision, dtype = PRECISIONS[str(point.precision)]
        execution, models = replace(self.execution, precision=precision), self.plan(point)
        model = models.build(arm, dtype).eval()
        ((tokens, _),) = models.tokens(1, point.batch_size)
        return Passes(self, LastToken(model), (tokens.contiguous(),), execution, pool)


@dataclass(kw_only=True)
class Decode(PassSpeed):
    """Time one more token of every sequence after a filled cache of fixed size, and report the cache's bytes.

    A ratio is the ordinary model's time over the other's: above 1 the other is faster.
    """

    kind: ClassVar[str] = "decode"
    cuda_others: ClassVar[tuple[str, ...]] = ("cudnn", "efficient", "math")  # take the mask that a fixed cache needs
    cuda_backends: ClassVar[tuple[str, ...]] = ("toeplitz",)

    model: str = "llama-124m"
    """Time this preset of transformers with random weights (llama-124m, llama-7b; qwen3-4b, with grouped queries), or
    the folder of a Hugging Face model with its own frozen heads."""
    points: tuple[str, ...] = ("4096x1", "4096x8")
    """Tokens in the cache x sequences."""
    kernels: tuple[str, ...] = ("auto",)
    """Attention kernels of live heads, on both sides of a ratio. flash_decode takes frozen heads in its launch."""
    others: tuple[str, ...] | None = None
    """More kernels of ordinary attention to compare with the first: by default cudnn, efficient and math on CUDA."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of weights and cache: bf16 on CUDA, fp32 on a CPU."""
    graphs: Literal["off", "on", "both"] = "both"

    def check(self) -> None:
        super().check()
        own = any(self.plan(point).own_decoder for point in self.all_points())
        require(not own, f"model must be one of transformers: this project's decoder has no cache; got {self.model}")

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        models, generator = self.plan(point), torch.Generator().manual_seed(self.seed)
        model = models.build(arm, self.dtype_of(self.dtype)).eval()
        token = torch.randint(models.shape.vocab_size, (point.batch_size, 1), generator=generator).to(models.device)
        # "fp32" is no autocast: weights and cache have one dtype already, and autocast would only cost launches.
        step, execution = Step(model, token, point.length), replace(self.execution, precision="fp32")
        return Passes(self, step, (), execution, pool, facts={"cache_bytes": step.cache_bytes()})


class Step(nn.Module):
    """The logits of one more token of every sequence, at the last position of a cache full of drawn numbers."""

    def __init__(self, model: nn.Module, token: Tensor, positions: int):
        from saf.hf.cache import random_cache

        super().__init__()
        self.model, self.token, self.last = model, token, positions - 1
        self.position = torch.full_like(token, self.last)
        self.cache, self.length = random_cache(model, token, positions)

    def forward(self) -> Tensor:
        self.length.fill_(self.last)  # each step appends a token: without this the second one would overflow the cache
        model: Any = self.model
        return model(input_ids=self.token, position_ids=self.position, past_key_values=self.cache).logits

    def compiled(self) -> Call:
        return partial(torch.compile(own_program(_run), fullgraph=True, dynamic=False), self)

    def cache_bytes(self) -> int:
        from saf.hf.cache import cache_bytes

        return cache_bytes(self.cache)


def _run(step: nn.Module) -> Tensor:
    return step()


# --- one attention layer

TOLERANCE = {torch.bfloat16: 4.5e-3, torch.float16: 1e-3, torch.float32: 1e-6, torch.float64: 1e-12}
"""Largest relative L2 error of frozen heads and of their values' gradients, inputs being in the dtype already."""
SAMPLES = 64
"""Positions compared with float64, evenly spread: comparing all takes longer than the timed work."""
WORKING_SET = 128 << 20
"""Bytes that the operands of all buffers take at least, more than twice the largest second-level cache."""
MAX_BUFFERS = 12
LAYER_BLOCK_MS = 15.0
"""Fewer repeats where a timed block of a layer would take longer than this, milliseconds."""


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

    def check(self) -> None:
        super().check()
        require(self.pairs >= 1, f"pairs must be at least 1; got {self.pairs}")
        require(not is_folder(self.model), f"model must be a preset, got {self.model}; time a folder by prefill")
        for point in self.parsed_points():
            self.plan(point)
        self.variants()

    def variants(self) -> list[str]:
        """Name the ways in which each arm is timed, a direction and a launch mode: "forward call", "both graph"."""
        modes = reversed(launch_modes(self.graphs, self.execution.device))
        return [" ".join(each) for each in product(("forward", "both"), modes)]

    def cases(self, session: Session) -> Iterator[Case]:
        """Yield the frozen heads alone at each rate, and the whole layer at all rates."""
        for point in self.parsed_points():
            shape, rates = self.plan(point).shape, []
            for rate in dict.fromkeys(self.rates or (0.25, 0.5)):
                count = self.layout(point, rate).num_frozen
                if not count:
                    session.skip(point.name, f"a rate of {rate:g} freezes none of {shape.num_heads} heads")
                    continue
                rates.append(rate)
                # With grouped queries frozen heads share values: alone they are no product of as many heads.
                if shape.num_heads == shape.num_kv_heads:
                    yield self._case(f"{point.name} frozen {100 * rate:g}%", point, [rate], alone=count)
            if rates:
                yield self._case(f"{point.name} layer", point, rates)

    def layout(self, point: Point, rate: float) -> HeadLayout:
        """Return the layer's heads, the frozen ones drawn by the seed."""
        shape, generator = self.plan(point).shape, torch.Generator().manual_seed(self.seed)
        drawn = torch.randperm(shape.num_heads, generator=generator)[: round(rate * shape.num_heads)].tolist()
        return HeadLayout(shape.num_heads, shape.num_kv_heads, tuple(sorted(drawn)))

    def _case(self, name: str, point: Point, rates: Sequence[float], *, alone: int | None = None) -> Case:
        """Return the comparisons of a layer, or of as many frozen heads `alone` with as many ordinary ones."""
        pool, shape = GraphPool(), self.plan(point).shape
        sizes = {each: getattr(shape, each) for each in ("num_heads", "num_kv_heads", "head_dim")}
        dtype = str(self.dtype_of(self.dtype)).removeprefix("torch.")
        fields = {"part": "frozen" if alone else "layer", "alone": alone, "point": point.to_dict()}
        comparisons = self.comparisons(rates)
        if alone:  # free heads alone do nothing at all, and other kernels are compared in the whole layer
            comparisons = [each for each in comparisons if each.arm.role not in ("free", "kernel")]

        def layout_of(arm: Arm) -> HeadLayout:
            if alone:
                return HeadLayout(alone, alone, tuple(range(alone)) if arm.backend else ())
            return self.layout(point, arm.rate)

        return Case(
            name=name,
            fields={**fields, "layer": sizes, "dtype": dtype},
            comparisons=comparisons,
            build=lambda arm: LayerSubject(self, point, arm, layout_of(arm), pool),
            variants=self.variants(),
            describe=lambda arm: {"heads": layout_of(arm).num_frozen},
        )


class LayerSubject(Subject):
    """One arm of one layer: checked, captured and timed over several buffers in turn, so that no cache holds them."""

    def __init__(self, settings: Op, point: Point, arm: Arm, layout: HeadLayout, pool: GraphPool):
        """`layout` has the timed heads: those of a whole layer, or frozen ones without live ones."""
        self._settings, self._point, self._arm, self._layout, self._pool = settings, point, arm, layout, pool
        self._device, self._dtype = settings.execution.device, settings.dtype_of(settings.dtype)
        self._head_dim = settings.plan(point).shape.head_dim
        self._eager = self._ordinary() if arm.backend is None else self._frozen()
        self._compiled = torch.compile(self._eager)
        heads = [len(layout.rows[role]) for role in ("query", "key", "value")]
        size = point.batch_size * point.length * self._head_dim * sum(heads) * self._dtype.itemsize
        # In a model the layers between two calls replace the cache's content; several buffers in turn do it here.
        count = min(MAX_BUFFERS, math.ceil(WORKING_SET / size)) if settings.cuda else 1
        generator = torch.Generator(self._device).manual_seed(settings.seed)
        self._inputs = [tuple(self._draw(n, generator).requires_grad_() for n in heads if n) for _ in range(count)]
        self._gradients: list[tuple[Tensor, ...]] = []
        self._passes: dict[str, tuple[Callable[[], Any], int]] = {}

    def _ordinary(self) -> Callable[..., tuple[Tensor, ...]]:
        kernel = self._arm.kernel
        if kernel == FLEX:
            return FlexAttention(causal_blocks(self._point.length, self._device))
        return lambda query, key, value: (live_attention(query, key, value, kernel=kernel),)

    def _frozen(self) -> Callable[..., tuple[Tensor, ...]]:
        """Draw the patterns; return the layer, or without live heads its frozen ones, which take only values."""
        if (arm := self._arm).kernel == FLEX:
            raise UnsupportedError("flex is measured for ordinary attention only")
        layout, seed = self._layout, self._settings.seed
        self._pattern: Any = drawn_patterns(arm.backend, layout.num_frozen, self._point.length, seed, self._device)
        kv_head = layout.kv_head if layout.num_live or layout.grouped else None
        frozen = FrozenHeads.from_patterns(
            self._pattern, backend=arm.backend or "auto", dtype=self._dtype, device=self._device, kv_head=kv_head
        )
        if not layout.num_live:
            return lambda value: (frozen_attention(value, frozen),)

        def layer(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
            """Return live and frozen heads as a model with a split output projection takes them."""
            parts = attention_parts(query, key, value, frozen, kernel=arm.live_kernel)
            return parts if len(parts) == 2 else parts[0].split([query.shape[1], frozen.num_frozen], 1)

        return layer

    def _function(self, variant: str) -> Callable[..., tuple[Tensor, ...]]:
        """Return the arm's function, compiled or not.

        Layers with frozen heads are compiled where they are replayed as graphs, as inside a compiled model, and eager
        where they are called: a compiled function checks its guards at every call, a model once for all its layers.
        Ordinary attention and frozen heads alone are one operator each, and eager; flex is a kernel only compiled.
        """
        if self._arm.backend is None:
            compiled = self._arm.kernel == FLEX
        else:
            compiled = self._layout.num_live > 0 and variant.endswith(GRAPH)
        return self._compiled if compiled and self._settings.execution.compile else self._eager

    def _draw(self, heads: int, generator: torch.Generator) -> Tensor:
        """Draw `[B, heads, T, D]`, laid out as projections leave them, `[B, T, heads, D]`."""
        shape = (self._point.batch_size, self._point.length, heads, self._head_dim)
        # Drawn in float32, so that all dtypes round the same numbers.
        drawn = torch.randn(shape, generator=generator, device=self._device, dtype=torch.float32)
        return drawn.to(self._dtype).transpose(1, 2)

    def _run(self, variant: str, number: int) -> tuple[Tensor, ...]:
        inputs, function = self._inputs[number], self._function(variant)
        if variant.startswith("forward"):
            with torch.no_grad():
                return function(*inputs)
        return torch.autograd.grad(function(*inputs), inputs, self._gradients[number])

    def warm_up(self) -> None:
        settings, device, variants = self._settings, self._device, self._settings.variants()
        for mode in dict.fromkeys(variant.split()[1] for variant in variants):
            outputs = self._run(f"forward {mode}", 0)
            generator = torch.Generator(device).manual_seed(settings.seed + 1)
            self._gradients = [tuple(self._draw(each.shape[1], generator) for each in outputs) for _ in self._inputs]
            if self._arm.backend not in (None, FREE):
                self._check(outputs[-1], mode)
        for variant in variants:

            def every(variant: str = variant) -> None:
                for number in range(len(self._inputs)):
                    self._run(variant, number)

            for _ in range(settings.warmup):
                every()
            call = GraphReplay(every, device=device, pool=self._pool) if variant.endswith(GRAPH) else every
            once = event_block(call, repeats=2, device=device)
            self._passes[variant] = call, repeats_within(LAYER_BLOCK_MS, once, settings.repeats)

    def _check(self, output: Tensor, mode: str) -> None:
        """Compare sampled outputs, and but for grouped queries gradients of the values, with Eq. (3) in float64."""
        layout, length = self._layout, output.shape[-2]
        slots = list(layout.kv_head[layout.num_live :])
        at = torch.linspace(0, length - 1, min(SAMPLES, length), device=output.device).round().long()
        every = torch.arange(length, device=output.device)
        patterns = [each.prefix(length).to(device=output.device) for each in pattern_for_each_head(self._pattern)]
        rows = [_entries(each, at[:, None], every[None]) for each in patterns]
        _compare("output", output[:, :, at], rows, self._inputs[0][-1].detach()[:, slots])
        if not layout.grouped:
            gradient = self._run(f"both {mode}", 0)[-1][:, slots]
            columns = [_entries(each, every[None], at[:, None]) for each in patterns]
            _compare("gradient of the values", gradient[:, :, at], columns, self._gradients[0][-1])

    def timed_block(self, variant: str) -> float:
        call, repeats = self._passes[variant]
        rest = REST_MS if self._settings.cuda else 0.0
        return event_block(call, repeats=repeats, device=self._device, rest_ms=rest) / len(self._inputs)

    def kernels(self) -> list[dict[str, Any]]:
        call, _ = self._passes.get(f"both {GRAPH}") or self._passes[f"both {CALL}"]
        count = len(self._inputs)  # a call runs the layer once on each buffer
        kernels = kernels_of(call, self._device)
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
