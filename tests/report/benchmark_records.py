"""Benchmark records with invented times, written by the code that writes real ones."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from saf.bench import Update
from saf.bench.protocol import Arm, Case, Point, Ready, WarmUp, compare
from saf.bench.record import Session
from saf.machine import GraphPool

POINT = Point(4096, 8, 4)
TIMES = {
    "ordinary cudnn": [100.0, 100.4, 99.6, 100.0],
    "control cudnn": [100.0, 100.2, 99.8, 100.0],
    "25% toeplitz cudnn": [92.0, 93.0, 90.0, 94.0],
    "25% free cudnn": [88.0, 90.0, 87.0, 89.0],
    "50% toeplitz cudnn": [84.0, 86.0, 83.0, 85.0],
    "50% free cudnn": [80.0, 80.0, 80.0, 80.0],
}
"""Milliseconds of each arm's blocks, taken in turn."""
MACHINE: Any = SimpleNamespace(device=torch.device("cpu"), device_name="Invented 9000", precision="bf16", compile=False)


def record(path: Path | None = None, *, times: Mapping[str, Sequence[float]] = TIMES) -> dict[str, Any]:
    """Return (and write) a record of arms that take `times`; an arm without any cannot run."""
    settings = Update(pairs=4, device="cpu", kernels=("cudnn",), others=())

    def build(arm: Arm, _: GraphPool) -> WarmUp:
        if arm.name not in times:
            raise RuntimeError(f"no way to run {arm.name}.")
        block = partial(next, cycle(times[arm.name]))
        kernels = [{"name": "sdpa_<forward>", "calls": 1, "ms": 2.5}]
        return lambda: Ready({"update": block}, lambda: kernels, {})

    with Session(settings.kind, asdict(settings), MACHINE, out=path) as session:
        case = Case(
            name=POINT.name,
            fields={"model": "124m", "point": POINT.to_dict()},
            comparisons=settings.comparisons([0.25, 0.5]),
            build=build,
            describe=lambda arm: {"heads": round(144 * arm.rate)},
        )
        compare(session, settings, case)
    return session.record
