"""One optimiser update: `Updater` does it, in a run or a benchmark, in one process or as one of several ranks.

AdamW and its learning rate follow, then the ranks (`Parallel`), then CUDA graphs.
"""

import copy
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from saf.calibration import QKGradient
from saf.distributed import gloo_group, in_group, rank_and_size, whole_tensor
from saf.errors import DivergenceError, InputError, UnsupportedError
from saf.machine import Execution, GraphPool, GraphReplay
from saf.models import GPT, GPTConfig
from saf.models.adapter import adapter_for, longest_input, unwrap
from saf.models.by_layer import CompiledByLayer
from saf.models.gpt import DecoderLayer
from saf.ops import for_graphs
from saf.ops.loss_and_gelu import IGNORE_INDEX, chunk_rows
from saf.surgery import pattern_parameters

# --- one update


class UpdateResult(NamedTuple):
    """The measurements of one update."""

    loss: float
    """Loss before the step, nats per target: the mean over the targets of all its micro-batches."""
    grad_norm: float
    """Norm of the gradient before it was clipped."""
    seconds: float
    """Seconds until the host has the loss; the optimiser's step may still run on the device."""


@dataclass(kw_only=True)
class Updater:
    """Update one model. Several ranks share the micro-batches of an update, and all get the same result.

    Call `compile_` whenever heads change.
    """

    model: nn.Module
    optimizer: AdamW
    """The optimiser that events edit; `engine.optimizer` steps, which with FSDP is another one (see `Shards`)."""
    batches: Iterator[tuple[Tensor, Tensor]]
    execution: Execution
    accumulation: int
    """Micro-batches of one update that this rank takes."""
    clip: float
    """Largest gradient norm; larger gradients are scaled down to it."""
    gradient: QKGradient | None = None
    """Average of Q/K gradients over updates; None when no score reads it."""
    done: int = 0
    """Updates done since the model's beginning, those of its parents included."""
    parallel: "Parallel" = field(default_factory=lambda: Parallel())
    """The ranks that make updates together."""
    graphed: bool = False
    """Whether micro-batches are replayed as CUDA graphs."""
    engine: "Engine" = field(init=False)
    """The model and optimiser that updates call."""
    micro_batch: Callable[[Tensor, Tensor], Tensor] = field(init=False)
    """Takes the inputs and targets of a micro-batch, adds its gradients, and returns its share of the mean loss."""
    targets: Tensor = field(init=False)
    """Number of targets of the update, mean over ranks: a tensor that stays in place, as CUDA graphs read it."""
    compiling: bool = field(init=False)
    """Whether the next update compiles, so that later ones take less time."""

    def __post_init__(self):
        self.targets = torch.ones((), dtype=torch.float64, device=self.execution.device)
        self.compile_()

    def compile_(self) -> None:
        """Prepare updates for the heads that the model has now; a compiled model compiles in its next update."""
        if self.graphed:
            trained = bool(pattern_parameters(self.model))
            if reason := graphs_unsupported(self.execution, self.parallel.kind, trained_patterns=trained):
                raise UnsupportedError(reason)
        self.engine = self.parallel.engine(self.model, self.optimizer, self.execution)
        self.compiling = self.engine.compiles
        self.micro_batch = self._pass
        if self.graphed:
            pads = not self.execution.compile
            self.micro_batch = GraphedPasses(self._pass, self.model, self.execution.device, pads=pads)

    def update(self, learning_rate: float) -> UpdateResult:
        """Do one update with this learning rate.

        Raises:
            DivergenceError: Loss or gradient norm is not finite; weights and moments are as before the update.
        """
        began = time.perf_counter()
        optimizer = self.engine.optimizer
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        loss = self.parallel.mean(self._accumulate_gradients())
        if self.gradient is not None:
            self.gradient.update()
        norm = whole_tensor(nn.utils.clip_grad_norm_(self.engine.module.parameters(), self.clip))
        loss_and_norm = torch.stack([loss, norm])
        # Copied before the step is launched: waiting for the copy then does not wait for the step.
        read = _start_reading(loss_and_norm)
        step_if_finite_(optimizer, loss_and_norm)
        optimizer.zero_grad(set_to_none=True)
        loss_value, norm_value = read()
        seconds = time.perf_counter() - began
        if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
            raise DivergenceError(
                f"update {self.done + 1} was not applied: its loss is {loss_value}, its gradient norm {norm_value}"
            )
        self.done += 1
        self.compiling = False
        return UpdateResult(loss_value, norm_value, seconds)

    def _accumulate_gradients(self) -> Tensor:
        """Add up the gradients of this rank's share of the mean loss and return that share, on the device.

        The mean is over the targets of the whole update: a micro-batch weighs as much as it has targets. Ranks'
        gradients are averaged, so the mean of their shares is the loss.
        """
        # All batches at once: the mean needs the number of targets before the first backward pass.
        micro_batches = [next(self.batches) for _ in range(self.accumulation)]
        counts = torch.stack([(targets != IGNORE_INDEX).sum() for _, targets in micro_batches])
        self.targets.copy_(self.parallel.mean(counts.sum().double()))
        total = torch.zeros((), device=self.execution.device)
        for remaining, (inputs, targets) in zip(reversed(range(self.accumulation)), micro_batches, strict=True):
            # With DDP, ranks exchange gradients once an update, in the last backward pass.
            with self.engine.no_sync() if remaining else nullcontext():
                total += self.micro_batch(inputs, targets)
        return total

    def _pass(self, inputs: Tensor, targets: Tensor) -> Tensor:
        share = (targets != IGNORE_INDEX).sum() / self.targets
        with self.execution.autocast():
            loss = self.engine.forward(inputs, targets=targets)
        loss = loss * share.to(loss.dtype)
        loss.backward()
        return loss.detach()


