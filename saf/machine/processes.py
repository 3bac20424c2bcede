"""A group of processes: joining the one that `torchrun` starts, work that one does for all, and failing together."""

import json
import os
import sys
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
PATIENCE = timedelta(days=7)
"""How long processes wait for the first one's work; a group's own limit, 10 minutes for NCCL, is for messages."""
LAST_WORDS = timedelta(seconds=20)
"""How long a process that failed waits for the others to hear why, before it ends without them: together with the 30
seconds that `torchrun` then gives them, less than a minute."""
_ANNOUNCED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What `torchrun` tells every process that it starts."""


def in_group() -> bool:
    """Return whether this process is in a group, of one process perhaps."""
    return distributed.is_available() and distributed.is_initialized()


def group_place() -> tuple[int, int]:
    """Return this process's number in its group, from 0, and how many it has; `(0, 1)` without a group."""
    return (distributed.get_rank(), distributed.get_world_size()) if in_group() else (0, 1)


_TALKS: "WeakKeyDictionary[distributed.ProcessGroup, distributed.ProcessGroup]" = WeakKeyDictionary()


def talk() -> "distributed.ProcessGroup":
    """Return the group by which the processes of the default group exchange what is no tensor of a model: by gloo.

    It is made once for a default group, by all processes, whose connections then tell at once when one of them ends;
    a group that is only being made would wait for that one.
    """
    world = distributed.group.WORLD
    assert world is not None, "there is no group"
    if world not in _TALKS:
        _TALKS[world] = cast(distributed.ProcessGroup, distributed.new_group(backend="gloo", timeout=PATIENCE))
    return _TALKS[world]


