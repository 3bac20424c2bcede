"""One arm of one point in a process of its own: `python -m saf.bench.model.worker < spec.json`.

The specification is `{"kind", "settings", "point", "arm", "profile"}`; the reply, the last line of standard output,
is `{"block_ms": {variant: ms}, "peak_memory_bytes", "memory_kind", "kernels"}`, or `{"error": reason}`.
"""

import json
import os
import resource
import sys
import threading
import time
import traceback
from typing import Any

import torch

from saf.bench.harness.arms import Arm
from saf.bench.harness.baselines import free_backend
from saf.bench.harness.environment import clean_process
from saf.bench.harness.recorder import in_short
from saf.bench.harness.settings import Point
from saf.bench.kinds import MODEL_KINDS
from saf.machine.cuda_graphs import GraphPool
from saf.machine.execution import Execution

PARENT_SECONDS = 1.0
"""Between two looks at whether the parent lives: seldom enough to leave timed blocks alone."""


def measure(specification: dict[str, Any]) -> dict[str, Any]:
    """Warm one arm up, take a timed block of each variant, and tell its peak memory since the warm-up.

    With `"only_compile"` the reply is empty: the compiler's cache on disk is what is wanted.

    Peak memory is what the allocator handed out on CUDA ("allocated"), the process's resident set elsewhere
    ("resident").
    """
    kind = MODEL_KINDS[specification["kind"]]
    settings = kind.settings.from_dict(specification["settings"])
    compiles = Execution.of(settings.device, compile=settings.compile).compile
    with clean_process(compiles=compiles), free_backend():
        subject = kind.build(settings, Point(**specification["point"]), Arm(**specification["arm"]), GraphPool())
        subject.warm_up()
        if specification.get("only_compile"):
            return {}
        cuda = settings.device != "cpu" and torch.cuda.is_available()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        variants = kind.variants(settings, torch.device("cuda" if cuda else "cpu"))
        times = {variant: subject.timed_block(variant) for variant in variants}
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peak = torch.cuda.max_memory_allocated() if cuda else resident
        kernels = subject.kernels() if specification["profile"] else []
    return {
        "block_ms": times,
        "peak_memory_bytes": peak,
        "memory_kind": "allocated" if cuda else "resident",
        "kernels": kernels,
    }


def end_with(parent: int) -> None:
    """Wait for the end of the process `parent` that started this one, and end then.

    A worker leads a group of processes, which signals to the group of its parent do not reach.
    """
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os._exit(1)


def main() -> None:
    """Answer the specification on standard input; an exception is told in short, its traceback on standard error."""
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    try:
        reply = measure(json.load(sys.stdin))
    except Exception as error:
        traceback.print_exc()
        reply = {"error": in_short(error)}
    print(json.dumps(reply))


if __name__ == "__main__":
    main()