def _start_reading(values: Tensor) -> Callable[[], list[float]]:
    """Begin copying values to the host; the returned call waits for them, not for work that is queued afterwards."""
    if values.device.type != "cuda":
        return values.tolist
    # A copy to pageable memory would make the host wait at once.
    copied = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copied.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> list[float]:
        arrived.synchronize()
        return copied.tolist()

    return read


# --- AdamW


def build_optimizer(model: nn.Module, *, betas: tuple[float, float] = (0.9, 0.95), weight_decay: float = 0.1) -> AdamW:
    """Return the paper's AdamW: matrices decay (the tied embedding is one), vectors do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    # Each update sets its learning rate. Only the fused step can be skipped on the device (`step_if_finite_`).
    return AdamW([group for group in groups if group["params"]], lr=0.0, betas=betas, fused=True)


def learning_rate(progress: float, *, peak: float, min_ratio: float = 0.1, warmup: float = 0.0) -> float:
    """Return the learning rate at `progress` in [0, 1]; below 0 and above 1 it stays at the ends.

    `warmup` is the share of the schedule that rises linearly from 0 to `peak`; the rest is half a cosine from
    `peak` to `peak * min_ratio`.

    >>> [round(learning_rate(p, peak=1.0, warmup=0.1), 3) for p in (0.05, 0.1, 0.55, 1.0)]
    [0.5, 1.0, 0.55, 0.1]
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return peak * progress / warmup
    decay = (progress - warmup) / (1 - warmup)
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * decay)))


def step_if_finite_(optimizer: AdamW, watched: Tensor) -> None:
    """Step unless a watched value is not finite; weights, moments and step counts then stay as they are.

    The check runs on the device, so the host need not wait for the values before it launches the step.
    """
    # The fused kernels read this attribute, as they do for a gradient scaler.
    optimizer.found_inf = (~torch.isfinite(watched)).any().float()  # type: ignore[attr-defined]
    optimizer.step()


# --- one process, or ranks that train together

STATE_BYTES = 16
"""Bytes of a parameter's float32 weight, gradient and two moments."""


class UpdateMemory(NamedTuple):
    """Bytes of an update's memory on one device."""

    state: float
    """Weights, gradients and moments."""
    activations: float
    """Activations and logits of a micro-batch, and copies of weights."""

    @property
    def total(self) -> float:
        return self.state + self.activations


