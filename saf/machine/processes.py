"""Work that one process of a `torch.distributed` group does for all of them: the only place that knows of groups."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

from torch import distributed

import saf.errors
from saf.errors import SafError

Outcome = TypeVar("Outcome")
PATIENCE = timedelta(days=7)
"""How long processes wait for the first one's work; a group's own limit, 10 minutes for NCCL, is for messages."""


def is_first() -> bool:
    """Return whether this process is the first of its group, the one that writes; true without a group."""
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def done_once(work: Callable[[], Outcome]) -> Outcome:
    """Do the work in the group's first process and return its outcome in every one; without a group, just do it.

    Every process of the default group must call this. The outcome's tensors should be on the CPU. An error of the first
    process is raised in every one: the same kind of `SafError`, or a SafError that names another kind.
    """
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return work()
    message: list[Any] = [None, None]
    group = cast(distributed.ProcessGroup, distributed.new_group(backend="gloo", timeout=PATIENCE))
    try:
        if distributed.get_rank() == 0:
            try:
                message[0] = work()
            except Exception as error:
                distributed.broadcast_object_list([None, (type(error).__name__, str(error))], src=0, group=group)
                raise
        distributed.broadcast_object_list(message, src=0, group=group)
    finally:
        distributed.destroy_process_group(group)
    outcome, failure = message
    if failure is not None:
        raise _same_error(*failure)
    return outcome


def _same_error(name: str, words: str) -> SafError:
    """Return the error of the first process anew: its kind of SafError, or a SafError that names its kind."""
    kind = getattr(saf.errors, name, None)
    if kind is None:
        return SafError(f"the first process failed: {name}: {words}")
    return kind(words)
