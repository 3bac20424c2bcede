"""Benchmarks of whole models: optimiser updates, prompts, and one more token after a filled cache.

`ModelPlan` builds the model of each arm, from a preset or a folder (a checkpoint, a run, the output of `saf.save` or
`save_pretrained`). A folder has frozen heads and patterns of its own: every arm has its weights, ordinary arms with all
heads live again. Each benchmark then is a class of settings, followed by the subject that it builds.
"""

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from saf.bench.protocol import (
    Arm,
    Block,
    Case,
    Point,
    Ready,
    Speed,
    WarmUp,
    mean_block,
    median_block,
    repeats_within,
    require,
)
from saf.bench.record import Row, Session, kernels_of
from saf.distributed import all_gather, all_ranks_or_raise, rank_and_size
from saf.errors import AccuracyError, InputError, UnsupportedError
from saf.heads import EDITED, Head, HeadSet
from saf.hf.families import TRANSFORMERS, random_model
from saf.machine import Call, Execution, GraphPool, GraphReplay, own_program
from saf.models import GPT, preset
from saf.models.adapter import adapter_for, longest_input
from saf.models.gpt import PRESETS, LiveAttention
from saf.opening import find_source
from saf.ops import for_graphs
from saf.patterns import Pattern
from saf.prefill import LastToken
from saf.records.run import is_transformers_model
from saf.surgery import finalize_, install_, patterns_of, prune_, uninstall_
from saf.synthetic import draw_heads, draw_patterns
from saf.train.step import Parallel, Updater, build_optimizer, micro_batches_per_rank, parallel_of

# --- shapes


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


def shape_of(name: str, length: int, num_layers: int | None = None) -> ModelShape:
    """Return the shape of a preset at a context; raise InputError for an unknown name."""
    if name in TRANSFORMERS:
        layers, heads, kv_heads, head_dim, vocabulary, *_ = TRANSFORMERS[name][1].values()
        return ModelShape(num_layers or layers, heads, kv_heads, head_dim, vocabulary)
    if name not in PRESETS:
        known = ", ".join(sorted([*PRESETS, *TRANSFORMERS]))
        raise InputError(f"model must be a folder or one of {known}; got {name!r}")
    config = preset(name, max_length=length)
    layers, heads = num_layers or config.num_layers, config.num_heads
    return ModelShape(layers, heads, heads, config.head_dim, config.vocab_size)