def update_memory(shape: GPTConfig, tokens: int, *, recomputes: bool = False, shards: int = 1) -> UpdateMemory:
    """Estimate the memory of updates of an ordinary model in bf16, with `tokens` in a micro-batch.

    `recomputes` says that activation checkpointing keeps only the input of each layer. Each of `shards` processes holds
    an equal share of the state and gathers a layer at a time, with the next one. Peaks measured on an H200 are 0.98 to
    1.03 of the estimate for 1B and 124M (results/bench).
    """
    parameters = shape.num_parameters
    # In hidden sizes: a layer's matrices are q, k, v, the output and two of the MLP, and about as many activations a
    # token stay until its backward pass, in 16 bits.
    widths = 4 + 2 * shape.mlp_ratio
    of_layer = widths * shape.hidden_size**2
    if shards > 1:  # two layers, one layer's gradients; embedding and norms whole with their gradients
        copies = (2 * 2 + 4) * of_layer + 2 * 4 * (parameters - shape.num_layers * of_layer)
    else:  # autocast keeps 16-bit copies through a micro-batch
        copies = 2 * parameters
    layer = widths * 2 * tokens * shape.hidden_size
    inputs = 4 * tokens * shape.hidden_size * shape.num_layers  # of a float32 residual stream
    logits = 8.0 * (shape.vocab_size * min(tokens, chunk_rows(shape.vocab_size)))  # with their gradients
    layers = layer + inputs if recomputes else layer * shape.num_layers
    return UpdateMemory(STATE_BYTES * parameters / shards, layers + logits + copies)


def parallel_of(kind: str, *, parameters: int, execution: Execution) -> "Parallel":
    """Return the ranks that train a model of this number of `parameters`.

    "auto" is "none" for one process, "ddp" for several, unless weights, gradients and moments in float32 would take
    more than half of a GPU's memory: then "fsdp".
    """
    processes = rank_and_size()[1]
    if kind == "none" and processes > 1:
        raise InputError(f"parallel='none' needs one process, got {processes}; start one, or leave it out")
    if kind in ("ddp", "fsdp") and not in_group():
        raise InputError(
            f"parallel={kind!r} needs a group of processes; start `torchrun --nproc-per-node N -m saf pretrain ...`"
        )
    if kind == "auto":
        kind = "none" if processes == 1 else "ddp"
        if kind == "ddp" and execution.device.type == "cuda":
            memory = torch.cuda.get_device_properties(execution.device).total_memory
            kind = "fsdp" if STATE_BYTES * parameters > memory / 2 else "ddp"
    if kind == "fsdp":
        if execution.compile and not execution.by_layer:
            raise UnsupportedError("parallel='fsdp' needs compile='layers' or 'off', got a model compiled whole")
        return Shards(execution.device)
    return Replicas() if kind == "ddp" else Parallel()


def micro_batches_per_rank(accumulation: int, processes: int, *, batch_size: int) -> int:
    """Return how many of an update's micro-batches each process takes; InputError when the shares are uneven.

    >>> micro_batches_per_rank(8, 4, batch_size=2)
    2
    """
    if accumulation % processes:
        fits = f"accumulation={processes} and batch_size={max(1, accumulation * batch_size // processes)}"
        raise InputError(f"accumulation must be a multiple of {processes} processes, got {accumulation}; try {fits}")
    return accumulation // processes


