"""How long training stands still after an event, with the model compiled whole or by layers.

Each form has a process of its own with empty caches on disk: the start, a first event of a quarter of all heads, and a
second of a head more in some layers. Lost is the time of the updates after an event beyond as many at the speed that
follows, without the event's own work.

    python -m benchmarks.compiling --forms layers     # 124M, two minutes
    python -m benchmarks.compiling --device cpu --model tiny --points 32x2x2
"""

import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import torch

import saf
from benchmarks import command
from saf.bench import Update
from saf.bench.models import CLIP, PRELOADED, plan_of, time_updates
from saf.bench.protocol import SPAWN, Arm, Point
from saf.bench.record import Session
from saf.heads import Head, HeadSet
from saf.machine import Execution
from saf.synthetic import heads_per_layer, synthetic_patterns
from saf.train.step import Updater, build_optimizer

FORMS = {"whole": "on", "layers": "layers"}
RATE = 0.25
AFTER = 6
"""Updates after an event; the median of the later half is the speed that the event leads to."""


@dataclass(kw_only=True)
class Compiling:
    """Measure how long updates take after events, compiled whole and by layers."""

    model: str = "124m"
    """Preset with random weights."""
    points: tuple[str, ...] = ("4096x8x4",)
    """Context x sequences x micro-batches."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to measure on; auto is CUDA if there is one."""
    forms: tuple[Literal["whole", "layers"], ...] = ("whole", "layers")
    """Forms of compilation."""


def measure(settings: Compiling, *, out: Path | None = None) -> dict[str, Any]:
    """Measure the events of each form in a process of its own and return the record."""
    execution = Execution.of(settings.device)
    values = asdict(settings) | {"after": AFTER, "in_a_row": True}
    with Session("compile", values, execution, out=out) as session:
        for point in Update(model=settings.model, points=settings.points).parsed_points():
            for form in settings.forms:
                with session.attempt(f"{point.name} events, {form}"):
                    record_events(session, settings, form, point)
    return session.record


def record_events(session: Session, settings: Compiling, form: str, point: Point) -> None:
    """Measure one form in a new process, and record a row for each event."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, SPAWN) as pool:
        results = pool.submit(events, settings, form, point, folder).result()
    place = {"model": settings.model, "point": point.to_dict()}
    own = {"part": "event", **place, "form": form, "caches": "empty"}
    rows = [{**own, "event": name, **numbers} for name, numbers in results.items()]
    session.add(rows)
    session.log(f"{form}: lost " + ", ".join(f"{row['event']} {row['lost_s']:.1f} s" for row in rows))


def events(settings: Compiling, form: str, point: Point, caches: str | None = None) -> dict[str, Any]:
    """Return the cost of each event of one form, in this process."""
    if caches is not None:  # read by the compilers when they first compile
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": caches, "TRITON_CACHE_DIR": f"{caches}/triton"}
    execution = Execution.of(settings.device, compile=FORMS[form])
    kernel = "cudnn" if execution.device.type == "cuda" else "auto"
    plan = plan_of(Update(model=settings.model, device=settings.device), point.length)
    model: Any = plan.build(Arm(kernel)).train()
    accumulation = point.accumulation or 1
    tokens = plan.tokens(min(PRELOADED, accumulation), point.batch_size)
    updater = Updater(
        model=model, optimizer=build_optimizer(model), batches=cycle(tokens), execution=execution,
        accumulation=accumulation, clip=CLIP,
    )  # fmt: skip
    # The start is no event: it is what any compiled training pays.
    results: dict[str, Any] = {"start": stand_still(updater) | {"frozen": 0}}
    layers, heads = plan.shape.num_layers, plan.shape.num_heads
    counts = heads_per_layer(num_layers=layers, num_heads=heads, rate=RATE)
    first = [(layer, head) for layer, count in enumerate(counts) for head in range(count)]
    freeze(updater, first)
    results["first event"] = stand_still(updater) | {"frozen": len(first)}
    # A head more in every fourth layer: some layouts are new then, and the others compiled already.
    more = [(layer, count) for layer, count in enumerate(counts) if count < heads][::4]
    freeze(updater, more)
    results["second event"] = stand_still(updater) | {"frozen": len(first) + len(more)}
    return results


def freeze(updater: Updater, heads: list[Head]) -> None:
    """Freeze heads with synthetic patterns: what an event does, without calibration and fits."""
    model: Any = updater.model
    generator = torch.Generator().manual_seed(0)
    patterns = synthetic_patterns(len(heads), model.config.max_length, generator, updater.execution.device)
    saf.install_(model, HeadSet(heads), patterns, optimizer=updater.optimizer)


def stand_still(updater: Updater) -> dict[str, float]:
    """Make updates of a changed model; return the seconds that they lost, and the first one's own."""
    began = time.perf_counter()
    updater.compile_()
    prepared = time.perf_counter() - began
    # Each update is timed alone, to tell those that compile from those at full speed.
    seconds = [1e-3 * time_updates(updater, 1) for _ in range(AFTER)]
    speed = statistics.median(seconds[AFTER // 2 :])
    # Beyond as many updates at full speed; updates that are faster than their median by chance count against it.
    lost = prepared + sum(each - speed for each in seconds)
    return {"lost_s": lost, "first_s": seconds[0], "update_s": speed}


main = command(Compiling, measure, prog="compiling", exit_code=lambda record: bool(record["left_out"]))

if __name__ == "__main__":
    sys.exit(main())
