"""Updates compiled whole and by layers: what an update takes in each form, and how long an event stands still.

Of one model, ordinary and with a quarter of its heads frozen where a trained model has them, forms are timed as pairs
in one process. For events each form has a process of its own with empty caches on disk: the start, a first event of a
quarter of all heads, and a second of a head more in some layers. Lost is what the updates after an event took beyond as
many at the speed that follows, the event's own work left out.

`--ahead` lets a process compile the layouts of all numbers of frozen heads between the start and the first event, as a
run with `--compile-ahead` does. `--warm` measures events again with the caches that the first process filled. Of one
more update in each form the device's kernels are counted and their time is added up: forms that differ in time but not
in that differ in what the device waits for.

    python -m benchmarks.compiling --only events --forms layers --ahead     # what an event costs 124M, two minutes
    python -m benchmarks.compiling --device cpu --model tiny --points 32x2x2 --repeats 1 --pairs 2 --tolerance 10
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

import saf
from benchmarks import run
from saf.adapters import adapter_for
from saf.bench.models import heads_per_layer, random_tokens, synthetic_patterns
from saf.bench.protocol import OUT_OF_TIME, Session, alternate, clean_process, kernels_of, refused, summary
from saf.bench.whole import CLIP, LEARNING_RATE, PRELOADED, Preloaded, Update, updates_in_a_row
from saf.heads import Head, HeadSet
from saf.machine.execution import Execution
from saf.models import GPT
from saf.records.files import to_json
from saf.train.ahead import Layouts, start
from saf.train.optimizer import build_optimizer
from saf.train.updater import Updater

FORMS = {"whole": "on", "layers": "layers"}
RATE = 0.25
AFTER = 6
"""Updates after an event; the median of the later half is the speed that the event leads to."""


@dataclass(kw_only=True)
class Compiling:
    """Measure updates compiled whole and by layers, as pairs and after events."""

    model: str = "124m"
    points: tuple[str, ...] = ("4096x8x4",)
    """Context x sequences x micro-batches; events take the first."""
    kernel: str | None = None
    """Attention kernel of live heads; cudnn on CUDA."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    repeats: int = 4
    """Updates in a row in a timed block."""
    pairs: int = 8
    tolerance: float = 0.01
    """How far from 1 the control of pairs may be."""
    forms: tuple[Literal["whole", "layers"], ...] = ("whole", "layers")
    """Of which events are measured."""
    warm: bool = False
    """Measure events again with the caches filled by the first process."""
    ahead: bool = False
    """Compile layouts in another process before the first event."""
    only: Literal["events", "pairs"] | None = None
    seconds: float | None = None
    """Stop cleanly after this long, and record what was left out."""

    def points_(self):
        """Return the points."""
        return Update(points=self.points, model=self.model).parsed_points()


def build(settings: Compiling, point: Any) -> GPT:
    """Return an ordinary model with live heads on the kernel asked for."""
    device = Execution.of(settings.device).device
    model = GPT.undrawn(saf.preset(settings.model, max_length=point.length), device)
    model.reset_parameters(torch.Generator(device).manual_seed(0))
    for site in adapter_for(model).sites():
        site.pin(settings.kernel or ("cudnn" if device.type == "cuda" else "auto"))
    return model.train()


def updater_of(settings: Compiling, model: GPT, form: str, point: Any) -> Updater:
    """Return what makes updates of the model in one form."""
    execution = Execution.of(settings.device, compile=FORMS[form])
    accumulation = point.accumulation
    tokens = random_tokens(
        min(PRELOADED, accumulation), point.batch_size, point.length, model.config.vocab_size,
        torch.Generator().manual_seed(0), execution.device,
    )  # fmt: skip
    return Updater(
        model=model, optimizer=build_optimizer(model), batches=Preloaded(tokens), execution=execution,
        accumulation=accumulation, clip=CLIP,
    )  # fmt: skip


def freeze(model: GPT, heads: list[Head], optimizer: torch.optim.Optimizer | None = None) -> None:
    """Freeze heads with made-up patterns."""
    generator = torch.Generator().manual_seed(0)
    patterns = synthetic_patterns(len(heads), model.config.max_length, generator, model.embed.weight.device)
    saf.install_(model, HeadSet(heads), patterns, optimizer=optimizer)


def quarter(model: GPT) -> list[Head]:
    """Return the first heads of each layer, as many as variance selection takes of a trained model."""
    config = model.config
    counts = heads_per_layer(num_layers=config.num_layers, num_heads=config.num_heads, rate=RATE, placement="early")
    return [(layer, head) for layer, count in enumerate(counts) for head in range(count)]


# Pairs


def compare_forms(session: Session, settings: Compiling, point: Any, rate: float) -> None:
    """Record the ratio of whole to layers at a point, below 1 where layers are slower, and that of whole to whole."""
    name = f"{point.name}, {100 * rate:g}% frozen"
    model = build(settings, point)
    if rate:
        freeze(model, quarter(model))
    # Those of the whole model first: making them drops all programs, as every event of such a run does.
    forms = {"whole": "whole", "control": "whole", "layers": "layers"}
    updaters = {arm: updater_of(settings, model, form, point) for arm, form in forms.items()}
    for updater in updaters.values():
        for _ in range(2):
            updater.update(LEARNING_RATE)

    def timed(arm: str) -> float:
        return updates_in_a_row(updaters[arm], settings.repeats)

    blocks = {arm: (lambda: timed("whole"), lambda arm=arm: timed(arm)) for arm in ("control", "layers")}
    times = alternate(session, name, blocks, settings.pairs)
    if len(times) < 2:
        return
    control = summary(times["control"])["ratio"]
    row = {"part": "pair", "model": settings.model, "point": point.to_dict(), "rate": rate, "control_ratio": control}
    row |= {"refused": refused(control, settings.tolerance), "busy": {form: busy(updaters[form]) for form in FORMS}}
    session.add([row | {"control": arm == "control"} | summary(pairs) for arm, pairs in times.items()])
    session.say(f"{name}: whole / layers {summary(times['layers'])['ratio']:.4f}, control {control:.4f}")


