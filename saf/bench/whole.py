"""Whole models: optimiser updates, prompts, and one more token after a filled cache."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saf.bench.models import ModelPlan, matrix_entries, mixing_flops
from saf.bench.protocol import FREE, Arm, Comparison, Point, Subject
from saf.bench.speed import DTYPES, ModelSpeed, require
from saf.bench.timing import CALL, GRAPH, SETTLE_MS, kernels_of, repeats_within, row_block, wall_block, ways_of
from saf.distributed import all_gather, rank_and_size
from saf.errors import AccuracyError, InputError
from saf.machine import Call, Execution, GraphPool, GraphReplay, own_program
from saf.ops import for_graphs
from saf.ops.heads import cached_order
from saf.ops.linear.tables import CHUNK
from saf.ops.live import FLASH_DECODE
from saf.prefill import LastToken
from saf.train.parallel import Parallel, micro_batches_of_one, parallel_of
from saf.train.step import Updater, build_optimizer

LEARNING_RATE = 6e-8
"""The first update's of the trainer's warm-up to 6e-4 over 10,000 updates: so small that the weights stay ordinary."""
CLIP = 1.0
"""Largest gradient norm, the trainer's default."""
PRELOADED = 4
"""Micro-batches kept on the device and used in turn."""


# --- updates


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
    """Keep only the input of each decoder layer and recompute the rest in the backward pass, in all arms. One more
    ordinary arm keeps everything, and shows the cost."""
    parallel: Literal["none", "ddp", "fsdp"] = "none"
    """How the processes that torchrun started share updates; a block's time is the slowest one's. In one more arm each
    process updates an ordinary model by itself, which shows the cost of communication."""

    @property
    def execution(self) -> Execution:
        again = self.activation_checkpointing
        return Execution.of(self.device, compile=self.compile, activation_checkpointing=again)

    def check(self) -> None:
        super().check()
        self._parallel()
        alone = self.parallel == "none" or not (self.memory or self.fresh)
        require(alone, "memory and fresh must be left out in a group of processes")
        require(self.graphs == "off" or not self.memory, "memory must be left out with CUDA graphs")

    def _parallel(self) -> Parallel:
        return parallel_of(self.parallel, parameters=0, execution=self.execution, trained_patterns=False)

    def variants(self) -> tuple[str, ...]:
        return tuple("update" if way == CALL else f"update {way}" for way in super().variants())

    def arms(self, point: Point) -> list[Comparison]:
        comparisons = super().arms(point)
        first = comparisons[0].baseline
        if self.activation_checkpointing:
            comparisons.append(Comparison(first, replace(first, keeping=True), "keeping"))
        if self.parallel != "none":
            comparisons.append(Comparison(first, replace(first, apart=True), "apart"))
        return comparisons

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        execution, (rank, processes) = self.execution, rank_and_size()
        if arm.keeping:
            execution = replace(execution, activation_checkpointing=False)
        accumulation = micro_batches_of_one(point.accumulation or 1, processes, batch_size=point.batch_size)
        models = self.plan(point)
        batches = models.tokens(min(PRELOADED, accumulation), point.batch_size, seed=self.seed + rank)
        model = models.build(arm)
        model = model if models.own_decoder else NextTokenLoss(model)
        flops = accumulation * micro_batch_flops(models, arm, model, batch=point.batch_size, length=point.length)
        parallel = Parallel() if arm.apart else self._parallel()
        return UpdateSubject(
            self, model, execution, batches=batches, accumulation=accumulation, flops=flops, parallel=parallel
        )


class NextTokenLoss(nn.Module):
    """A model of transformers with the signature of this project's decoder: inputs and targets to their mean loss."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module  # under this name adapters look through it

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.module(input_ids=inputs, use_cache=False).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class UpdateSubject:
    """Updates of one model with its optimiser, by the trainer's own code."""

    def __init__(
        self,
        settings: ModelSpeed,
        model: nn.Module,
        execution: Execution,
        *,
        batches: Sequence[tuple[Tensor, Tensor]],
        accumulation: int,
        flops: float,
        parallel: Parallel | None = None,
    ):
        """`flops` are the operations of an update of this process."""
        self.settings, self.device, self._flops = settings, execution.device, flops
        optimizer = build_optimizer(model.train())
        self.updaters = {
            way: Updater(
                model=model,
                optimizer=optimizer,
                batches=cycle(batches),
                execution=execution,
                accumulation=accumulation,
                clip=CLIP,
                parallel=parallel or Parallel(),
                graphed=way == GRAPH,
            )
            for way in ways_of(settings.graphs, execution.device)
        }

    def warm_up(self) -> None:
        for updater in self.updaters.values():
            # With one micro-batch an update, the second update captures: the first micro-batch runs as it is.
            for _ in range(max(self.settings.warmup, 2 * updater.graphed)):
                updater.update(LEARNING_RATE)

    def flops(self, variant: str) -> float:
        return self._flops

    def timed_block(self, variant: str) -> float:
        return max(all_gather(updates_in_a_row(self.updaters[way_of(variant)], self.settings.repeats)))

    def kernels(self) -> list[dict[str, Any]]:
        updater = list(self.updaters.values())[-1]
        return kernels_of(lambda: updater.update(LEARNING_RATE), self.device)


