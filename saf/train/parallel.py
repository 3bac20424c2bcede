"""Several processes that train one model: who takes which micro-batches, what calls the model, and what all agree on.

An updater is given one of these, and asks the same few things: make the `engine` of the model as it is now, average a
loss (`mean`), and agree (`any`, `first`). `Alone` is a process without others; `Replicas` hold the model whole in each
and average gradients by PyTorch's DistributedDataParallel.
"""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from saf.adapters import adapter_for
from saf.errors import InputError
from saf.machine.execution import Execution
from saf.machine.processes import PATIENCE, group_place, in_group

ParallelKind = Literal["auto", "none", "ddp"]
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
    apart: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Makes the context of micro-batches but the last of an update: gradients stay with the process that has them."""


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


class Replicas:
    """Hold the whole model in every process; gradients are averaged while the last backward pass of an update runs."""

    kind: ClassVar[str] = "ddp"

    def __init__(self):
        self.rank, self.processes = group_place()
        # Beside the group of gradients: the host's own messages go by gloo, and wait for what the first one does alone.
        self._talk = cast(distributed.ProcessGroup, distributed.new_group(backend="gloo", timeout=PATIENCE))
        self._wrapper: DistributedDataParallel | None = None

    def engine(self, model: nn.Module, optimizer: AdamW, execution: Execution) -> Engine:
        """Wrap the model anew: gradient buckets have the shapes that its parameters have now."""
        forward, compiles = _called(model, execution)
        self._wrapper = None
        gc.collect()  # the hooks of the old wrapper go with it, and it is in a cycle
        device = execution.device
        self._wrapper = DistributedDataParallel(
            _Calling(model, forward),
            device_ids=None if device.type == "cpu" else [torch.cuda.current_device()],
            gradient_as_bucket_view=True,
            **_BUFFERS_STAY,
        )
        return Engine(self._wrapper, model, optimizer, compiles, self._wrapper.no_sync)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a value over all processes, on its device."""
        total = value.clone()
        distributed.all_reduce(total)
        return total / self.processes

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set in any process."""
        raised = torch.tensor(int(flag))
        distributed.all_reduce(raised, op=distributed.ReduceOp.MAX, group=self._talk)
        return bool(raised)

    def first(self, value: Value) -> Value:
        """Return the first process's value."""
        message: list[Any] = [value]
        distributed.broadcast_object_list(message, src=0, group=self._talk)
        return message[0]


_BUFFERS_STAY: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    # the name before PyTorch 2.13
    else "broadcast_buffers": False
}
"""The tables of frozen heads are the same in every process and stay as they are: no forward pass need send them."""


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
    if execution.by_layer:
        by_layer = adapter_for(model).compiled_by_layer()
        return by_layer, by_layer.new > 0
    return execution.callable(model, fullgraph=True), execution.compile


def parallel_of(kind: ParallelKind) -> Parallel:
    """Return how this process trains beside others, as settings say: "auto" is "ddp" in a group, "none" without one.

    Raises InputError for "none" in a group of several processes, and for another kind without a group.
    """
    processes = group_place()[1]
    if kind == "none" and processes > 1:
        raise InputError(
            f"parallel='none' trains in one process, and {processes} were started, which would all do the same; start "
            "one, or leave it out"
        )
    if kind == "ddp" and not in_group():
        raise InputError(
            "parallel='ddp' trains in a group of processes, and there is none: start "
            "`torchrun --nproc-per-node N -m saf pretrain ...`"
        )
    return Replicas() if in_group() and kind != "none" and (processes > 1 or kind == "ddp") else Alone()


def micro_batches_of_one(accumulation: int, processes: int, *, batch_size: int) -> int:
    """Return how many of an update's micro-batches each process takes; raise InputError when they cannot be shared out.

    >>> micro_batches_of_one(8, 4, batch_size=2)
    2
    """
    if accumulation % processes:
        windows = accumulation * batch_size
        raise InputError(
            f"an update has accumulation={accumulation} micro-batches of batch_size={batch_size} windows, which "
            f"{processes} processes cannot share evenly; its {windows} windows can be shared where accumulation is a "
            f"multiple of {processes}"
            + (
                f", such as accumulation={processes} and batch_size={windows // processes}"
                if windows % processes == 0
                else ": choose another number of processes"
            )
        )
    return accumulation // processes
