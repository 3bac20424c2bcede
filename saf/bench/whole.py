"""Whole models: optimiser updates, prompts, and one more token. What a timed call contains stands in the subjects."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saf.bench.models import (
    ModelPlan,
    mixing_work,
    random_tokens,
)
from saf.bench.protocol import (
    CALL,
    FREE,
    GRAPH,
    SETTLE_MS,
    Arm,
    Comparison,
    Point,
    Subject,
    Work,
    kernels_of,
    repeats_within,
    wait_for,
    wall_block,
    ways_of,
)
from saf.bench.speed import DTYPES, ModelSpeed
from saf.errors import AccuracyError, InputError
from saf.machine.cuda_graphs import Call, GraphPool, GraphReplay
from saf.machine.execution import Execution, own_program
from saf.machine.processes import gathered, group_place
from saf.ops import for_graphs
from saf.ops.live import SPLIT
from saf.prefill import LastToken
from saf.train.optimizer import build_optimizer
from saf.train.parallel import Alone
from saf.train.sharing import micro_batches_of_one, parallel_of
from saf.train.updater import Updater

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
