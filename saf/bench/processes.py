"""Single arms in processes of their own: fresh timed blocks, peak memory, compiling in advance.

`python -m saf.bench.processes < specification.json` measures one arm; the last line of its output is the reply,
`{"block_ms": {variant: ms}, "peak_memory_bytes", "memory_kind", "kernels"}` or `{"error": reason}`.
"""

import importlib
import json
import os
import resource
import subprocess
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import saf
from saf.bench.models import free_backend
from saf.bench.protocol import OUT_OF_TIME, Arm, Point, Session, clean_process, in_short
from saf.errors import UnsupportedError
from saf.machine.cuda_graphs import GraphPool
from saf.records.files import to_json
from saf.records.quantities import signed

COMPILE_THREADS = 4
"""Of each process that only compiles; several run at a time."""


def run_arm(
    session: Session, settings: Any, point: Any, arm: Arm, *, profile: bool = False, only_compile: bool = False
) -> dict[str, Any]:
    """Measure one arm in a process of its own and return its reply; `{"error": reason}` for one without.

    Each arm has a compiler cache of its own, so that no program of another kernel is taken for its; processes that only
    compile fill the usual one.
    """
    kind, module = type(settings), type(settings).__module__
    if module == "__main__":
        module = sys.modules["__main__"].__spec__.name  # type: ignore[union-attr]
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    question = {"module": module, "kind": kind.__name__, "settings": values, "point": asdict(point)}
    question |= {"arm": asdict(arm), "profile": profile, "only_compile": only_compile}
    path = os.pathsep.join(filter(None, [str(Path(saf.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    surroundings = {"PYTHONPATH": path, "TORCHINDUCTOR_COMPILE_THREADS": str(COMPILE_THREADS)}
    if not only_compile:
        surroundings = {"PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": f"{session.folder}/{arm.name.replace(' ', '-')}"}
    try:
        reply = subprocess.run(
            [sys.executable, "-m", "saf.bench.processes"],
            input=json.dumps(to_json(question)),
            capture_output=True,
            text=True,
            check=False,
            timeout=None if session.left is None else max(0.0, session.left),
            env={**os.environ, **surroundings},
        )
    except subprocess.TimeoutExpired:
        return {"error": OUT_OF_TIME}
    if reply.returncode or not reply.stdout.strip():
        reason = (reply.stderr.strip() or "no output").splitlines()[-1][:200]
        return {"error": f"its process ended with code {reply.returncode}: {reason}"}
    return json.loads(reply.stdout.splitlines()[-1])


def run_arms(session: Session, settings: Any, point: Any, arms: Sequence[Arm], **how: bool) -> list[dict[str, Any]]:
    """Measure arms in processes of their own, `settings.workers` at a time."""
    with ThreadPoolExecutor(settings.workers) as pool:
        return list(pool.map(partial(run_arm, session, settings, point, **how), arms))


def measure_memory(session: Session, settings: Any, point: Any, arms: Sequence[Arm]) -> None:
    """Record the peak memory of each arm; the first is ordinary."""
    replies = run_arms(session, settings, point, arms)
    ordinary = replies[0].get("peak_memory_bytes")
    for arm, reply in zip(arms, replies, strict=True):
        if "error" in reply:
            session.leave_out(f"{point.name}: peak memory of {arm.name}", reply["error"])
            continue
        peak = reply["peak_memory_bytes"]
        change = None if ordinary is None else 100 * (peak / ordinary - 1)
        entry = {"arm": arm.name, "backend": arm.backend, "rate": arm.rate, "kind": reply["memory_kind"]}
        session.lists["memory"].append({"point": point.to_dict(), **entry, "bytes": peak, "change_percent": change})
        session.save()
        compared = "" if change is None else f", {signed(change)} against ordinary"
        session.say(f"{point.name} peak memory: {arm.name} {peak / 2**30:.3f} GiB{compared}")


def compile_in_advance(session: Session, settings: Any, point: Any, arms: Sequence[Arm]) -> None:
    """Fill the compiler's cache on disk; an arm that fails is said, and left to its warm-up."""
    # As little running as possible: one micro-batch, one untimed call, no graphs.
    point = replace(point, accumulation=point.accumulation and 1)
    settings = replace(settings, graphs="off", warmup=1)
    for arm, reply in zip(arms, run_arms(session, settings, point, arms, only_compile=True), strict=True):
        words = (
            f"not compiled in advance: {arm.name}: {reply['error']}" if "error" in reply else f"compiled: {arm.name}"
        )
        session.say(f"{point.name} {words}")


class FreshSubject:
    """One arm whose every timed block runs in a new process; its compiled code is kept on disk between them."""

    def __init__(self, session: Session, settings: Any, point: Any, arm: Arm):
        self._run = partial(run_arm, session, settings, point, arm)
        self._profile = settings.profile
        self._kernels: list[dict[str, Any]] = []
        self._blocks: dict[str, float] = {}

    def warm_up(self) -> None:
        """Run once, so that later processes find the compiled code."""
        self._kernels = self._reply(profile=self._profile)["kernels"]

    def timed_block(self, variant: str) -> float:
        """Return one timed block's milliseconds; a process times every variant once, so it serves them all."""
        if variant not in self._blocks:
            self._blocks = self._reply()["block_ms"]
        return self._blocks.pop(variant)

    def kernels(self) -> list[dict[str, Any]]:
        """Return the kernels of one pass."""
        return self._kernels

    def _reply(self, **how: bool) -> dict[str, Any]:
        reply = self._run(**how)
        if "error" in reply:
            raise UnsupportedError(reply["error"])
        return reply


def measure_arm(question: dict[str, Any]) -> dict[str, Any]:
    """Warm one arm up, take a timed block of each variant, and return its peak memory since the warm-up.

    Peak memory is what the allocator handed out on CUDA ("allocated"), the process's resident set elsewhere
    ("resident"). Of an arm that is only compiled the reply is empty.
    """
    module = importlib.import_module(question["module"])
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in question["settings"].items()}
    settings = getattr(module, question["kind"])(**values)
    point = Point(**question["point"])
    cuda = settings.execution.device.type == "cuda"
    with clean_process(compiles=settings.execution.compile), free_backend():
        subject = settings.build(point, Arm(**question["arm"]), GraphPool())
        if question["only_compile"]:
            subject.warm_up()
            return {}
        subject.warm_up()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        times = {variant: subject.timed_block(variant) for variant in settings.variants()}
        return {
            "block_ms": times,
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if cuda else peak_resident(),
            "memory_kind": "allocated" if cuda else "resident",
            "kernels": subject.kernels() if question["profile"] else [],
        }


def peak_resident() -> int:
    """Return the largest resident set of this process, bytes.

    Where Linux tells it itself: what `getrusage` returns begins at the parent's, which Linux carries over to a child.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


if __name__ == "__main__":
    try:
        print(json.dumps(measure_arm(json.load(sys.stdin))))
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": in_short(error)}))
