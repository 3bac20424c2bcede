"""Whole models: optimiser updates, prompts, and one more token after a filled cache."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saf.bench.protocol import Arm, Point, Subject
from saf.bench.speed import ModelSpeed, require
from saf.bench.timing import CALL, GRAPH, SETTLE_MS, kernels_of, launch_modes, repeats_within, row_block, wall_block
from saf.distributed import all_gather, rank_and_size
from saf.errors import AccuracyError, InputError
from saf.machine import Call, Execution, GraphPool, GraphReplay, own_program
from saf.models.gpt import rotate
from saf.ops import for_graphs, mixed_attention
from saf.ops.heads import cached_order, flat_heads, take_heads
from saf.ops.linear.op import RecurrentState
from saf.ops.live import FLASH_DECODE
from saf.ops.positions import CachePosition
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
    """Keep only the input of each decoder layer and recompute the rest in the backward pass, in all arms."""
    parallel: Literal["none", "ddp", "fsdp"] = "none"
    """How the processes that torchrun started share updates; a block's time is the slowest one's."""

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
        return parallel_of(self.parallel, parameters=0, execution=self.execution)

    def variants(self) -> tuple[str, ...]:
        return tuple("update" if mode == CALL else f"update {mode}" for mode in super().variants())

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        rank, processes = rank_and_size()
        accumulation = micro_batches_of_one(point.accumulation or 1, processes, batch_size=point.batch_size)
        models = self.plan(point)
        batches = models.tokens(min(PRELOADED, accumulation), point.batch_size, seed=self.seed + rank)
        model = models.build(arm)
        model = model if models.own_decoder else NextTokenLoss(model)
        parallel = self._parallel()
        return UpdateSubject(self, model, batches=batches, accumulation=accumulation, parallel=parallel)


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
        *,
        batches: Sequence[tuple[Tensor, Tensor]],
        accumulation: int,
        parallel: Parallel | None = None,
    ):
        execution = settings.execution
        self.settings, self.device = settings, execution.device
        self.facts: dict[str, Any] = {}
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
            for _ in range(max(self.settings.warmup, 2 * updater.graphed)):
                updater.update(LEARNING_RATE)

    def timed_block(self, variant: str) -> float:
        return max(all_gather(updates_in_a_row(self.updaters[launch_mode(variant)], self.settings.repeats)))

    def kernels(self) -> list[dict[str, Any]]:
        updater = list(self.updaters.values())[-1]
        return kernels_of(lambda: updater.update(LEARNING_RATE), self.device)


def launch_mode(variant: str) -> str:
    """Return how a variant runs: "graph" or "call"."""
    return GRAPH if variant.endswith(f" {GRAPH}") else CALL


def updates_in_a_row(updater: Updater, count: int) -> float:
    """Return the mean milliseconds of updates in a row, as training makes them."""
    return row_block(lambda: updater.update(LEARNING_RATE), repeats=count, device=updater.execution.device)


# --- forward passes


@dataclass(kw_only=True)
class PassSpeed(ModelSpeed):
    """Settings of benchmarks of forward passes."""

    repeats: int = 40
    """Timed passes in a timed block; the block's time is their median."""
    settle_ms: float | None = None
    """Untimed passes before every timed block for about this long; by default 400 ms on CUDA, none on a CPU."""