def way_of(variant: str) -> str:
    """Return how a variant runs: "graph" or "call"."""
    return GRAPH if variant.endswith(f" {GRAPH}") else CALL


def updates_in_a_row(updater: Updater, count: int) -> float:
    """Return the mean milliseconds of updates in a row, as training makes them."""
    return row_block(lambda: updater.update(LEARNING_RATE), repeats=count, device=updater.execution.device)


def micro_batch_flops(models: ModelPlan, arm: Arm, model: nn.Module, *, batch: int, length: int) -> float:
    """Count the operations of one micro-batch of an update, forward and backward."""
    # A matrix entry multiplies and adds once forward and once for each of the two gradients.
    products = 6.0 * sum(matrix_entries(model, models.shape.vocab_size)) * batch * length
    return products + mixing_flops(models, arm, batch=batch, length=length, backward=True)


# --- forward passes


@dataclass(kw_only=True)
class PassSpeed(ModelSpeed):
    """Settings of benchmarks of forward passes."""

    repeats: int = 40
    """Timed passes in a timed block; the block's time is their median."""
    block_ms: float = 200.0
    """Fewer repeats where a timed block would take longer than this, milliseconds."""
    settle_ms: float | None = None
    """Untimed passes before every timed block for about this long; by default 400 ms on CUDA, none on a CPU."""

    def weights(self, name: str) -> torch.dtype:
        return DTYPES[("bf16" if self.cuda else "fp32") if name == "auto" else name]


MAX_GRAPH_ERROR = 2e-2
"""Largest relative error of a graph's logits beside a call's: some roundings of bfloat16. Chosen, not measured."""