@dataclass(frozen=True)
class Engine:
    """The model and optimiser that updates call, until heads change."""

    forward: Callable[..., Any]
    """The model as updates call it: compiled, or itself."""
    module: nn.Module
    """The module that has the parameters and their gradients."""
    optimizer: AdamW
    compiles: bool
    """Whether the first call compiles."""
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Context of all micro-batches of an update but the last: gradients stay with their rank."""


class Parallel:
    """The ranks that make updates together, as an updater sees them: this class is one process."""

    kind: ClassVar[str] = "none"
    """Its name in settings."""
    rank, processes = 0, 1

    def engine(self, model: nn.Module, optimizer: AdamW, execution: Execution) -> Engine:
        """Return an engine for the model's present heads and shapes; earlier engines must not be called again."""
        forward, compiles = _compiled(model, execution)
        return Engine(forward, model, optimizer, compiles)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a value over all ranks, on its device."""
        if self.processes == 1:
            return value
        total = value.clone()
        distributed.all_reduce(total)
        return total / self.processes

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank, the same on all."""
        if self.processes == 1:
            return flag
        # By gloo, on the CPU: reading a flag from the device would wait for all work queued there.
        raised = torch.tensor(int(flag))
        distributed.all_reduce(raised, op=distributed.ReduceOp.MAX, group=gloo_group())
        return bool(raised)

    def whole(self, *, moments: bool = False) -> AbstractContextManager[None]:
        """Gather the weights, and with `moments` the optimiser's state, on every rank, for an evaluation or an event.

        An engine that is built inside takes them over.
        """
        return nullcontext()


class Replicas(Parallel):
    """Hold the whole model on every rank; the last backward pass of an update averages gradients (PyTorch's DDP)."""

    kind: ClassVar[str] = "ddp"

    def __init__(self):
        self.rank, self.processes = rank_and_size()
        self._wrapper: DistributedDataParallel | None = None

    def engine(self, model: nn.Module, optimizer: AdamW, execution: Execution) -> Engine:
        forward, compiles = _compiled(model, execution)
        self._wrapper = None  # a new one, whose gradient buckets have the parameters' present shapes
        gc.collect()  # the hooks of the old wrapper go with it, and it is in a cycle
        module = _CompiledModule(model, forward)
        # DDP would wait for the gradients of weights without elements, which get none. The tables of frozen heads are
        # the same on every rank, so no forward pass needs to send them.
        ignored = [name for name, parameter in module.named_parameters() if not parameter.numel()]
        ignored += [name for name, _ in module.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
        devices = None if execution.device.type == "cpu" else [torch.cuda.current_device()]
        self._wrapper = DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True)
        return Engine(self._wrapper, model, optimizer, compiles, no_sync=self._wrapper.no_sync)


class Shards(Parallel):
    """Hold a share of every weight and moment on each rank; layers are gathered while they compute (FSDP2).

    A sharded copy of the model is trained, by an AdamW of its own: the engine's module and optimiser hold the only
    weights and moments, and a checkpoint gathers them one tensor at a time. The updater's model and optimiser, which
    events edit, keep their structure and hold nothing: parameters are NaN and the state is empty, except inside
    `whole`. It gathers the weights, and for an event the moments. The engine that is built at the event's end shards
    both anew. With one process or DDP, the updater's optimiser is the engine's and always holds the moments.
    """

    kind: ClassVar[str] = "fsdp"
    _model: nn.Module
    _optimizer: AdamW
    _engine: Engine

    def __init__(self, device: torch.device):
        self.rank, self.processes = rank_and_size()
        self._mesh = init_device_mesh(device.type, (self.processes,))

    def engine(self, model: nn.Module, optimizer: AdamW, execution: Execution) -> Engine:
        """Shard a copy of the model with its optimiser, and free the original's weights and moments.

        In bf16 the layers' matrices are sent and used in bfloat16, their gradients added up in float32; embedding and
        norms stay in float32, and so does the residual stream.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes half a second to import

        sharded = _copy_of(model)
        bf16, policy = execution.precision == "bf16", MixedPrecisionPolicy()
        if bf16:
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        empty = {parameter for parameter in sharded.parameters() if not parameter.numel()}
        for parameter in empty:  # FSDP2 takes none; they have nothing to train
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(torch.bfloat16 if bf16 else parameter.dtype)
        for layer in [module for module in sharded.modules() if isinstance(module, DecoderLayer)]:
            # Both are gathered as one; norms stay with the root module, in float32, as where one process trains.
            parts: list[nn.Module] = [layer.attention, layer.mlp]
            fully_shard(parts, mesh=self._mesh, mp_policy=policy, ignored_params=empty)
        fully_shard(sharded, mesh=self._mesh, ignored_params=empty)
        pairs = dict(zip(model.parameters(), sharded.parameters(), strict=True))
        own = _sharded_optimizer(optimizer, pairs, self._mesh)
        self._model, self._optimizer = model, optimizer
        forward, compiles = _compiled(sharded, execution)
        if execution.by_layer:  # called through the module, whose hooks gather embedding and norms
            sharded.forward, forward = forward, sharded
        self._engine = Engine(forward, sharded, own, compiles)
        self._free_()
        gc.collect()  # an earlier engine's shards go now: its modules and their hooks are in cycles
        return self._engine

    @contextmanager
    def whole(self, *, moments: bool = False) -> Iterator[None]:
        before = self._engine
        for parameter, shard in self._pairs():
            parameter.data = whole_tensor(shard.detach()).to(parameter.dtype)
        if moments:
            self._gather_moments_()
        try:
            yield
        finally:
            if self._engine is before:  # else an event built a new one, which freed them itself
                self._free_()

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield every parameter of the original model with its sharded copy, which is trained."""
        yield from zip(self._model.parameters(), self._engine.module.parameters(), strict=True)

    def _gather_moments_(self) -> None:
        """Copy state and learning rate of the sharded optimiser to the original one."""
        sharded = self._engine.optimizer
        for group in self._optimizer.param_groups:
            group["lr"] = sharded.param_groups[0]["lr"]
        for parameter, shard in self._pairs():
            if state := sharded.state.get(shard):
                self._optimizer.state[parameter] = {name: whole_tensor(value).clone() for name, value in state.items()}

    def _free_(self) -> None:
        self._optimizer.state.clear()
        for parameter, _ in self._pairs():
            parameter.data = parameter.data.new_full((), torch.nan).expand(parameter.shape)
            parameter.grad = None