def busy(updater: Updater) -> dict[str, float]:
    """Return how many kernels one update runs (operators on a CPU), and their milliseconds added up."""
    kernels = kernels_of(lambda: updates_in_a_row(updater, 1), updater.execution.device, most=None)
    return {"kernels": sum(each["calls"] for each in kernels), "ms": sum(each["ms"] for each in kernels)}


# Events


def stand_still(updater: Updater) -> dict[str, float]:
    """Make updates of what has just changed; return the seconds that they lost, and the first one's own."""
    began = time.perf_counter()
    updater.compile_()
    made = time.perf_counter() - began
    seconds = [1e-3 * updates_in_a_row(updater, 1) for _ in range(AFTER)]
    speed = statistics.median(seconds[AFTER // 2 :])
    return {"lost_s": made + sum(each - speed for each in seconds), "first_s": seconds[0], "update_s": speed}


def compile_ahead(settings: Compiling, updater: Updater, model: GPT, point: Any) -> dict[str, float]:
    """Compile the layouts of all numbers of frozen heads in a process beside this one; return what that took."""
    kernel = adapter_for(model).sites()[0].attention.live.kernel  # type: ignore[attr-defined]
    layouts = Layouts(
        model=model.config, length=point.length, batch_size=point.batch_size, execution=updater.execution,
        kernel=kernel, backend="auto", trainable=False, frozen=tuple(range(1, model.config.num_heads + 1)),
    )  # fmt: skip
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        code = start(layouts, log).wait()
        written = log.read_text()
    if code:
        raise RuntimeError(f"compiling ahead ended with code {code}: {written[-2000:]}")
    return {"seconds": time.perf_counter() - began, "layouts": len(layouts.frozen), "bytes": layouts.bytes}


def events(settings: Compiling, form: str) -> dict[str, Any]:
    """Return what each event of one form costs, in this process."""
    point = settings.points_()[0]
    model = build(settings, point)
    updater = updater_of(settings, model, form, point)
    found: dict[str, Any] = {"start": stand_still(updater) | {"frozen": 0}}
    if settings.ahead and form == "layers":
        found["ahead"] = compile_ahead(settings, updater, model, point)
    first = quarter(model)
    freeze(model, first, updater.optimizer)
    found["first event"] = stand_still(updater) | {"frozen": len(first)}
    counts = [sum(layer == at for layer, _ in first) for at in range(model.config.num_layers)]
    more = [(layer, count) for layer, count in enumerate(counts) if count < model.config.num_heads][::4]
    freeze(model, more, updater.optimizer)
    found["second event"] = stand_still(updater) | {"frozen": len(first) + len(more)}
    return found


def record_events(session: Session, settings: Compiling, form: str) -> None:
    """Measure the events of one form in a process of its own, with caches of its own, and again with these."""
    question = json.dumps(to_json({"form": form, "settings": asdict(settings)}))
    place = {"model": settings.model, "point": settings.points_()[0].to_dict()}
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        for state in ("empty", "warm")[: 1 + settings.warm]:
            what, left = f"events, {form}, caches {state}", session.left and max(0.0, session.left)
            command = [sys.executable, "-m", "benchmarks.compiling", "--in-process", question]
            how = {"env": os.environ | caches, "stdout": subprocess.PIPE, "text": True, "timeout": left}
            try:
                reply = subprocess.run(command, check=False, cwd=Path(__file__).resolve().parents[1], **how)
            except subprocess.TimeoutExpired:
                session.leave_out(what, OUT_OF_TIME)
                return
            if reply.returncode or not reply.stdout.strip():
                session.leave_out(what, f"its process ended with code {reply.returncode}")
                return
            found = json.loads(reply.stdout.splitlines()[-1])
            ahead = found.pop("ahead", None)
            after = "warm" if state == "warm" else "ahead" if ahead else "empty"
            rows = [
                {"part": "event", **place, "form": form, "event": name, "caches": "empty" if name == "start" else after}
                | ({"caches": "warm"} if state == "warm" else {})
                | numbers
                for name, numbers in found.items()
            ]
            session.add(rows + ([{"part": "ahead", **place, **ahead}] if ahead else []))
            session.say(f"{what}: lost " + ", ".join(f"{row['event']} {row['lost_s']:.1f} s" for row in rows))


def measure(settings: Compiling, *, out: Path | None = None) -> dict[str, Any]:
    """Measure and return the record."""
    execution = Execution.of(settings.device)
    settings = replace(settings, kernel=settings.kernel or ("cudnn" if execution.device.type == "cuda" else "auto"))
    values = asdict(settings) | {"after": AFTER, "in_a_row": True}
    with Session("compile", values, execution, out=out, seconds=settings.seconds) as session:
        for form in settings.forms if settings.only != "pairs" else ():
            record_events(session, settings, form)
        for point, rate in product(settings.points_(), (0.0, RATE)) if settings.only != "events" else ():
            with clean_process():
                compare_forms(session, settings, point, rate)
    return session.record


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return 1 where something could not be measured."""
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["--in-process"]:
        question = json.loads(words[1])
        given: Any = {name: tuple(v) if isinstance(v, list) else v for name, v in question["settings"].items()}
        print(json.dumps(events(Compiling(**given), question["form"])))
        return 0
    return 1 if run(Compiling, measure, words, prog="compiling")["left_out"] else 0


if __name__ == "__main__":
    sys.exit(main())
