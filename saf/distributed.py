"""Several processes as one: joining the group that `torchrun` starts, work of rank 0 for all, and failing together."""

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import distributed

import saf.errors
from saf.errors import InputError, SafError, SafWarning

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
TIMEOUT = timedelta(days=7)
"""How long ranks wait for rank 0's work; a group's own limit, 10 minutes for NCCL, is for messages."""
ERROR_TIMEOUT = timedelta(seconds=20)
"""How long a rank that failed waits for the others to receive its error. `torchrun` then gives them 30 seconds."""
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

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
    """Return the group by which ranks exchange everything but tensors of a model.

    All ranks create it once, at the start. Open connections fail as soon as a rank ends; a group that is only being
    created would wait for that rank.
    """
    world = distributed.group.WORLD
    assert world is not None, "there is no group"
    if world not in _GLOO:
        _GLOO[world] = cast(distributed.ProcessGroup, distributed.new_group(backend="gloo", timeout=TIMEOUT))
    return _GLOO[world]


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Join the group that `torchrun` announced, if it did, and leave it in the end; do nothing inside of one.

    On CUDA a rank takes the GPU of its number on the machine. Only rank 0 shows the project's warnings. When another
    rank ends, the next message to it raises SafError.

    Raises:
        InputError: More processes on a machine than it has GPUs.
    """
    if in_group() or not all(name in os.environ for name in _TORCHRUN):
        yield
        return
    cuda = torch.cuda.is_available() and device != "cpu"
    if cuda:
        local, devices = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= devices:
            raise InputError(f"processes per machine must be at most its {devices} GPUs; lower --nproc-per-node")
        torch.cuda.set_device(local)
    distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    with warnings.catch_warnings(), _lost_peers_explained():
        if not is_rank0():
            warnings.simplefilter("ignore", SafWarning)
        gloo_group()
        try:
            yield
        except SafError as error:
            # Where all ranks raise an error by themselves, such as a loss that is not finite, one of them prints it.
            if not _is_shared(error):
                with suppress(RuntimeError):  # the others may be elsewhere, or gone
                    _exchange(error)
            raise
        all_gather(None)  # `torchrun` ends the others once one has left with an exit code: none leaves before the last
    # Only a group that is in order is left in order: after an error, leaving could wait for those that are gone.
    distributed.destroy_process_group()


def wait_for_rank0_to_print() -> None:
    """Outside of a group, wait for rank 0 to print an error that all ranks raise by themselves, such as a setting.

    `torchrun` ends this rank as soon as rank 0 has ended. After 20 s this returns, and this rank prints it.
    """
    if in_group() or not all(name in os.environ for name in _TORCHRUN) or os.environ["RANK"] == "0":
        return
    signal.signal(signal.SIGTERM, lambda *_: os._exit(2))
    time.sleep(20)


@contextmanager
def _lost_peers_explained() -> Iterator[None]:
    """Raise SafError in place of PyTorch's error when a message to another rank fails."""
    try:
        yield
    except RuntimeError as error:
        if not _is_lost_peer(error):
            raise
        rank, size = rank_and_size()
        reason = str(error).partition(". This is typically")[0].splitlines()[0]
        raise SafError(
            f"process {rank} of {size} lost another one, which ended or hangs; its last output is the reason ({reason})"
        ) from error


def _is_lost_peer(error: BaseException) -> bool:
    """Return whether an error is of a message between ranks: of PyTorch's kinds for that, or in gloo's words."""
    kinds = (distributed.DistError, distributed.DistNetworkError, distributed.DistBackendError)
    words = ("Connection closed by peer", "Connection reset by peer", "gloo/transport", "Broken pipe")
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and any(each in str(error) for each in words))


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
        if not (_is_shared(error) or _is_lost_peer(error)):
            with suppress(RuntimeError):  # the others may be elsewhere, or gone
                _exchange(error)
        raise
    _exchange(None)


def _exchange(error: Exception | None) -> None:
    """Send every rank this one's error, or None; raise the first rank's error on those that have none.

    Every exchange of this module begins with this, so that an error arrives wherever the other ranks are.
    """
    own = b"" if error is None else json.dumps([type(error).__name__, str(error)]).encode()
    rank, size = rank_and_size()
    sizes = list(torch.zeros(size, dtype=torch.long).split(1))
    waiting = distributed.all_gather(sizes, torch.tensor([len(own)]), group=gloo_group(), async_op=True)
    assert waiting is not None
    waiting.wait(TIMEOUT if error is None else ERROR_TIMEOUT)
    longest = int(max(sizes))
    if not longest:
        return
    words = list(torch.zeros(size, longest, dtype=torch.uint8).unbind())
    distributed.all_gather(words, torch.tensor([*own.ljust(longest)], dtype=torch.uint8), group=gloo_group())
    failed = {each: bytes(words[each].tolist()) for each in range(size) if sizes[each]}
    first = min(failed)
    shared: Any = error or _same_error(*json.loads(failed[first]), rank=first)
    shared.shared_by_ranks = True
    if isinstance(shared, SafError):  # the lowest rank with these words prints them
        shared.printed_elsewhere = rank > 0 if error is None else failed[rank] in [failed.get(r) for r in range(rank)]
    if error is None:
        raise shared


def _is_shared(error: BaseException | None) -> bool:
    """Return whether every rank raises an error, or the one that it replaced."""
    return error is not None and (getattr(error, "shared_by_ranks", False) or _is_shared(error.__context__))


def _same_error(name: str, words: str, *, rank: int) -> SafError:
    """Return a copy of another rank's error: its kind of SafError, or a SafError that names its kind."""
    kind = getattr(saf.errors, name, None)
    return SafError(f"process {rank} failed: {name}: {words}") if kind is None else kind(words)


def all_gather(own: Any) -> list[Any]:
    """Return the value of every rank, in rank order, on all of them; `[own]` without a group.

    Tensors should be on the CPU. Every rank must call this, and waits for the last one.
    """
    if rank_and_size()[1] == 1:
        return [own]
    _exchange(None)
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, own, group=gloo_group())
    return gathered


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


@contextmanager
def rank0_context(context: AbstractContextManager[Outcome]) -> Iterator[Outcome]:
    """Enter a context on rank 0 alone and leave it once every rank has ended the block; all get its value.

    Where one rank raises, all do, and rank 0 leaves the context with an error.
    """
    value = on_rank0(context.__enter__)
    try:
        with all_ranks_or_raise():
            yield value
    except BaseException:
        if is_rank0():
            context.__exit__(*sys.exc_info())
        raise
    on_rank0(lambda: context.__exit__(None, None, None))