class Passes:
    """Forward passes of one module over fixed inputs, called and replayed as a graph, each a program of its own."""

    def __init__(
        self,
        settings: PassSpeed,
        model: Any,
        inputs: tuple[Any, ...],
        execution: Execution,
        pool: GraphPool,
        *,
        flops: float,
    ):
        """Take a module with a method `compiled`, which returns a new compiled program of it."""
        self._flops = flops
        self.model, self._settings, self._inputs, self._execution, self._pool = model, settings, inputs, execution, pool
        self._calls: dict[str, tuple[Call, int, int]] = {}
        if execution.compile:
            torch._dynamo.reset()  # what an earlier point compiled

    def flops(self, variant: str) -> float:
        return self._flops

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
        for way in settings.variants():
            call = self._program()
            with for_graphs(self.model) if way == GRAPH else nullcontext():
                for _ in range(settings.warmup):
                    call()
                logits = call().float()
                if not bool(logits.isfinite().all()):
                    raise InputError("the logits are not finite")
                if way == GRAPH:
                    call = GraphReplay(call, device=device, pool=self._pool)
                    call()
                    error = ((call.outcome.float() - logits).norm() / logits.norm()).item()
                    if not error <= MAX_GRAPH_ERROR:
                        raise AccuracyError(f"a graph's error is {error:.1e}; the limit is {MAX_GRAPH_ERROR:g}")
            once = wall_block(call, repeats=2, device=device)
            usual = SETTLE_MS if settings.cuda else 0.0
            settle = usual if settings.settle_ms is None else settings.settle_ms
            self._calls[way] = call, repeats_within(settings.block_ms, once, settings.repeats), int(settle / once)

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

    Ratios are the baseline's time over the arm's: above 1 the arm is faster.
    """

    kind: ClassVar[str] = "prefill"

    precisions: tuple[Literal["autocast", "bf16", "fp32"], ...] = ()
    """autocast (fp32 weights, bf16 autocast), bf16 (bf16 weights) or fp32; by default autocast on CUDA, fp32 on CPU."""

    def cases(self) -> list[Point]:
        names = self.precisions or ("autocast" if self.cuda else "fp32",)
        for name in names:
            require(name in PRECISIONS, f"precisions must be {', '.join(PRECISIONS)}; got {name!r}")
        return [replace(point, precision=name) for point in self.parsed_points() for name in names]

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        precision, dtype = PRECISIONS[str(point.precision)]
        execution, models = replace(self.execution, precision=precision), self.plan(point)
        model = models.build(arm, dtype).eval()
        ((tokens, _),) = models.tokens(1, point.batch_size)
        layers, output = matrix_entries(model, models.shape.vocab_size)  # the output layer is on the last token alone
        flops = 2.0 * point.batch_size * (layers * point.length + output)
        flops += mixing_flops(models, arm, batch=point.batch_size, length=point.length, backward=False)
        return Passes(self, LastToken(model), (tokens.contiguous(),), execution, pool, flops=flops)


@dataclass(kw_only=True)
class Decode(PassSpeed):
    """Time one more token of every sequence after a filled cache of fixed size, and report the cache's bytes.

    Ratios are the baseline's time over the arm's: above 1 the arm is faster.
    """

    kind: ClassVar[str] = "decode"
    more_kernels: ClassVar[tuple[str, ...]] = (FLASH_DECODE,)
    cuda_others: ClassVar[tuple[str, ...]] = ("cudnn", "efficient", "math")  # take the mask that a fixed cache needs
    cuda_backends: ClassVar[tuple[str, ...]] = ("toeplitz",)

    model: str = "llama-124m"
    """A model of transformers: llama-124m and llama-7b, with a KV head for every head, qwen3-4b, with grouped queries,
    or a folder with its own frozen heads."""
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
        own = any(self.plan(point).own_decoder for point in self.cases())
        require(not own, f"{self.model} has no cache; take a model of transformers, such as llama-124m")

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        models = self.plan(point)
        model = models.build(arm, self.weights(self.dtype)).eval()
        generator = torch.Generator().manual_seed(self.seed)
        step = Step(model, point.batch_size, point.length, models.shape.vocab_size, generator)
        live = sum(layout.num_live for layout in models.layouts(arm))
        frozen = 0 if arm.backend in (FREE, "linear") else sum(layout.num_frozen for layout in models.layouts(arm))
        mixing = point.length * models.shape.head_dim * (2 * live + frozen)
        flops = 2.0 * point.batch_size * (sum(matrix_entries(model, models.shape.vocab_size)) + mixing)
        return Passes(self, step, (), replace(self.execution, precision="fp32"), pool, flops=flops)

    def cache_bytes(self, point: Point, arm: Arm) -> int:
        """Return the bytes of the keys and values of every layer, over all positions, and of recurrent states."""
        layouts, element = self.plan(point).layouts(arm), self.weights(self.dtype).itemsize
        channels = point.batch_size * self.plan(point).shape.head_dim
        if arm.backend != "linear":
            rows = [layout.rows[role] for layout in layouts for role in ("key", "value")]
            return sum(map(len, rows)) * channels * point.length * element
        frozen = sum(layout.num_frozen for layout in layouts)
        values = [cached_order(each.kv_head, each.num_frozen, tuple(range(each.num_frozen))) for each in layouts]
        rows = sum(map(len, values)) + sum(len(layout.rows["key"]) for layout in layouts)
        return channels * (rows * point.length * element + frozen * (4 * CHUNK * element + 2 * 2 * 16 * 4))

    def describe(self, point: Point, arm: Arm) -> Mapping[str, Any]:
        sizes = {"cache_bytes": arm, "baseline_cache_bytes": Arm("auto")}
        own = {name: self.cache_bytes(point, each) for name, each in sizes.items()}
        return {**super().describe(point, arm), **own}


class Step(nn.Module):
    """The logits of one more token of every sequence, at the last position of a cache."""

    def __init__(self, model: nn.Module, batch: int, positions: int, vocabulary: int, generator: torch.Generator):
        """Draw the token, and the keys and values before it."""
        from saf.hf.random_model import random_cache

        super().__init__()
        self.model = model
        device = next(model.parameters()).device
        self.token, self.last = torch.randint(vocabulary, (batch, 1), generator=generator).to(device), positions - 1
        self.position = torch.full((batch, 1), self.last, device=device)
        self.cache, self.filled = random_cache(model, self.token, positions)

    def forward(self) -> Tensor:
        self.filled.fill_(self.last)
        model: Any = self.model
        return model(input_ids=self.token, position_ids=self.position, past_key_values=self.cache).logits

    def compiled(self) -> Call:
        return partial(torch.compile(own_program(_run), fullgraph=True, dynamic=False), self)


def _run(step: nn.Module) -> Tensor:
    return step()