BLOCK_MS = 200.0
"""Fewer repeats where a timed block would take longer than this, milliseconds."""
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
        facts: dict[str, Any] | None = None,
    ):
        """Take a module with a method `compiled`, which returns a new compiled program of it."""
        self.model, self.facts = model, facts or {}
        self._settings, self._inputs, self._execution, self._pool = settings, inputs, execution, pool
        self._calls: dict[str, tuple[Call, int, int]] = {}
        if execution.compile:
            torch._dynamo.reset()  # what an earlier point compiled

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
        for mode in settings.variants():
            call = self._program()
            with for_graphs(self.model) if mode == GRAPH else nullcontext():
                for _ in range(settings.warmup):
                    call()
                logits = call().float()
                if not bool(logits.isfinite().all()):
                    raise InputError("the logits are not finite")
                if mode == GRAPH:
                    call = GraphReplay(call, device=device, pool=self._pool)
                    call()
                    error = ((call.outcome.float() - logits).norm() / logits.norm()).item()
                    if not error <= MAX_GRAPH_ERROR:
                        raise AccuracyError(f"a graph's error is {error:.1e}; the limit is {MAX_GRAPH_ERROR:g}")
            once = wall_block(call, repeats=2, device=device)
            usual = SETTLE_MS if settings.cuda else 0.0
            settle = usual if settings.settle_ms is None else settings.settle_ms
            self._calls[mode] = call, repeats_within(BLOCK_MS, once, settings.repeats), int(settle / once)

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

    def all_points(self) -> list[Point]:
        names = self.precisions or ("autocast" if self.cuda else "fp32",)
        for name in names:
            require(name in PRECISIONS, f"precisions must be {', '.join(PRECISIONS)}; got {name!r}")
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

    Ratios are the baseline's time over the arm's: above 1 the arm is faster.
    """

    kind: ClassVar[str] = "decode"
    more_kernels: ClassVar[tuple[str, ...]] = (FLASH_DECODE,)
    cuda_others: ClassVar[tuple[str, ...]] = ("cudnn", "efficient", "math")  # take the mask that a fixed cache needs
    cuda_backends: ClassVar[tuple[str, ...]] = ("toeplitz",)

    model: str = "llama-124m"
    """Time this preset with random weights (llama-7b; qwen3-4b, with grouped queries; 124m, this project's own), or a
    folder with its own frozen heads."""
    points: tuple[str, ...] = ("4096x1", "4096x8")
    """Tokens in the cache x sequences."""
    kernels: tuple[str, ...] = ("auto",)
    """Attention kernels of live heads, on both sides of a ratio. flash_decode takes frozen heads in its launch."""
    others: tuple[str, ...] | None = None
    """More kernels of ordinary attention to compare with the first: by default cudnn, efficient and math on CUDA."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of weights and cache: bf16 on CUDA, fp32 on a CPU."""
    graphs: Literal["off", "on", "both"] = "both"

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        models, generator = self.plan(point), torch.Generator().manual_seed(self.seed)
        model = models.build(arm, self.dtype_of(self.dtype)).eval()
        token = torch.randint(models.shape.vocab_size, (point.batch_size, 1), generator=generator).to(models.device)
        step = (GPTStep if models.own_decoder else TransformersStep)(model, token, point.length)
        execution = replace(self.execution, precision="fp32")
        return Passes(self, step, (), execution, pool, facts={"cache_bytes": step.cache_bytes()})


class Step(nn.Module):
    """The logits of one more token of every sequence, at the last position of a cache full of drawn numbers."""

    def compiled(self) -> Call:
        return partial(torch.compile(own_program(_run), fullgraph=True, dynamic=False), self)


def _run(step: nn.Module) -> Tensor:
    return step()


class TransformersStep(Step):
    """A step of a model of transformers, with its own cache of fixed size."""

    def __init__(self, model: nn.Module, token: Tensor, positions: int):
        from saf.hf.random_model import random_cache

        super().__init__()
        self.model, self.token, self.last = model, token, positions - 1
        self.position = torch.full_like(token, self.last)
        self.cache, self.filled = random_cache(model, token, positions)

    def forward(self) -> Tensor:
        self.filled.fill_(self.last)
        model: Any = self.model
        return model(input_ids=self.token, position_ids=self.position, past_key_values=self.cache).logits

    def cache_bytes(self) -> int:
        from saf.hf.cache import cache_bytes

        return cache_bytes(self.cache)


class GPTStep(Step):
    """A step of this project's decoder, which has no cache but this one."""

    def __init__(self, model: Any, token: Tensor, positions: int):
        """Give the model's layers a cache; `position [1]` is the token's."""
        super().__init__()
        self.model, self.token, self.positions = model, token, positions
        self.position = token.new_full((1,), positions - 1)
        generator = torch.Generator(token.device).manual_seed(0)
        for block in model.blocks:
            block.attention = CachedAttention(block.attention, len(token), positions, generator)

    def forward(self) -> Tensor:
        model, at = self.model, self.position[None]
        x = model.embed(self.token)
        x = x if model.position is None else x + model.position(at)
        rotation = None if model.rotary is None else model.rotary(at)
        cache_position = CachePosition.of(self.position[0], 1, self.positions)
        for block in model.blocks:
            x = block(x, rotation, cache_position)
        return F.linear(model.norm(x), model.embed.weight)

    def cache_bytes(self) -> int:
        caches = [(each.keys, each.values, *each.state) for each in self.modules() if isinstance(each, CachedAttention)]
        return sum(tensor.nbytes for cache in caches for tensor in cache)


class CachedAttention(nn.Module):
    """An attention layer of this project's decoder for one token after a cache, by the operator of all models.

    As in a cache of transformers frozen heads keep values alone, those with exponential patterns a recurrent state.
    """

    def __init__(self, attention: Any, batch: int, positions: int, generator: torch.Generator):
        super().__init__()
        self.attention, layout = attention, attention.layout
        frozen: Any = attention.frozen
        linear = frozen.linear if frozen else ()
        self.order = cached_order(layout.kv_head, layout.num_frozen, linear)
        weight, size = attention.v_proj.weight, (positions, attention.head_dim)
        self.keys, self.values = (
            weight.new_empty(batch, heads, *size).normal_(generator=generator)
            for heads in (layout.num_live, len(self.order))
        )
        self.state = RecurrentState.empty(self.values, frozen.state_sizes())[:2] if linear else ()

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, cache_position: CachePosition) -> Tensor:
        """Mix `x [B, 1, C]` with the cache, to `[B, 1, C]`."""
        attention, first = self.attention, torch.as_tensor(cache_position.first)
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        query, key, value = (each(x).unflatten(-1, (-1, attention.head_dim)) for each in projections)
        if not value.shape[2]:
            return torch.zeros_like(x)  # all heads are pruned
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        self.keys.index_copy_(2, first[None], key)
        self.values.index_copy_(2, first[None], take_heads(value, self.order) if self.order else value[:, :0])
        state = RecurrentState(*self.state, value) if self.state else None
        options: Any = {"cache_position": cache_position, "kernel": attention.live.kernel, "state": state}
        mixed = mixed_attention(query, self.keys, self.values, attention.frozen, **options)
        return attention.o_proj(flat_heads(mixed))