# --- the models of one point


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The models of one point: their shape, the heads that each arm freezes, and `build` for each arm's model."""

    model: str
    """A preset or a folder."""
    length: int
    device: torch.device
    seed: int = 0
    shape: ModelShape
    own_decoder: bool
    """Whether it is this project's `GPT` rather than a model of transformers."""
    frozen: Mapping[Head, Pattern] | None = None
    """The frozen heads of a folder; None for a preset, whose arms draw theirs."""
    pruned: HeadSet = field(default_factory=HeadSet)
    backend: str | None = None
    """The backend of a folder's frozen heads."""

    def heads(self, arm: Arm) -> tuple[HeadSet, HeadSet]:
        """Choose the heads that an arm freezes, and those that it prunes."""
        if arm.backend is None:
            return HeadSet(), HeadSet()
        if self.frozen is None:
            edited = draw_heads(self.shape.num_layers, self.shape.num_heads, rate=arm.rate, seed=self.seed)
        else:
            edited = HeadSet(self.frozen) | self.pruned
        # Heads pruned in the folder stay pruned in these arms; the arm "pruned" prunes its frozen heads, too.
        return (HeadSet(), edited) if arm.backend == "pruned" else (edited - self.pruned, self.pruned)

    def describe(self, arm: Arm) -> Row:
        """Return the entries of a row about an arm's heads."""
        frozen, pruned = self.heads(arm)
        counts = [len((frozen | pruned).in_layer(layer)) for layer in range(self.shape.num_layers)]
        return {"heads": sum(counts), "per_layer": counts}

    def tokens(self, count: int, batch_size: int, *, seed: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Draw `count` micro-batches of inputs and targets, each `[batch_size, length]`, on the device."""
        generator = torch.Generator().manual_seed(self.seed if seed is None else seed)
        size = (count, batch_size, self.length + 1)  # targets are the inputs, one token later
        windows = torch.randint(self.shape.vocab_size, size, generator=generator).to(self.device)
        return [(window[:, :-1], window[:, 1:]) for window in windows]

    def build(self, arm: Arm, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Build an arm's model; all arms have the same weights.

        Raises UnsupportedError for a backend or kernel that cannot run here.
        """
        if arm.kernel == "flex" and not (self.own_decoder and arm.backend is None):
            raise UnsupportedError("flex is measured for ordinary attention of this project's decoder only")
        model = self._ordinary_preset(dtype) if self.frozen is None else self._ordinary_folder().to(dtype)
        frozen, pruned = self.heads(arm)
        if len(pruned):
            prune_(model, pruned)
            finalize_(model)  # without the removed rows, whose memory a trained model would not have
        if len(frozen):
            if self.frozen is None:
                patterns: Any = draw_patterns(arm.backend, len(frozen), self.length, self.seed, self.device)
            else:
                patterns = [self.frozen[head] for head in frozen]
            install_(model, frozen, patterns, backend=str(arm.backend))
        adapter = adapter_for(model)
        # In ordinary arms too: else a ratio would contain the difference in Python time of two attention functions.
        adapter.use_saf_attention()
        for site in adapter.sites():
            site.pin(arm.kernel if site.frozen is None else arm.live_kernel)
        if arm.kernel == "flex":
            flex = FlexAttention(self.length, self.device)
            for layer in model.attention_layers():  # type: ignore[operator]
                layer.live = flex
        return model

    def _ordinary_preset(self, dtype: torch.dtype) -> nn.Module:
        shape, generator = self.shape, torch.Generator(self.device).manual_seed(self.seed)
        if self.own_decoder:
            config = preset(self.model, max_length=self.length, num_layers=shape.num_layers)
            model = GPT.skip_init(config, self.device)
            model.reset_parameters(generator)
            return model.to(dtype)
        family, sizes = TRANSFORMERS[self.model]
        sizes = {**sizes, "num_hidden_layers": shape.num_layers}
        return random_model(
            family, max_length=self.length, device=self.device, dtype=dtype, generator=generator, **sizes
        )

    def _ordinary_folder(self) -> nn.Module:
        """Return the folder's model with all heads live again; all its weights are random where rows are gone."""
        model = find_source(self.model).model(self.device)
        try:
            uninstall_(model)
        except InputError:
            if not self.own_decoder:
                raise
            # Rows are gone after `finalize_`. No time depends on the values of weights.
            model = GPT.skip_init(adapter_for(model).model.config, self.device)
            model.reset_parameters(torch.Generator(self.device).manual_seed(0))
        return model


def is_folder(model: str) -> bool:
    """Return whether a benchmark's model is a folder or a name on the Hugging Face hub, and no preset."""
    return model not in PRESETS and model not in TRANSFORMERS and (Path(model).exists() or is_transformers_model(model))


def plan_of(settings: Speed, length: int) -> ModelPlan:
    """Return the models of a context; raise InputError for an unknown model, or a context that it does not take."""
    model, device = settings.model, settings.execution.device
    if is_folder(model):
        plan = read_folder(model, device)
        if length > plan.length:
            raise InputError(f"{model} takes at most {plan.length} tokens, got {length}: give --points {plan.length}x1")
        return replace(plan, length=length, seed=settings.seed)
    shape, own = shape_of(model, length, settings.num_layers), model not in TRANSFORMERS
    return ModelPlan(model=model, length=length, device=device, seed=settings.seed, shape=shape, own_decoder=own)


@lru_cache(maxsize=1)
def read_folder(folder: str, device: torch.device) -> ModelPlan:
    """Return the models of a folder at its longest context; raise InputError where no head is edited."""
    model = find_source(folder).model(device)
    adapter = adapter_for(model)
    sites, vocabulary = adapter.sites(), adapter.vocab_size
    if not len(adapter.heads(*EDITED)):
        raise InputError(f"{folder} has no frozen or pruned heads; freeze some by `saf freeze`, or name a preset")
    frozen = {(layer, head): each for layer, site in enumerate(sites) for head, each in patterns_of(site).items()}
    if any(pattern.trainable for pattern in frozen.values()):
        raise UnsupportedError(f"{folder} has trainable patterns; fix them by pattern.compact() first")
    # A benchmark's tables have one shape for all layers, and its random tokens need a vocabulary.
    layers = {(site.layout.num_heads, site.layout.num_kv_heads, site.head_dim) for site in sites}
    if len(layers) > 1 or vocabulary is None:
        raise UnsupportedError(f"{folder} has layers of different heads, or no vocabulary; time a preset of its shape")
    result = ModelPlan(
        model=folder,
        length=longest_input(model) or sys.maxsize,
        device=device,
        shape=ModelShape(len(sites), *layers.pop(), vocabulary),
        own_decoder=adapter.is_gpt,
        frozen=frozen,
        pruned=adapter.heads("pruned"),
        backend=next((site.frozen.backend for site in sites if site.frozen is not None), None),
    )
    del model, adapter, sites
    gc.collect()  # models with frozen heads are in reference cycles: an arm would be charged with their memory
    return result


def model_cases(
    settings: Speed, points: Sequence[Point], build: Callable[..., WarmUp], *, length: int | None = None
) -> list[Case]:
    """Return what is compared at each point; `build` takes the point, too, and `length` is the models' context.

    The heads are frozen at the settings' rates, or are those that a folder froze or pruned. Raises InputError for a
    model that cannot be timed at a point, or settings that are its folder's own.
    """
    own = is_folder(settings.model)
    require(not (own and settings.rates), "rates must be left out: a folder has its own heads")
    require(not (own and settings.num_layers), "num_layers must be left out: a folder has its own layers")
    name, cases = settings.model + (f", {settings.num_layers} layers" if settings.num_layers else ""), []
    for point in points:
        plan = plan_of(settings, length or point.length)
        rate = (len(plan.frozen or ()) + len(plan.pruned)) / (plan.shape.num_layers * plan.shape.num_heads)
        if plan.frozen is None:
            comparisons = settings.comparisons(settings.rates or (0.25, 0.5))
        elif plan.frozen:
            comparisons = settings.comparisons([rate], backend=plan.backend)
        else:
            comparisons = replace(settings, free=False, pruned=True).comparisons([rate])
            comparisons = [(baseline, arm) for baseline, arm in comparisons if arm.role != "frozen"]
        case = Case(
            name=point.name,
            fields={"model": name, "point": point.to_dict()},
            comparisons=comparisons,
            build=partial(build, point),
            describe=plan.describe,
        )
        cases.append(case)
    return cases


# --- flex attention as a baseline

MASK_BLOCK = 128
"""Positions of a block of the mask, flex attention's default."""


class FlexAttention(LiveAttention):
    """Flex attention in place of an ordinary layer's attention; it runs as one kernel only if it is compiled."""

    def __init__(self, length: int, device: torch.device):
        """Build the causal block mask of `length` positions: blocks on the diagonal are masked, not those below it."""
        super().__init__()
        # Not PyTorch's `create_block_mask`, which fills a matrix of length x length first: 4 GiB at 64K.
        count = -(-length // MASK_BLOCK)
        row = torch.arange(count, dtype=torch.int32, device=device)
        diagonal = row[:, None].expand(count, count).contiguous()[None, None]
        below = row[None].expand(count, count).contiguous()[None, None]
        ones, sizes = torch.ones_like(row)[None, None], {"BLOCK_SIZE": MASK_BLOCK, "seq_lengths": (length, length)}
        first = row[None, None].clone()
        self.blocks = BlockMask.from_kv_blocks(ones, diagonal, first, below, mask_mod=_causal, **sizes)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
        grouped = query.shape[1] != key.shape[1]
        output: Any = flex_attention(query, key, value, block_mask=self.blocks, enable_gqa=grouped)
        return (output,)


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


# --- updates

LEARNING_RATE = 6e-8
"""The first update's of the trainer's warm-up to 6e-4 over 10,000 updates: so small that the weights stay ordinary."""
CLIP = 1.0
"""Largest gradient norm, the trainer's default."""
PRELOADED = 4
"""Micro-batches that are on the device and used in turn."""


@dataclass(kw_only=True)
class Update(Speed):
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

    def cases(self, session: Session) -> list[Case]:
        self.ranks()
        alone = self.parallel == "none" or not (self.memory or self.fresh)
        require(alone, "memory and fresh must be left out in a group of processes")
        require(self.graphs == "off" or not self.memory, "memory must be left out with CUDA graphs")
        return model_cases(self, self.parsed_points(), self.build)

    def ranks(self) -> Parallel:
        # The number of parameters decides for "auto" alone, which is no value of this setting.
        return parallel_of(self.parallel, parameters=0, execution=self.execution)

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> WarmUp:
        execution = replace(self.execution, activation_checkpointing=self.activation_checkpointing)
        return update_arm(self, point, arm, execution=execution, parallel=self.ranks())


def update_arm(settings: Speed, point: Point, arm: Arm, *, execution: Execution, parallel: Parallel) -> WarmUp:
    """Build an arm's model and what updates it, by the trainer's own code: an `Updater` for each launch mode."""
    plan, (rank, processes) = plan_of(settings, point.length), rank_and_size()
    # Here ranks still learn that one has failed. In `Updater` they wait for one another by PyTorch's exchanges.
    with all_ranks_or_raise():
        accumulation = micro_batches_per_rank(point.accumulation or 1, processes, batch_size=point.batch_size)
        # Each rank has tokens of its own, as in training.
        batches = plan.tokens(min(PRELOADED, accumulation), point.batch_size, seed=settings.seed + rank)
        model = plan.build(arm)
    model = model if plan.own_decoder else NextTokenLoss(model)
    optimizer = build_optimizer(model.train())
    updaters = {
        mode: Updater(
            model=model,
            optimizer=optimizer,
            batches=cycle(batches),
            execution=execution,
            accumulation=accumulation,
            clip=CLIP,
            parallel=parallel,
            graphed=mode == "graph",
        )
        for mode in settings.launch_modes()
    }

    def warm_up() -> Ready:
        blocks: dict[str, Block] = {}
        for mode, updater in updaters.items():
            # With one micro-batch an update, the second update captures: the first micro-batch runs as it is.
            for _ in range(max(settings.warmup, 2 if updater.graphed else 0)):
                updater.update(LEARNING_RATE)
            blocks[update_variant(mode)] = partial(time_updates, updater, settings.repeats)
        last = list(updaters.values())[-1]
        return Ready(blocks, lambda: kernels_of(lambda: last.update(LEARNING_RATE), execution.device), {})

    return warm_up


def update_variant(mode: str) -> str:
    """Return how records call updates of a launch mode: "update" or "update graph"."""
    return "update" if mode == "call" else f"update {mode}"


def time_updates(updater: Updater, count: int) -> float:
    """Return the mean milliseconds of updates in a row, as training makes them: of several ranks the slowest one's."""
    # All wait for the slowest rank at the next exchange of gradients.
    update = partial(updater.update, LEARNING_RATE)
    return max(all_gather(mean_block(update, repeats=count, device=updater.execution.device)))


class NextTokenLoss(nn.Module):
    """A model of transformers with the signature of this project's decoder: inputs and targets to their mean loss."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module  # the name by which adapters look through wrappers

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.module(input_ids=inputs, use_cache=False).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- forward passes

SETTLE_MS = 400.0
"""Untimed passes before a timed block on CUDA, ms: clocks follow the load over more than 100 ms."""
PASS_BLOCK_MS = 200.0
"""Fewer repeats where a timed block of passes would take longer than this, milliseconds."""
MAX_GRAPH_ERROR = 2e-2
"""Largest relative error of a graph's logits from a call's: some roundings of bfloat16, as layers may take other
kernels in graphs. Chosen, not measured."""
PRECISIONS = {"autocast": ("bf16", torch.float32), "bf16": ("fp32", torch.bfloat16), "fp32": ("fp32", torch.float32)}
"""By name: the precision of autocast ("fp32" is none) and the dtype of weights."""


@dataclass(kw_only=True)
class Prefill(Speed):
    """Time forward passes over whole prompts, with the output layer on the last token alone.

    A ratio is the ordinary model's time over the other's: above 1 the other is faster.
    """

    kind: ClassVar[str] = "prefill"

    repeats: int = 40
    """Timed passes in a timed block; the block's time is their median."""
    settle_ms: float | None = None
    """Untimed passes before every timed block for about this long; by default 400 ms on CUDA, none on a CPU."""
    precisions: tuple[Literal["autocast", "bf16", "fp32"], ...] = ()
    """autocast (fp32 weights, bf16 autocast), bf16 (bf16 weights) or fp32; by default autocast on CUDA, fp32 on CPU."""

    def cases(self, session: Session) -> list[Case]:
        names = self.precisions or ("autocast" if self.cuda else "fp32",)
        points = [replace(point, precision=name) for point in self.parsed_points() for name in names]
        return model_cases(self, points, self.build)

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> WarmUp:
        precision, dtype = PRECISIONS[str(point.precision)]
        plan = plan_of(self, point.length)
        prompt = LastToken(plan.build(arm, dtype).eval())
        ((tokens, _),) = plan.tokens(1, point.batch_size)
        of_pass = {"pool": pool, "settle_ms": self.settle_ms, "precision": precision}
        return partial(warm_up_passes, self, prompt, tokens.contiguous(), **of_pass)


@dataclass(kw_only=True)
class Decode(Speed):
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
    repeats: int = 40
    """Timed passes in a timed block; the block's time is their median."""
    settle_ms: float | None = None
    """Untimed passes before every timed block for about this long; by default 400 ms on CUDA, none on a CPU."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of weights and cache: bf16 on CUDA, fp32 on a CPU."""
    graphs: Literal["off", "on", "both"] = "both"

    def cases(self, session: Session) -> list[Case]:
        points = self.parsed_points()
        own = any(plan_of(self, point.length).own_decoder for point in points)
        require(not own, f"model must be one of transformers: this project's decoder has no cache; got {self.model}")
        return model_cases(self, points, self.build)

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> WarmUp:
        from saf.hf.cache import cache_bytes, random_cache  # imports transformers, which others do not need

        plan, generator = plan_of(self, point.length), torch.Generator().manual_seed(self.seed)
        model = plan.build(arm, self.dtype_of(self.dtype)).eval()
        token = torch.randint(plan.shape.vocab_size, (point.batch_size, 1), generator=generator).to(plan.device)
        cache, length = random_cache(model, token, point.length)
        step, facts = Step(model, token, point.length, cache, length), {"cache_bytes": cache_bytes(cache)}
        return partial(warm_up_passes, self, step, pool=pool, settle_ms=self.settle_ms, facts=facts)


class Step(nn.Module):
    """The logits of one more token of every sequence, at the last position of a cache full of drawn numbers."""

    def __init__(self, model: nn.Module, token: Tensor, positions: int, cache: Any, length: Tensor):
        super().__init__()
        self.model, self.token, self.last, self.cache, self.length = model, token, positions - 1, cache, length
        self.position = torch.full_like(token, self.last)

    def forward(self) -> Tensor:
        self.length.fill_(self.last)  # each step appends a token: without this the second one would overflow the cache
        model: Any = self.model
        return model(input_ids=self.token, position_ids=self.position, past_key_values=self.cache).logits

    def compiled(self) -> Call:
        return partial(torch.compile(own_program(_run), fullgraph=True, dynamic=False), self)


def _run(step: nn.Module) -> Tensor:
    return step()


def warm_up_passes(
    settings: Speed,
    module: Any,
    *inputs: Tensor,
    pool: GraphPool,
    settle_ms: float | None,
    precision: str = "fp32",
    facts: Row | None = None,
) -> Ready:
    """Compile, run untimed, check the logits, capture the graph if one is timed and check it against a call.

    The method `compiled` of `module` returns a new program of it. "fp32" is no autocast: where weights have one dtype
    already it would only cost launches.

    Raises:
        InputError: The logits are not finite.
        AccuracyError: The graph's logits differ.
    """
    execution = replace(settings.execution, precision=precision)
    device, blocks = execution.device, {}
    if settle_ms is None:
        settle_ms = SETTLE_MS if settings.cuda else 0.0
    for mode in settings.launch_modes():
        # Called and replayed are programs of their own: frozen layers run other kernels in graphs.
        forward = module.compiled() if execution.compile else module

        def call(forward: Call = forward) -> Tensor:
            with torch.no_grad(), execution.autocast():
                return forward(*inputs)

        with for_graphs(module) if mode == "graph" else nullcontext():
            for _ in range(settings.warmup):
                call()
            logits = call().float()
            if not logits.isfinite().all():
                raise InputError("the logits are not finite")
            timed: Call = call
            if mode == "graph":
                timed = GraphReplay(call, device=device, pool=pool)
                timed()
                error = ((timed.outcome.float() - logits).norm() / logits.norm()).item()
                if not error <= MAX_GRAPH_ERROR:  # `not <=`, so that NaN is an error
                    raise AccuracyError(f"a graph's error is {error:.1e}; the limit is {MAX_GRAPH_ERROR:g}")
        once = median_block(timed, repeats=2, device=device)
        repeats = repeats_within(PASS_BLOCK_MS, once, settings.repeats)
        # Models run at the clocks that their own load leaves, which follow it slowly.
        settle = int(settle_ms / once)
        blocks[mode] = partial(median_block, timed, repeats=repeats, device=device, settle=settle)
    # The kernels of the graph where both are timed.
    return Ready(blocks, lambda: kernels_of(timed, device), facts or {})
