"""Several processes that train one model: who takes which micro-batches, what calls the model, and what all agree on.

An updater is given one of these, and asks the same few things: make the `engine` of the model as it is now, average a
loss (`mean`), and agree (`any`, `first`). `Alone` is a process without others; `Replicas` hold the model whole in each
and average gradients by PyTorch's DistributedDataParallel; `Shards` hold a share of it each, and put it together
(`whole`) for everything but updates.
"""

import copy
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, ClassVar, Protocol, TypeVar, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from saf.adapters import adapter_for, rows_of
from saf.errors import UnsupportedError
from saf.machine.execution import Execution
from saf.machine.processes import done_once, group_place, talk
from saf.models.gpt import DecoderLayer
from saf.train.optimizer import state_of_parameter
from saf.train.shares import is_share

Value = TypeVar("Value")


@dataclass(frozen=True)
class Engine:
    """Hold what an update calls and steps, of a model as it is at one moment."""

    forward: Callable[..., Any]
    """The model as updates call it: compiled, or itself."""
    module: nn.Module
    """What has the parameters and their gradients."""
    optimizer: AdamW
    """What steps them."""
    compiles: bool
    """Whether the first call compiles."""
    gradients: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Makes the context in which query and key weights of the model that it was made of have their gradients."""
    apart: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Makes the context of micro-batches but the last of an update: gradients stay with the process that has them."""

    def clip_(self, most: float) -> Tensor:
        """Scale gradients down to this norm of all of them together, and return what it was."""
        return _full(nn.utils.clip_grad_norm_(self.module.parameters(), most))


class Parallel(Protocol):
    """Say what updates ask of the processes that make them together."""

    kind: ClassVar[str]
    """Its name in settings."""
    processes: int
    rank: int
    """Number of this process, from 0."""

    def engine(self, model: nn.Module, optimizer: AdamW, execution: Execution) -> Engine:
        """Return what updates call from now on: the model as it is, its heads and shapes; earlier ones are void."""
        ...

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a value over all processes."""
        ...

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set in any process, the same in all."""
        ...

    def first(self, value: Value) -> Value:
        """Return the first process's value, in all of them."""
        ...

    def whole(self, *, moments: bool = False) -> AbstractContextManager[None]:
        """Make the context in which the model that the engine was made of has its weights, in every process.

        Evaluations and events want that. With `moments` its optimiser has its state as well. An engine made inside
        takes them over.
        """
        ...


class Alone:
    """Be the only process: nothing is shared out, nothing asked of others."""

    kind: ClassVar[str] = "none"
    processes, rank = 1, 0

    def engine(self, model: nn.Module, optimizer: AdamW, execution: Execution) -> Engine:
        """Return the model itself, compiled or not."""
        forward, compiles = _called(model, execution)
        return Engine(forward, model, optimizer, compiles)

    def mean(self, value: Tensor) -> Tensor:
        """Return the value."""
        return value

    def any(self, flag: bool) -> bool:
        """Return the flag."""
        return flag

    def first(self, value: Value) -> Value:
        """Return the value."""
        return value

    def whole(self, *, moments: bool = False) -> AbstractContextManager[None]:
        """Change nothing: the model is whole at all times."""
        return nullcontext()


class _Several:
    """Talk with the other processes of the group."""

    def __init__(self):
        self.rank, self.processes = group_place()

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a value over all processes, on its device."""
        total = value.clone()
        distributed.all_reduce(total)
        return total / self.processes

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set in any process."""
        raised = torch.tensor(int(flag))
        distributed.all_reduce(raised, op=distributed.ReduceOp.MAX, group=talk())
        return bool(raised)

    def first(self, value: Value) -> Value:
        """Return the first process's value."""
        return done_once(lambda: value)


class Replicas(_Several):
    """Hold the whole model in every process; gradients are averaged while the last backward pass of an update runs."""

    kind: ClassVar[str] = "ddp"

    def __init__(self):
        super().__init__()
        self._wrapper: DistributedDataParallel | None = None

    def engine(self, model: nn.Module, optimizer: AdamW, execution: Execution) -> Engine:
        """Wrap the model anew: gradient buckets have the shapes that its parameters have now."""
        forward, compiles = _called(model, execution)
        self._wrapper = None
        gc.collect()  # the hooks of the old wrapper go with it, and it is in a cycle
        device, calling = execution.device, _Calling(model, forward)
        # Without elements they get no gradient, which the wrapper would wait for.
        empty = [name for name, parameter in calling.named_parameters() if not parameter.numel()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(calling, empty)
        self._wrapper = DistributedDataParallel(
            calling,
            device_ids=None if device.type == "cpu" else [torch.cuda.current_device()],
            gradient_as_bucket_view=True,
            **_BUFFERS_STAY,
        )
        return Engine(self._wrapper, model, optimizer, compiles, apart=self._wrapper.no_sync)

    def whole(self, *, moments: bool = False) -> AbstractContextManager[None]:
        """Change nothing: the model is whole at all times."""
        return nullcontext()


_BUFFERS_STAY: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    # the name before PyTorch 2.13
    else "broadcast_buffers": False
}
"""The tables of frozen heads are the same in every process and stay as they are: no forward pass need send them."""


