"""Single arms in processes of their own: fresh timed blocks and peak memory."""

import multiprocessing
import os
import resource
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from saf.bench.models import free_backend
from saf.bench.protocol import OUT_OF_TIME, Arm, Point, Session, clean_process, in_short
from saf.errors import UnsupportedError
from saf.machine import GraphPool
from saf.records.quantities import signed

SPAWN = multiprocessing.get_context("spawn")


def run_arm(session: Session, settings: Any, point: Point, arm: Arm, *, profile: bool = False) -> dict[str, Any]:
    """Measure one arm in a process of its own and return its reply; `{"error": reason}` where it fails.

    Each arm has a compiler cache of its own, so that it takes no program compiled for another kernel.
    """
    receiver, sender = SPAWN.Pipe(duplex=False)
    cache = f"{session.folder}/{arm.name.replace(' ', '-')}"
    process = SPAWN.Process(target=_measure_arm, args=(sender, settings, point, arm, profile, cache))
    process.start()
    sender.close()
    try:
        if receiver.poll(session.left if session.left is None else max(0.0, session.left)):
            return receiver.recv()
        return {"error": OUT_OF_TIME}
    except EOFError:
        process.join()
        return {"error": f"its process ended with code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _measure_arm(sender: Any, settings: Any, point: Point, arm: Arm, profile: bool, cache: str) -> None:
    """Warm one arm up, take a timed block of each variant, and send them with the peak memory since the warm-up."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    cuda = settings.execution.device.type == "cuda"
    try:
        with clean_process(compiles=settings.execution.compile), free_backend():
            subject = settings.build(point, arm, GraphPool())
            subject.warm_up()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            block_ms = {variant: subject.timed_block(variant) for variant in settings.variants()}
            peak = torch.cuda.max_memory_allocated() if cuda else _peak_resident()
            kernels = subject.kernels() if profile else []
        sender.send({"block_ms": block_ms, "bytes": peak, "kernels": kernels})
    except Exception as error:
        traceback.print_exc()
        sender.send({"error": in_short(error)})


def _peak_resident() -> int:
    """Return the largest resident set of this process, bytes.

    Linux reports it in /proc: the value of `getrusage` begins at the parent's, which Linux carries over to a child.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return 1024 * next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))


def measure_memory(session: Session, settings: Any, point: Point, arms: Sequence[Arm]) -> None:
    """Record the peak memory of each arm, what PyTorch's allocator handed out on CUDA; the first arm is ordinary."""
    kind = "allocated" if settings.execution.device.type == "cuda" else "resident"
    ordinary = None
    for arm in arms:
        reply = run_arm(session, settings, point, arm)
        if "error" in reply:
            session.leave_out(f"{point.name}: peak memory of {arm.name}", reply["error"])
            continue
        peak = reply["bytes"]
        ordinary = peak if arm == arms[0] else ordinary
        change = None if ordinary is None else 100 * (peak / ordinary - 1)
        entry = {"arm": arm.name, "backend": arm.backend, "rate": arm.rate, "kind": kind}
        session.lists["memory"].append({"point": point.to_dict(), **entry, "bytes": peak, "change_percent": change})
        session.save()
        compared = "" if change is None else f", {signed(change)} against ordinary"
        session.say(f"{point.name} peak memory: {arm.name} {peak / 2**30:.3f} GiB{compared}")


class FreshSubject:
    """One arm whose every timed block runs in a new process; its compiled code stays on disk between them."""

    def __init__(self, session: Session, settings: Any, point: Point, arm: Arm):
        self._session, self._settings, self._point, self._arm = session, settings, point, arm
        self._kernels: list[dict[str, Any]] = []
        self._blocks: dict[str, float] = {}

    def warm_up(self) -> None:
        """Run once, so that later processes find the compiled code."""
        self._kernels = self._reply(profile=self._settings.profile)["kernels"]

    def timed_block(self, variant: str) -> float:
        """Return one timed block's milliseconds; a process times every variant once, so it serves them all."""
        if variant not in self._blocks:
            self._blocks = self._reply()["block_ms"]
        return self._blocks.pop(variant)

    def kernels(self) -> list[dict[str, Any]]:
        """Return the kernels of one pass."""
        return self._kernels

    def _reply(self, *, profile: bool = False) -> dict[str, Any]:
        reply = run_arm(self._session, self._settings, self._point, self._arm, profile=profile)
        if "error" in reply:
            raise UnsupportedError(reply["error"])
        return reply
