"""Processes on this machine that are a group, as torchrun starts them."""

import os
import socket
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from saf.machine.processes import joined
from saf.schedules import train_loss
from saf.schedules.train_loss import TrainLossProposer

SECONDS = 120


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


def together(count: int, work: Callable[..., None], *arguments: Any) -> None:
    """Call `work(rank, *arguments)` in so many processes of one group, and fail unless all end well.

    They are forked off a process that has imported what `work` needs, once for all of them: importing PyTorch and this
    project in each takes longer than what most groups do.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    processes = [context.Process(target=_one, args=(rank, count, port, work, arguments)) for rank in range(count)]
    for each in processes:
        each.start()
    for each in processes:
        each.join(SECONDS)
    assert [each.exitcode for each in processes] == [0] * count


def _one(rank: int, count: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    with joined("cpu"):
        work(rank, *arguments)