def _copy_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares the memory of its weights and of the rows for undoing."""
    shared: dict[int, Any] = {id(parameter): nn.Parameter(parameter.data) for parameter in model.parameters()}
    for site in adapter_for(model).sites():
        shared[id(site.removed)] = site.removed
    return copy.deepcopy(model, shared)


def _sharded_optimizer(optimizer: AdamW, pairs: Mapping[nn.Parameter, nn.Parameter], mesh: DeviceMesh) -> AdamW:
    """Return an AdamW of the sharded parameters with the settings and the state that `optimizer` has."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    groups = [{**group, "params": [pairs[each] for each in group["params"]]} for group in optimizer.param_groups]
    sharded = AdamW(groups, fused=True)
    for parameter, shard in pairs.items():
        for name, value in optimizer.state.get(parameter, {}).items():
            # Moments of a checkpoint lie on the CPU; one at a time is whole on the device.
            value = value.to(shard.device)
            if isinstance(shard, DTensor) and value.shape == shard.shape:
                # Every rank has the whole tensor: none needs to send it (src_data_rank).
                value = distribute_tensor(value, mesh, shard.placements, src_data_rank=None)
            else:
                value = value.clone()  # the step count, or the moments of a weight without elements
            sharded.state[shard][name] = value
    return sharded


