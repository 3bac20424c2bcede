"""Measure updates compiled whole and by layers: `python tools/compare_compile.py --out compile.json`.

Two questions of one model, ordinary and with a quarter of its heads frozen where a trained model has them: what an
update takes in each form, as pairs in one process (ABBA), and how long updates stand still after an event. For the
second each form has a process of its own with empty caches on disk: the start, a first event of a quarter of all heads,
and a second one of a head more in some layers. The time lost to an event is what its updates took beyond as many at
the speed that follows, the event's own work left out.

`--ahead` lets a process compile the layouts of all numbers of frozen heads between the start and the first event, as
a run with `--compile-ahead` does while it trains, and waits for it. `--warm` measures events again in a process that
finds the caches which the first one filled: what an event costs when its layouts were all compiled before.
`--only events --forms layers --ahead` answers what an event costs for 124M in about two minutes.

Pairs have a control, the whole model compiled a second time, and are refused where it is not within 1% of 1. Of one
more update in each form the device's kernels are counted and their time is added up: forms that differ in time but not
in that differ in what the device waits for. The record is as those of `saf bench`; `python -m experiments results`
shows it. On a machine without a GPU `--device cpu --model tiny --points 32x2x2 --repeats 1 --pairs 2 --tolerance 10`
shows that it runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch

import saf
from saf.adapters import adapter_for
from saf.bench.harness.environment import clean_process, environment
from saf.bench.harness.kernels import kernels_of
from saf.bench.harness.pairs import FEWEST, measure_pair, refused, summary
from saf.bench.harness.recorder import Recorder, say_on_stderr
from saf.bench.harness.settings import Point, parse_shape
from saf.bench.harness.synthetic import random_tokens, synthetic_patterns
from saf.bench.harness.timing import Budget, wait_for
from saf.bench.model.compiling import AHEAD, EVENT, PAIR, CompileKind
from saf.bench.model.placement import heads_per_layer
from saf.bench.model.update import CLIP, LEARNING_RATE, PRELOADED, Preloaded
from saf.heads import HeadSet
from saf.machine.execution import Execution
from saf.models import GPT
from saf.records.table import markdown_of
from saf.train.ahead import Layouts, start
from saf.train.optimizer import build_optimizer
from saf.train.updater import Updater

FORMS = {"whole": "on", "layers": "layers"}
RATE = 0.25
AFTER = 6
"""Updates after an event; the median of the later half is the speed that the event leads to."""


def point_of(text: str) -> Point:
    """Return the point LENGTHxBATCHxMICRO_BATCHES."""
    return Point(*parse_shape(text, "update", micro_batches=True))


def build(asked: argparse.Namespace, point: Point, device: torch.device) -> GPT:
    """Return an ordinary model with live heads on the kernel asked for."""
    model = GPT.undrawn(saf.preset(asked.model, max_length=point.length), device)
    model.reset_parameters(torch.Generator(device).manual_seed(0))
    for site in adapter_for(model).sites():
        site.pin(asked.kernel)
    return model.train()


def updater_of(model: GPT, form: str, asked: argparse.Namespace, point: Point) -> Updater:
    """Return what makes updates of the model in one form."""
    execution = Execution.of(asked.device, compile=FORMS[form])
    accumulation = point.accumulation or 1
    tokens = random_tokens(
        min(PRELOADED, accumulation), point.batch_size, point.length, model.config.vocab_size,
        torch.Generator().manual_seed(0), execution.device,
    )  # fmt: skip
    return Updater(
        model=model, optimizer=build_optimizer(model), batches=Preloaded(tokens), execution=execution,
        accumulation=accumulation, clip=CLIP,
    )  # fmt: skip


def freeze(model: GPT, heads: list[tuple[int, int]], optimizer: torch.optim.Optimizer | None = None) -> None:
    """Freeze heads with made-up patterns."""
    device = model.embed.weight.device
    drawn = torch.Generator().manual_seed(0)
    patterns = synthetic_patterns(len(heads), model.config.max_length, drawn, device)
    saf.install_(model, HeadSet(heads), patterns, optimizer=optimizer)


def quarter(model: GPT) -> list[tuple[int, int]]:
    """Return the first heads of each layer, as many as variance selection takes of a trained model."""
    config = model.config
    counts = heads_per_layer(num_layers=config.num_layers, num_heads=config.num_heads, rate=RATE, placement="early")
    return [(layer, head) for layer, count in enumerate(counts) for head in range(count)]


def in_a_row(updater: Updater, count: int = 1) -> float:
    """Return the mean seconds of updates that follow one another as in training, the device waited for at both ends."""
    device = updater.execution.device
    wait_for(device)
    began = time.perf_counter()
    for _ in range(count):
        updater.update(LEARNING_RATE)
    wait_for(device)
    return (time.perf_counter() - began) / count


def stand_still(updater: Updater) -> dict:
    """Make updates of what has just changed; return what they lost, and the first one's own seconds."""
    began = time.perf_counter()
    updater.compile_()
    made = time.perf_counter() - began
    seconds = [in_a_row(updater) for _ in range(AFTER)]
    speed = statistics.median(seconds[AFTER // 2 :])
    return {"lost_s": made + sum(each - speed for each in seconds), "first_s": seconds[0], "update_s": speed}


def compiled_ahead(asked: argparse.Namespace, updater: Updater, model: GPT) -> dict:
    """Compile the layouts of all numbers of frozen heads in a process beside this one; return what that took."""
    point = point_of(asked.points[0])
    layouts = Layouts(
        model=model.config, length=point.length, batch_size=point.batch_size, execution=updater.execution,
        kernel=asked.kernel, backend="auto", trainable=False, frozen=tuple(range(1, model.config.num_heads + 1)),
    )  # fmt: skip
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        code = start(layouts, log).wait()
        said = log.read_text()
    if code:
        raise RuntimeError(f"compiling ahead ended with code {code}: {said[-2000:]}")
    return {"seconds": time.perf_counter() - began, "layouts": len(layouts.frozen), "bytes": layouts.bytes}


def events(asked: argparse.Namespace) -> dict:
    """Return what each event of one form costs, in this process."""
    point = point_of(asked.points[0])
    device = Execution.of(asked.device).device
    model = build(asked, point, device)
    updater = updater_of(model, asked.form, asked, point)
    found = {"start": stand_still(updater) | {"frozen": 0}}
    if asked.ahead and asked.form == "layers":
        found["ahead"] = compiled_ahead(asked, updater, model)
    first = quarter(model)
    freeze(model, first, updater.optimizer)
    found["first event"] = stand_still(updater) | {"frozen": len(first)}
    counts = [sum(layer == at for layer, _ in first) for at in range(model.config.num_layers)]
    more = [(layer, count) for layer, count in enumerate(counts) if count < model.config.num_heads][::4]
    freeze(model, more, updater.optimizer)
    found["second event"] = stand_still(updater) | {"frozen": len(first) + len(more)}
    return found


def busy_of(updater: Updater) -> dict[str, float]:
    """Return how many kernels one update has the device run (operators on a CPU), and their milliseconds added up."""
    kernels = kernels_of(lambda: in_a_row(updater), updater.execution.device, most=None)
    return {"kernels": sum(each["calls"] for each in kernels), "ms": sum(each["ms"] for each in kernels)}


def compared(asked: argparse.Namespace, text: str, rate: float, recorder: Recorder) -> None:
    """Record the ratio of whole to layers at a point, below 1 where layers are slower, and that of whole to whole."""
    point, began = point_of(text), time.perf_counter()
    place = {"part": PAIR, "model": asked.model, "point": point.to_dict(), "rate": rate}
    what = f"{text}, {100 * rate:g}% frozen"
    model = build(asked, point, Execution.of(asked.device).device)
    if rate:
        freeze(model, quarter(model))
    # Those of the whole model first: making them drops all programs, as every event of such a run does.
    forms = {"whole": "whole", "control": "whole", "layers": "layers"}
    updaters = {name: updater_of(model, form, asked, point) for name, form in forms.items()}
    for updater in updaters.values():
        for _ in range(2):
            updater.update(LEARNING_RATE)

    def timed(name: str) -> float:
        return 1e3 * in_a_row(updaters[name], asked.repeats)

    taken: dict[str, list] = {"control": [], "layers": []}
    for number in range(asked.pairs):
        if not recorder.budget.fits((time.perf_counter() - began) / (number + 1)):
            recorder.leave_out(what, f"pairs {number + 1} to {asked.pairs}: out of time")
            break
        for name, pairs in taken.items():
            pairs.append(measure_pair(lambda: timed("whole"), lambda name=name: timed(name), number))
    if len(taken["layers"]) < min(FEWEST, asked.pairs):
        return
    control = summary(taken["control"])["ratio"]
    busy = {form: busy_of(updaters[form]) for form in FORMS}
    told = {"control_ratio": control, "refused": refused(control, asked.tolerance), "busy": busy}
    recorder.show([place | {"control": name == "control"} | summary(each) | told for name, each in taken.items()])
    recorder.keep()
    recorder.say(f"{what}: whole / layers {summary(taken['layers'])['ratio']:.4f}, control {control:.4f}")


def event_rows(asked: argparse.Namespace, form: str, caches: str, found: dict) -> list[dict]:
    """Return the rows of what a process measured of one form."""
    place = {"model": asked.model, "point": point_of(asked.points[0]).to_dict()}
    if "ahead" in found:
        caches = "ahead"
    rows = [
        {"part": EVENT, **place, "form": form, "caches": caches if name != "start" else "empty", "event": name, **told}
        for name, told in found.items()
        if name != "ahead"
    ]
    return [*rows, *([{"part": AHEAD, **place, **found["ahead"]}] if "ahead" in found else [])]


def record_events(asked: argparse.Namespace, form: str, words: list[str], recorder: Recorder) -> None:
    """Measure the events of one form in a process of its own, with caches of its own, and again with these."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        for state in ("empty", "warm")[: 1 + asked.warm]:
            what = f"events, {form}, caches {state}"
            left = None if asked.seconds is None else max(0.0, recorder.budget.left)
            try:
                reply = subprocess.run(
                    [*words, "--form", form], env=os.environ | caches, stdout=subprocess.PIPE, text=True, timeout=left
                )
            except subprocess.TimeoutExpired:
                recorder.leave_out(what, "out of time")
                return
            if reply.returncode or not reply.stdout.strip():
                recorder.leave_out(what, f"its process ended with code {reply.returncode}")
                return
            found = json.loads(reply.stdout.splitlines()[-1])
            rows = event_rows(asked, form, state, found)
            if state == "warm":
                rows = [row | {"caches": "warm"} for row in rows]
            recorder.show(rows)
            recorder.keep()
            lost = ", ".join(f"{row['event']} {row['lost_s']:.1f} s" for row in rows if row["part"] == EVENT)
            recorder.say(f"{what}: lost {lost}")


def parser_of_words() -> argparse.ArgumentParser:
    """Return what reads the command's words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="124m")
    parser.add_argument(
        "--points", nargs="+", default=["4096x8x4"], help="LENGTHxBATCHxMICRO_BATCHES; events: the first"
    )
    parser.add_argument("--kernel", default=None, help="of live heads; cudnn on CUDA")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=4, help="updates in a row in a timed block")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--tolerance", type=float, default=0.01, help="how far from 1 the control of pairs may be")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="of which events are measured")
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help="measure events again with the caches filled by the first")
    parser.add_argument(
        "--ahead", action="store_true", help="compile layouts in another process before the first event"
    )
    parser.add_argument("--only", choices=("events", "pairs"))
    parser.add_argument("--seconds", type=float, help="stop cleanly after this long, and say what was left out")
    parser.add_argument("--out", type=Path, help="JSON file to write; a new one")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Measure what was asked for and write the record; return 1 where something asked for could not be measured."""
    asked = parser_of_words().parse_args(words)
    execution = Execution.of(asked.device)
    asked.kernel = asked.kernel or ("cudnn" if execution.device.type == "cuda" else "auto")
    if asked.form:
        print(json.dumps(events(asked)))
        return 0
    settings = {name: value for name, value in vars(asked).items() if name not in ("form", "out")}
    settings |= {"after": AFTER, "in_a_row": True}
    recorder = Recorder(
        asked.out, kind=CompileKind.name, settings=settings, budget=Budget(asked.seconds), say=say_on_stderr
    )
    with recorder:
        recorder.trace(**environment(execution.device, execution.device_name))
        command = [sys.executable, __file__, *(sys.argv[1:] if words is None else words)]
        for form in asked.forms if asked.only != "pairs" else ():
            record_events(asked, form, command, recorder)
        for text, rate in product(asked.points, (0.0, RATE)) if asked.only != "events" else ():
            with clean_process():
                compared(asked, text, rate, recorder)
    for part in CompileKind().tables(recorder.record):
        print(markdown_of(part))
    return 1 if recorder.record["left_out"] else 0


if __name__ == "__main__":
    sys.exit(main())
