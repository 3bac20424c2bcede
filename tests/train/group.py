"""Processes on this machine: single ones, and those that are a group, as torchrun starts them."""

import gc
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from torch import distributed

from saf.machine.processes import joined
from saf.schedules import train_loss
from saf.schedules.train_loss import TrainLossProposer

SECONDS = 1000
"""A bound for processes that hang, below pytest's own, so that their exit codes are told."""


def brisk(patch: pytest.MonkeyPatch) -> None:
    """Let a train-loss controller decide within 40 updates: its loss levels off, and a freeze raises it."""
    patch.setattr(train_loss, "_BURN_IN", (4, 0.0))
    patch.setattr(train_loss, "_HALF_LIFE", (2, 0.0))
    observe = TrainLossProposer.observe

    def shown(proposer, update, loss):
        assert loss > 0
        raised = 0.5 if proposer.decisions.step else 0.0
        observe(proposer, update, max(4 - update / 20, 3.7) + 0.02 * (-1) ** update + raised)

    patch.setattr(TrainLossProposer, "observe", shown)


def begun(work: Callable[..., None], *arguments: Any, module: str = "") -> BaseProcess:
    """Begin `work(*arguments)` in a process of its own and return it; what it needs is of its module or of another one.

    It is forked off a process that has imported what `work` needs, once for all of them: importing PyTorch and this
    project in each takes longer than what most of them do.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([module or work.__module__])
    process = context.Process(target=work, args=arguments)
    process.start()
    return process


def together(count: int, work: Callable[..., None], *arguments: Any, codes: Sequence[int] = ()) -> None:
    """Call `work(rank, *arguments)` in so many processes of one group; each ends with its code, 0 where none is given.

    The store by which they find one another is this process's, as it is torchrun's: it listens at a port before anybody
    is told of it, so that no other process can take that port.
    """
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [begun(_one, rank, count, store.port, work, arguments, module=work.__module__) for rank in range(count)]
    ends = time.monotonic() + SECONDS
    for each in processes:
        each.join(max(0.0, ends - time.monotonic()))
    found = [each.exitcode for each in processes]
    for each in processes:
        each.kill()
    expected = list(codes) or [0] * count
    assert found == expected, f"the processes ended with codes {found}, expected {expected}; None is one that hung"


def _one(rank: int, count: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # the modules stay: engines collect what was replaced, which else takes as long as most of the work
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with joined("cpu"):
        work(rank, *arguments)