class _CompiledModule(nn.Module):
    """A module with a model's parameters whose forward pass is the compiled one."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]):
        super().__init__()
        self.model = model
        self._compute = (forward,)  # a tuple, so that a module is not registered as a part of this one

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        return self._compute[0](*inputs, **named)


def _compiled(model: nn.Module, execution: Execution) -> tuple[Callable[..., Any], bool]:
    """Return the model as updates call it, and whether the first call compiles."""
    recomputes = execution.activation_checkpointing
    if execution.by_layer:
        by_layer = CompiledByLayer(cast(GPT, unwrap(model)), activation_checkpointing=recomputes)
        return by_layer, by_layer.num_new_programs > 0
    forward: Callable[..., Any] = model
    if execution.compile:
        torch._dynamo.reset()  # programs of earlier shapes go
        forward = torch.compile(model, fullgraph=True)  # a broken graph would run slower without a message
    return partial(forward, activation_checkpointing=True) if recomputes else forward, execution.compile


# --- CUDA graphs: one launch a micro-batch in place of 1,300

GRAPHED_SIZE = 8_192 * 768
"""Tokens of a micro-batch times channels of the model up to which `graphs="auto"` captures. There the host is slower
than the device: by a sixth with all heads ordinary, by two thirds with a quarter frozen (124M, two sequences of 4K)."""


def graphs_unsupported(
    execution: Execution, kind: str, *, trained_patterns: bool, many_lengths: bool = False
) -> str | None:
    """Return why micro-batches cannot be captured, None where they can; `kind` is `Parallel.kind`."""
    if execution.device.type != "cuda":
        reason = f"they need a CUDA device, and updates run on {execution.device}"
    elif execution.compile and many_lengths:
        reason = "each length of micro-batches would compile a program of its own; pass compile='off'"
    elif kind != Parallel.kind:
        reason = "they are for one process"
    elif execution.activation_checkpointing:
        reason = "they keep all activations; leave activation_checkpointing out"
    elif trained_patterns:
        reason = "they need fixed patterns; leave freeze.trainable out"
    else:
        return None
    return f"no CUDA graphs of micro-batches: {reason}"


class GraphedPasses:
    """Replay a captured forward and backward pass for each shape of micro-batches.

    The first micro-batch runs uncaptured and shows which parameters have gradients, which are then added up in memory
    that stays. Later ones are padded on the right, where causal attention does not look and nothing is a target; a
    compiled pass is not padded. Graphs read weights and tables where they lie: make another object after an event.
    """

    def __init__(self, run: Callable[[Tensor, Tensor], Tensor], model: nn.Module, device: torch.device, *, pads: bool):
        self._run, self._model, self._device, self._pads = run, model, device, pads
        self._longest, self._pool = longest_input(model), GraphPool()
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self.graphs: dict[torch.Size, tuple[Tensor, Tensor, GraphReplay]] = {}
        """By the shape of micro-batches, with the memory that each reads."""

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Add the gradients of a micro-batch and return its loss, which the next call may overwrite."""
        if not self._gradients:
            loss = self._run(inputs, targets)
            self._gradients = {p: torch.empty_like(p) for p in self._model.parameters() if p.grad is not None}
            return loss
        for parameter, own in self._gradients.items():  # graphs add to this memory, whatever it holds
            if parameter.grad is not own:
                own.zero_() if parameter.grad is None else own.copy_(parameter.grad)
                parameter.grad = own
        extra = self._padding(inputs.shape[1]) if self._pads else 0
        inputs, targets = F.pad(inputs, (0, extra)), F.pad(targets, (0, extra), value=IGNORE_INDEX)
        if inputs.shape not in self.graphs:
            self.graphs[inputs.shape] = inputs, targets, self._capture(inputs, targets)
        own_inputs, own_targets, replay = self.graphs[inputs.shape]
        own_inputs.copy_(inputs)
        own_targets.copy_(targets)
        replay()
        return replay.outcome

    def _padding(self, length: int) -> int:
        """Return how many tokens to add: an eighth at most above 64, within the longest input of the model."""
        # A sixteenth of the next power of two: eight shapes, and so eight graphs, between two powers.
        step = max(8, (1 << (length - 1).bit_length()) // 16)
        padded = -(-length // step) * step
        if self._longest is not None:
            padded = min(padded, max(self._longest, length))
        return padded - length

    def _capture(self, inputs: Tensor, targets: Tensor) -> GraphReplay:
        """Return a graph that reads this memory; gradients are afterwards what they were."""
        before = [own.clone() for own in self._gradients.values()]
        # A reference cycle can keep an earlier pass alive: this one would reuse its autograd nodes, of another stream.
        # Memory cached by passes without a graph would lie unused next to the graphs' own.
        gc.collect()
        torch.cuda.empty_cache()
        with for_graphs(self._model):
            run = partial(self._run, inputs, targets)
            replay = GraphReplay(run, device=self._device, pool=self._pool, same_stream=True)
        if any(p.grad is not None and p not in self._gradients for p in self._model.parameters()):
            raise UnsupportedError("CUDA graphs need the same parameters in every micro-batch; pass graphs='off'")
        for own, values in zip(self._gradients.values(), before, strict=True):
            own.copy_(values)
        return replay
