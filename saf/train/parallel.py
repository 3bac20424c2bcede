"""Ranks that train one model together: the model and optimiser that an update calls, averages and stops of all ranks.

`Parallel` is one process. `Replicas` hold the whole model each and average gradients (PyTorch's DDP). `Shards` hold a
share of it each (FSDP2), and gather it (`whole`) for everything but updates.
"""

import copy
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from saf.checkpoint import parameter_state
from saf.distributed import gloo_group, in_group, rank_and_size, whole_tensor
from saf.errors import InputError, UnsupportedError
from saf.machine import Execution
from saf.models.adapter import adapter_for
from saf.models.gpt import DecoderLayer

ParallelKind = Literal["auto", "none", "ddp", "fsdp"]
STATE_BYTES = 16
"""Bytes of a parameter's float32 weight, gradient and two moments."""


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

    def clip_(self, max_norm: float) -> Tensor:
        """Scale gradients down to this norm of all of them together, and return the norm before."""
        return whole_tensor(nn.utils.clip_grad_norm_(self.module.parameters(), max_norm))


class Parallel:
    """The ranks that make updates together, as an updater sees them: this class is one process."""

    kind: ClassVar[str] = "none"
    """Its name in settings."""
    processes, rank = 1, 0

    def engine(self, model: nn.Module, optimizer: AdamW, execution: Execution) -> Engine:
        """Return an engine for the model's present heads and shapes; earlier ones are void."""
        forward, compiles = _compiled(model, execution)
        return Engine(forward, model, optimizer, compiles)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a value over all ranks, on its device."""
        return value

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank, the same on all."""
        return flag

    def whole(self, *, moments: bool = False) -> AbstractContextManager[None]:
        """Gather the weights, and with `moments` the optimiser's state, on every rank, for an evaluation or an event.

        An engine that is built inside takes them over.
        """
        return nullcontext()


class _Group(Parallel):
    def __init__(self):
        self.rank, self.processes = rank_and_size()

    def mean(self, value: Tensor) -> Tensor:
        total = value.clone()
        distributed.all_reduce(total)
        return total / self.processes

    def any(self, flag: bool) -> bool:
        raised = torch.tensor(int(flag))
        distributed.all_reduce(raised, op=distributed.ReduceOp.MAX, group=gloo_group())
        return bool(raised)


class Replicas(_Group):
    """Hold the whole model on every rank; the last backward pass of an update averages gradients."""

    kind: ClassVar[str] = "ddp"

    def __init__(self):
        super().__init__()
        self._wrapper: DistributedDataParallel | None = None

    def engine(self, model: nn.Module, optimizer: AdamW, execution: Execution) -> Engine:
        forward, compiles = _compiled(model, execution)
        self._wrapper = None  # a new one, whose gradient buckets have the parameters' present shapes
        gc.collect()  # the hooks of the old wrapper go with it, and it is in a cycle
        device, calling = execution.device, _CompiledModule(model, forward)
        # Weights without elements get no gradient, which the wrapper would wait for. The tables of frozen heads are the
        # same on every rank: no forward pass need send them.
        ignored = [name for name, parameter in calling.named_parameters() if not parameter.numel()]
        ignored += [name for name, _ in calling.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(calling, ignored)
        devices = None if device.type == "cpu" else [torch.cuda.current_device()]
        self._wrapper = DistributedDataParallel(calling, device_ids=devices, gradient_as_bucket_view=True)
        return Engine(self._wrapper, model, optimizer, compiles, no_sync=self._wrapper.no_sync)


class Shards(_Group):
    """Hold a share of every weight and moment; layers are gathered while they compute (FSDP2).

    A sharded copy of the model is trained. The original keeps its structure without weights: its parameters are NaN
    except inside `whole`.
    """

    kind: ClassVar[str] = "fsdp"
    _model: nn.Module
    _optimizer: AdamW
    _engine: Engine

    def __init__(self, device: torch.device):
        super().__init__()
        self._mesh = init_device_mesh(device.type, (self.processes,))

    def engine(self, model: nn.Module, optimizer: AdamW, execution: Execution) -> Engine:
        """Shard a copy of the model with its optimiser, and free the original's weights and moments.

        In bf16 the layers' matrices are sent and used in bfloat16, their gradients added up in float32; embedding and
        norms stay in float32, and so does the residual stream.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # which loads for half a second

        sharded = _copy_of(model)
        low, policy = execution.precision == "bf16", MixedPrecisionPolicy()
        if low:
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        empty = {parameter for parameter in sharded.parameters() if not parameter.numel()}
        for parameter in empty:  # FSDP2 takes none; they have nothing to train
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(torch.bfloat16 if low else parameter.dtype)
        for layer in [module for module in sharded.modules() if isinstance(module, DecoderLayer)]:
            # One group; norms are the root's, in float32, as they are where one process trains.
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
        """Gather the weights, and with `moments` the optimiser's state, on every rank."""
        before = self._engine
        for parameter, shard in self._pairs():
            parameter.data = whole_tensor(shard.detach()).to(parameter.dtype)
        if moments:
            self._gather_moments_()
        try:
            yield
        finally:
            if self._engine is before:
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
            if state := parameter_state(sharded, shard):
                self._optimizer.state[parameter] = {name: whole_tensor(value).clone() for name, value in state.items()}

    def _free_(self) -> None:
        """Free the original weights and moments."""
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
        if parameter.numel() and parameter in optimizer.state:
            # Those of a checkpoint lie on the CPU; one tensor at a time is whole on the device.
            state = ((name, value.to(shard.device)) for name, value in optimizer.state[parameter].items())
            sharded.state[shard] = {
                name: distribute_tensor(value, mesh, cast(DTensor, shard).placements, src_data_rank=None)
                if value.shape == parameter.shape
                else value.clone()
                for name, value in state
            }
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
        by_layer = adapter_for(model).compiled_by_layer(activation_checkpointing=recomputes)
        return by_layer, by_layer.new > 0
    forward: Callable[..., Any] = model
    if execution.compile:
        torch._dynamo.reset()  # programs of earlier shapes go
        forward = torch.compile(model, fullgraph=True)  # a broken graph would run slower without a message
    return partial(forward, activation_checkpointing=True) if recomputes else forward, execution.compile


# --- the kind of parallel training, and the shares of micro-batches


def parallel_of(kind: ParallelKind, *, parameters: int, execution: Execution) -> Parallel:
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
            kind = "ddp" if STATE_BYTES * parameters <= memory / 2 else "fsdp"
    if kind == "fsdp" and execution.compile and not execution.by_layer:
        raise UnsupportedError("parallel='fsdp' needs compile='layers' or 'off', got a model compiled whole")
    if kind == "fsdp":
        return Shards(execution.device)
    return Replicas() if kind == "ddp" else Parallel()


def micro_batches_of_one(accumulation: int, processes: int, *, batch_size: int) -> int:
    """Return how many of an update's micro-batches each process takes; InputError when the shares are uneven.

    >>> micro_batches_of_one(8, 4, batch_size=2)
    2
    """
    if accumulation % processes:
        fits = f"accumulation={processes} and batch_size={max(1, accumulation * batch_size // processes)}"
        raise InputError(f"accumulation must be a multiple of {processes} processes, got {accumulation}; try {fits}")
    return accumulation // processes