class Shards(_Several):
    """Hold a share of every weight and moment; layers are put together while they compute (PyTorch's FSDP2).

    The model that the engine is made of keeps its structure, and no weights: its parameters read as NaN but inside
    `whole`. A copy of it is sharded and trained.
    """

    kind: ClassVar[str] = "fsdp"
    _model: nn.Module
    _optimizer: AdamW
    _engine: Engine
    """The newest, made of these."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._mesh = init_device_mesh(device.type, (self.processes,))

    def engine(self, model: nn.Module, optimizer: AdamW, execution: Execution) -> Engine:
        """Shard a copy of the model with its optimiser, and let go of the weights and moments that were handed in.

        In bf16 the layers' matrices are sent and used in bfloat16, their gradients added up in float32; embedding and
        norms stay in float32, and so does the residual stream.

        Raises UnsupportedError for what `check_shards` refuses.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # which loads for half a second

        frozen = [site.frozen for site in adapter_for(model).sites() if site.frozen is not None]
        check_shards(execution, trained_patterns=any(heads.trainable for heads in frozen))
        sharded = _sharing_weights(model)
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
        own = dict(zip(model.parameters(), sharded.parameters(), strict=True))
        shares = _sharded_optimizer(optimizer, own, self._mesh)
        self._model, self._optimizer = model, optimizer
        forward, compiles = _called(sharded, execution)
        if execution.by_layer:  # called through the module, whose hooks put together what no layer has
            sharded.forward, forward = forward, sharded
        self._engine = Engine(forward, sharded, shares, compiles, gradients=self._gradients)
        self._let_go_()
        gc.collect()  # an earlier engine's shares go now: its modules and their hooks are in cycles
        return self._engine

    @contextmanager
    def whole(self, *, moments: bool = False) -> Iterator[None]:
        """Gather the weights, and with `moments` the optimiser's state, in every process."""
        before = self._engine
        for parameter, share in self._shares():
            parameter.data = _full(share.detach()).to(parameter.dtype)
        if moments:
            self._gather_moments_()
        try:
            yield
        finally:
            if self._engine is before:
                self._let_go_()

    def _shares(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield every parameter of the model with the sharded one that is trained in its place."""
        yield from zip(self._model.parameters(), self._engine.module.parameters(), strict=True)

    def _gather_moments_(self) -> None:
        """Give the whole model's optimiser the state that the sharded one has, and its learning rate."""
        shares = self._engine.optimizer
        for group in self._optimizer.param_groups:
            group["lr"] = shares.param_groups[0]["lr"]
        for parameter, share in self._shares():
            state = state_of_parameter(shares, share)
            if state:
                self._optimizer.state[parameter] = {name: _full(value).clone() for name, value in state.items()}

    def _let_go_(self) -> None:
        """Free the whole weights and moments: what is read outside of `whole` is NaN."""
        self._optimizer.state.clear()
        for parameter, _ in self._shares():
            parameter.data = parameter.data.new_full((), torch.nan).expand(parameter.shape)
            parameter.grad = None

    @contextmanager
    def _gradients(self) -> Iterator[None]:
        """Let the model's query and key weights have their gradients, in every process."""
        shares = dict(self._shares())
        sites = adapter_for(self._model).sites()
        held = [rows_of(site, role).parameter for site in sites for role in ("query", "key")]
        read = list({id(parameter): parameter for parameter in held}.values())
        for parameter in read:
            gradient = shares[cast(nn.Parameter, parameter)].grad
            parameter.grad = torch.zeros_like(parameter) if gradient is None else _full(gradient)
        try:
            yield
        finally:
            for parameter in read:
                parameter.grad = None


def _sharing_weights(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares its weights' memory, and has the same rows kept for undoing."""
    kept: dict[int, Any] = {id(parameter): nn.Parameter(parameter.data) for parameter in model.parameters()}
    for site in adapter_for(model).sites():
        kept[id(site.removed)] = site.removed
    return copy.deepcopy(model, kept)


def _sharded_optimizer(optimizer: AdamW, own: Mapping[nn.Parameter, nn.Parameter], mesh: DeviceMesh) -> AdamW:
    """Return an AdamW of the sharded parameters with the settings and the state that `optimizer` has."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    groups = [{**group, "params": [own[each] for each in group["params"]]} for group in optimizer.param_groups]
    found = AdamW(groups, fused=True)
    for parameter, share in own.items():
        if parameter.numel() and parameter in optimizer.state:
            found.state[share] = {
                name: distribute_tensor(value, mesh, cast(DTensor, share).placements, src_data_rank=None)
                if value.shape == parameter.shape
                else value.clone()
                for name, value in optimizer.state[parameter].items()
            }
    return found


def _full(tensor: Tensor) -> Tensor:
    """Return a tensor put together from its shards, or itself."""
    return cast(Any, tensor).full_tensor() if is_share(tensor) else tensor


class _Calling(nn.Module):
    """Let a wrapper see a model's parameters, and call what the model compiles to."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]):
        super().__init__()
        self.model = model
        self._compute = (forward,)  # in a tuple, a module is not taken for a part of this one

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """Call it."""
        return self._compute[0](*inputs, **named)


def _called(model: nn.Module, execution: Execution) -> tuple[Callable[..., Any], bool]:
    """Return the model as updates call it, compiled as `execution` says, and whether the first call compiles."""
    recomputes = execution.activation_checkpointing
    if execution.by_layer:
        by_layer = adapter_for(model).compiled_by_layer(activation_checkpointing=recomputes)
        return by_layer, by_layer.new > 0
    called = execution.callable(model, fullgraph=True)
    return partial(called, activation_checkpointing=True) if recomputes else called, execution.compile


def check_shards(execution: Execution, *, trained_patterns: bool) -> None:
    """Raise UnsupportedError for a model compiled as a whole and for patterns that are trained: neither has shares."""
    if execution.compile and not execution.by_layer:
        raise UnsupportedError(
            "parallel='fsdp' puts layers together one at a time: pass compile='layers' or 'off', or train with "
            "parallel='ddp'"
        )
    if trained_patterns:
        raise UnsupportedError("trained patterns cannot be sharded; train them with parallel='ddp'")
