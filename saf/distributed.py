"""Several processes as one: the group that `torchrun` starts, errors raised together, and work of rank 0 for all.

Without a group every function here does its work in this one process.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed

import saf.errors
from saf.errors import InputError, SafError, SafWarning

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
TIMEOUT = timedelta(days=7)
"""How long ranks wait for rank 0's work; a group's own limit, 10 minutes for NCCL, is for messages."""
ERROR_TIMEOUT = timedelta(seconds=20)
"""How long a rank that failed waits for the others to receive its error. `torchrun` then gives them 30 seconds."""
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that `torchrun` sets."""

# --- the group


def in_group() -> bool:
    """Return whether this process is in a group, of one process perhaps."""
    return distributed.is_available() and distributed.is_initialized()


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the size of its group; `(0, 1)` without a group."""
    return (distributed.get_rank(), distributed.get_world_size()) if in_group() else (0, 1)


def is_rank0() -> bool:
    """Return whether this process is the one that writes; true without a group."""
    return rank_and_size()[0] == 0


_GLOO: "WeakKeyDictionary[distributed.ProcessGroup, distributed.ProcessGroup]" = WeakKeyDictionary()


def gloo_group() -> "distributed.ProcessGroup":
    """Return the group by which ranks exchange everything but tensors of a model, on the CPU.

    All ranks create it once, at the start.
    """
    # Open connections fail as soon as a rank ends; a group that is only being created would wait for that rank. Each of
    # 70 kills and errors, at 15 places, ended both of two processes within 0.6 s.
    world = distributed.group.WORLD
    assert world is not None, "there is no group"
    if world not in _GLOO:
        _GLOO[world] = cast(distributed.ProcessGroup, distributed.new_group(backend="gloo", timeout=TIMEOUT))
    return _GLOO[world]


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Join the group that `torchrun` announced, if it did, and leave it in the end; do nothing inside of one.

    On CUDA a rank takes the GPU of its number on the machine. Only rank 0 shows the project's warnings. When another
    rank ends, the next message to it raises PyTorch's error.
    """
    if in_group() or not all(name in os.environ for name in _TORCHRUN):
        yield
        return
    cuda = torch.cuda.is_available() and device != "cpu"
    if cuda:
        local, devices = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        # By their number, not by this one's rank: then all of the machine raise, and none waits for the others.
        if int(os.environ.get("LOCAL_WORLD_SIZE", local + 1)) > devices:
            raise InputError(f"processes per machine must be at most its {devices} GPUs; lower --nproc-per-node")
        torch.cuda.set_device(local)
    # Both backends: gradients go by NCCL, checkpoints and errors from the CPU by gloo.
    distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    with warnings.catch_warnings():
        if not is_rank0():
            warnings.simplefilter("ignore", SafWarning)
        gloo_group()
        try:
            yield
        except SafError as error:
            _send_(error)  # the others end at their next exchange
            raise
        all_gather(None)  # `torchrun` ends the others once one has left with an exit code: none leaves before the last
    # Only a group that is in order is left in order: after an error, leaving could wait for those that are gone.
    distributed.destroy_process_group()


# --- failing together


@contextmanager
def all_ranks_or_raise() -> Iterator[None]:
    """Complete a block on every rank, or raise on every one; without a group, just run it.

    The rank whose block raises keeps its own error; the others raise the same kind of SafError, or a SafError that
    names another kind. They receive it wherever they next exchange anything through this module, within the block too.
    """
    if rank_and_size()[1] == 1:
        yield
        return
    try:
        yield
    except Exception as error:
        _send_(error)
        raise
    _exchange(None)


def _send_(error: Exception) -> None:
    """Send an error to the other ranks, unless it is one that they have, or they do not answer."""
    if not is_shared(error):
        with suppress(RuntimeError):  # the others may be elsewhere, or gone
            _exchange(error)


def _exchange(error: Exception | None, own: Any = None) -> list[Any]:
    """Return the `own` value of every rank; where some have an error instead, raise the first one's on the others.

    Every exchange of this module begins with this, so that an error arrives wherever the other ranks are.
    """
    # The one collective with a timeout of its own: ranks wait a week for rank 0's work, one with an error 20 s.
    distributed.monitored_barrier(gloo_group(), TIMEOUT if error is None else ERROR_TIMEOUT)
    message = None if error is None else (type(error).__name__, str(error))
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, (message, own), group=gloo_group())
    first = next((rank for rank, (message, _) in enumerate(gathered) if message is not None), None)
    if first is None:
        return [value for _, value in gathered]
    if error is not None:
        error.shared_by_ranks = True  # type: ignore[attr-defined]
        return []
    # The same kind where it is one of ours, so that every rank's caller handles it alike.
    name, words = gathered[first][0]
    kind = getattr(saf.errors, name, None)
    shared = SafError(f"process {first} failed: {name}: {words}") if kind is None else kind(words)
    shared.shared_by_ranks = True  # type: ignore[attr-defined]
    raise shared


def is_shared(error: BaseException | None) -> bool:
    """Return whether every rank raises an error, or the one that it replaced."""
    return error is not None and (getattr(error, "shared_by_ranks", False) or is_shared(error.__context__))


# --- values and work that ranks share


def all_gather(own: Any) -> list[Any]:
    """Return the value of every rank, in rank order, on all of them; `[own]` without a group.

    Tensors should be on the CPU. Every rank must call this, and waits for the last one.
    """
    return [own] if rank_and_size()[1] == 1 else _exchange(None, own)


def map_over_ranks(work: Callable[[Item], Outcome], items: Sequence[Item]) -> list[Outcome]:
    """Apply `work` to each item on one rank and return all outcomes, in order, on every rank.

    Rank r of N takes every N-th item, from the r-th. Every rank must call this with as many, and its outcomes' tensors
    should be on the CPU. An error of one rank is raised on all.
    """
    rank, size = rank_and_size()
    with all_ranks_or_raise():
        own = [work(item) for item in items[rank::size]]
    outcomes: list[Any] = [None] * len(items)
    for number, part in enumerate(all_gather(own)):
        outcomes[number::size] = part
    return outcomes


def on_rank0(work: Callable[[], Outcome]) -> Outcome:
    """Do the work on rank 0 and return its outcome on every rank; without a group, just do it.

    Every rank must call this. The outcome's tensors should be on the CPU. An error is raised on every rank.
    """
    if rank_and_size()[1] == 1:
        return work()
    message: list[Any] = [None]
    with all_ranks_or_raise():
        if is_rank0():
            message[0] = work()
    distributed.broadcast_object_list(message, src=0, group=gloo_group())
    return message[0]


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor gathered from the shards that ranks hold of it, on all of them, or the tensor itself."""
    if not in_group():
        return tensor
    from torch.distributed.tensor import DTensor  # takes as long to import as half of PyTorch

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
