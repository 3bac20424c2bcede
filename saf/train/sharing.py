"""How the processes of a run share its updates: which way, why so, and how many micro-batches each takes."""

from typing import Literal

import torch

from saf.errors import InputError
from saf.machine.execution import Execution
from saf.machine.processes import group_place, in_group
from saf.records.quantities import gibibytes
from saf.train.memory import STATE_BYTES
from saf.train.parallel import Alone, Parallel, Replicas, Shards, check_shards

ParallelKind = Literal["auto", "none", "ddp", "fsdp"]


def parallel_of(
    kind: ParallelKind, *, parameters: int, execution: Execution, trained_patterns: bool
) -> tuple[Parallel, str]:
    """Return how this process trains a model of so many `parameters` beside others, and why so, in words.

    "auto" is "none" for one process, "ddp" for several, unless weights, gradients and moments in float32 would take
    more than half of a GPU's memory: then "fsdp".

    Raises:
        InputError: "none" in a group of several processes, or another kind without a group.
        UnsupportedError: Shards of what cannot be sharded.
    """
    processes = group_place()[1]
    if kind == "none" and processes > 1:
        raise InputError(
            f"parallel='none' trains in one process, and {processes} were started, which would all do the same; start "
            "one, or leave it out"
        )
    if kind in ("ddp", "fsdp") and not in_group():
        raise InputError(
            f"parallel={kind!r} trains in a group of processes, and there is none: start "
            "`torchrun --nproc-per-node N -m saf pretrain ...`"
        )
    why = "as asked"
    if kind == "auto":
        kind, why = _picked(parameters, execution.device) if processes > 1 else ("none", "one process")
    if kind == "fsdp":
        check_shards(execution, trained_patterns=trained_patterns)
        return Shards(execution.device), why
    return (Replicas() if kind == "ddp" else Alone()), why


def _picked(parameters: int, device: torch.device) -> tuple[ParallelKind, str]:
    """Return the kind for several processes and the reason."""
    needed = STATE_BYTES * parameters
    if device.type != "cuda":
        return "ddp", "the model is whole in every process"
    memory = torch.cuda.get_device_properties(device).total_memory
    told = f"weights, gradients and moments take {gibibytes(needed)} of {gibibytes(memory)}"
    return ("ddp", told) if needed <= memory / 2 else ("fsdp", f"{told}, more than half")


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
