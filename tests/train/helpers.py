"""What training tests share: a process that ends at a call, processes of a group, and a quick train-loss schedule."""

import gc
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import saf.schedules as schedules
from saf.distributed import process_group
from saf.records.run import read_events
from saf.train import TrainConfig, pretrain

SECONDS = 1000
"""A bound for processes that hang, below pytest's own, so that their exit codes are shown."""


class Killed(BaseException):
    """Stands for the end of the process."""


def killed_and_resumed(config: TrainConfig, owner: Any, name: str, call: int) -> dict[str, Any]:
    """Train, die at the `call`-th call of `owner.name`, go on, and return the result."""
    killed(lambda: pretrain(config), owner, name, call)
    return pretrain(config, resume=True)


def killed(train: Callable[[], Any], owner: Any, name: str, call: int) -> None:
    """Train until the `call`-th call of `owner.name`, which ends the process, as far as its code can tell."""
    real, calls = getattr(owner, name), [0]

    def counting(*arguments, **options):
        calls[0] += 1
        if calls[0] == call:
            raise Killed
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, counting)
        with pytest.raises(Killed):
            train()


def events_of(folder: Path | str) -> list[tuple]:
    """Return the events that a run recorded, in short."""
    return [(e.number, e.kind, e.update, len(e.heads), e.undone_by) for e in read_events(folder)]


def decide_quickly(patch: pytest.MonkeyPatch) -> None:
    """Let a train-loss controller decide within 40 updates: its loss levels off, and a freeze raises it."""
    patch.setattr(schedules, "_BURN_IN", (4, 0.0))
    patch.setattr(schedules, "_HALF_LIFE", (2, 0.0))
    observe = schedules.TrainLossProposer.observe

    def shown(proposer, update, loss):
        assert loss > 0
        raised = 0.5 if proposer.step else 0.0
        observe(proposer, update, max(4 - update / 20, 3.7) + 0.02 * (-1) ** update + raised)

    patch.setattr(schedules.TrainLossProposer, "observe", shown)


def start_process(work: Callable[..., None], *arguments: Any, module: str = "") -> BaseProcess:
    """Start `work(*arguments)` in a process of its own and return it.

    It is forked off a process that has imported the module of `work`, and what optimisers of PyTorch import when the
    first is made: these imports in each take longer than most of them do.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([module or work.__module__, "torch._dynamo"])
    process = context.Process(target=work, args=arguments)
    process.start()
    return process


def run_ranks(count: int, work: Callable[..., None], *arguments: Any, codes: Sequence[int] = ()) -> None:
    """Call `work(rank, *arguments)` in `count` processes of one group; each ends with its code, 0 by default.

    This process has the store by which they find one another, as torchrun does: it listens before anybody knows its
    port, so no other process can take that.
    """
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        start_process(_run_rank, rank, count, store.port, work, arguments, module=work.__module__)
        for rank in range(count)
    ]
    ends = time.monotonic() + SECONDS
    for each in processes:
        each.join(max(0.0, ends - time.monotonic()))
    exits = [each.exitcode for each in processes]
    for each in processes:
        each.kill()
    expected = list(codes) or [0] * count
    assert exits == expected, f"the processes ended with codes {exits}, expected {expected}; None is one that hung"


def _run_rank(rank: int, count: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # the modules stay: engines collect what was replaced, which else takes as long as most of the work
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with process_group("cpu"):
        work(rank, *arguments)
