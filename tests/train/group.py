"""Processes on this machine that are a group, as torchrun starts them."""

import os
import socket
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch

from saf.machine.processes import joined

SECONDS = 120


def together(count: int, work: Callable[..., None], *arguments: Any) -> None:
    """Call `work(rank, *arguments)` in so many processes of one group, and fail unless all end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("spawn")
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