def is_first() -> bool:
    """Return whether this process is the first of its group, the one that writes; true without a group."""
    return group_place()[0] == 0


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Be in the group that `torchrun` announced, if it did, and leave it in the end; do nothing in one joined already.

    On `device` "cuda" (or "auto" where there is one) a process takes the GPU of its number on the machine, and tensors
    there go by NCCL; tensors of the CPU go by gloo. Processes but the first one are silent about warnings, which all of
    them have. When another process ends, a message to it fails here; that is raised as a SafError that says so.

    Raises:
        InputError: More processes on a machine than it has GPUs.
    """
    if in_group() or not all(name in os.environ for name in _ANNOUNCED):
        yield
        return
    cuda = torch.cuda.is_available() and device != "cpu"
    if cuda:
        own, found = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if own >= found:
            raise InputError(
                f"process {own} of this machine needs a GPU of its own, and there are {found}; start as many processes "
                "as GPUs with --nproc-per-node, or train on device cpu"
            )
        torch.cuda.set_device(own)
    distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    with warnings.catch_warnings(), _ended_peers_told():
        if not is_first():
            warnings.simplefilter("ignore", SafWarning)
        talk()
        try:
            yield
        except SafError as error:
            # Of an error that all raise by themselves, such as a loss that is not finite, one tells people.
            if not _is_told(error):
                with suppress(RuntimeError):  # the others may be elsewhere, or gone
                    _tell(error)
            raise
        gathered(None)  # `torchrun` ends the others once one has left with an exit code: none leaves before the last
    # Only a group that is in order is left in order: after an error, leaving could wait for those that are gone.
    distributed.destroy_process_group()


@contextmanager
def _ended_peers_told() -> Iterator[None]:
    """Raise SafError in place of what PyTorch says when a message to another process fails."""
    try:
        yield
    except RuntimeError as error:
        if not _is_lost_peer(error):
            raise
        number, count = group_place()
        raise SafError(
            f"process {number} of {count} lost another one, which ended or hangs: what that one printed last is the "
            f"reason ({str(error).partition('. This is typically')[0].splitlines()[0]})"
        ) from error


def _is_lost_peer(error: RuntimeError) -> bool:
    """Return whether an error is of a message between processes: of PyTorch's kinds for that, or in gloo's words."""
    kinds = (distributed.DistError, distributed.DistNetworkError, distributed.DistBackendError)
    words = ("Connection closed by peer", "Connection reset by peer", "gloo/transport", "Broken pipe")
    return isinstance(error, kinds) or any(each in str(error) for each in words)


@contextmanager
def agreed() -> Iterator[None]:
    """Let a block come to its end in every process of the group, or raise in every one; without a group, just run it.

    Every process must come to it. Where the block raises in one, that one raises its own error, and the others the same
    kind of `SafError`, or a SafError that names another kind, with the process's number. Others hear of it where they
    next exchange anything by a function of this module, within their own block, too; one that does not within
    `LAST_WORDS` hears of it by the other's end.
    """
    if group_place()[1] == 1:
        yield
        return
    try:
        yield
    except Exception as error:
        if not (_is_told(error) or (isinstance(error, RuntimeError) and _is_lost_peer(error))):
            with suppress(RuntimeError):  # the others may be elsewhere, or gone
                _tell(error)
        raise
    _tell(None)


def _tell(error: Exception | None) -> None:
    """Tell all others that this process failed, or that it did not; of those that did not, raise the first one's error.

    Whatever processes exchange begins with this, so that one that failed is heard wherever the others are.
    """
    own = b"" if error is None else json.dumps([type(error).__name__, str(error)]).encode()
    number, count = group_place()
    sizes = list(torch.zeros(count, dtype=torch.long).split(1))
    limit = PATIENCE if error is None else LAST_WORDS
    waiting = distributed.all_gather(sizes, torch.tensor([len(own)]), group=talk(), async_op=True)
    assert waiting is not None
    waiting.wait(limit)
    longest = int(max(sizes))
    if not longest:
        return
    words = list(torch.zeros(count, longest, dtype=torch.uint8).unbind())
    distributed.all_gather(words, torch.tensor([*own.ljust(longest)], dtype=torch.uint8), group=talk())
    failed = {each: bytes(words[each].tolist()) for each in range(count) if sizes[each]}
    if error is None:
        first = min(failed)
        raise _told(_same_error(*json.loads(failed[first]), process=first), heard=number > 0)
    _told(error, heard=any(failed[each] == failed[number] for each in failed if each < number))


_TOLD = "told_in_group"
"""Attribute of an error that every process of the group raises by now."""


def _told(error: Exception, *, heard: bool) -> Exception:
    """Mark an error as one that every process raises; people are told of it by another one where it was `heard`."""
    setattr(error, _TOLD, True)
    if isinstance(error, SafError):
        error.heard = heard
    return error


def _is_told(error: BaseException | None) -> bool:
    """Return whether every process raises an error, or that in whose place it was raised."""
    return error is not None and (getattr(error, _TOLD, False) or _is_told(error.__context__))


def gathered(own: Any) -> list[Any]:
    """Return what every process gives, in their order, in all of them; `[own]` without a group.

    Tensors should be on the CPU. Every process must call this, and waits for the last one.
    """
    if group_place()[1] == 1:
        return [own]
    _tell(None)
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, own, group=talk())
    return found


def shared_out(work: Callable[[Item], Outcome], items: Sequence[Item]) -> list[Outcome]:
    """Do the work of each item in one process of the group and return all outcomes, in order, in every process.

    Items are dealt out in turn: process r of N takes every N-th, from the r-th. Every process must call this with as
    many. The outcomes' tensors should be on the CPU. An error of one process is raised in all, as by `agreed`; without
    a group, the work is just done.
    """
    rank, count = group_place()
    with agreed():
        own = [work(item) for item in items[rank::count]]
    found: list[Any] = [None] * len(items)
    for number, part in enumerate(gathered(own)):
        found[number::count] = part
    return found


@contextmanager
def entered_once(context: AbstractContextManager[Outcome]) -> Iterator[Outcome]:
    """Be within a context that the group's first process enters, and leaves once every process is through the block.

    All get what it gives. Where one raises, all do, and the first one leaves the context with an error.
    """
    given = done_once(context.__enter__)
    try:
        with agreed():
            yield given
    except BaseException:
        if is_first():
            context.__exit__(*sys.exc_info())
        raise
    done_once(lambda: context.__exit__(None, None, None))


def done_once(work: Callable[[], Outcome]) -> Outcome:
    """Do the work in the group's first process and return its outcome in every one; without a group, just do it.

    Every process of the default group must call this. The outcome's tensors should be on the CPU. An error of the first
    process is raised in every one, as by `agreed`.
    """
    if group_place()[1] == 1:
        return work()
    message: list[Any] = [None]
    with agreed():
        if is_first():
            message[0] = work()
    distributed.broadcast_object_list(message, src=0, group=talk())
    return message[0]


def _same_error(name: str, words: str, *, process: int) -> SafError:
    """Return the error of another process anew: its kind of SafError, or a SafError that names its kind."""
    kind = getattr(saf.errors, name, None)
    if kind is None:
        return SafError(f"process {process} failed: {name}: {words}")
    return kind(words)
