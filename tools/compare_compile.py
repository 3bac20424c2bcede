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

On a machine without a GPU: `--model tiny --points 32x2x2 --repeats 1 --pairs 1` shows that it runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import saf
from saf.adapters import adapter_for
from saf.bench.harness.pairs import measure_pair
from saf.bench.harness.settings import Point, parse_shape
from saf.bench.harness.synthetic import random_tokens, synthetic_patterns
from saf.bench.harness.timing import wait_for
from saf.bench.model.placement import heads_per_layer
from saf.bench.model.update import CLIP, LEARNING_RATE, PRELOADED, Preloaded
from saf.heads import HeadSet
from saf.machine.execution import Execution
from saf.models import GPT
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


def one_update(updater: Updater) -> float:
    """Return the seconds of an update, the device waited for."""
    device = updater.execution.device
    wait_for(device)
    began = time.perf_counter()
    updater.update(LEARNING_RATE)
    wait_for(device)
    return time.perf_counter() - began


def stand_still(updater: Updater) -> dict:
    """Make updates of what has just changed; return what they lost, and the first one's own seconds."""
    began = time.perf_counter()
    updater.compile_()
    made = time.perf_counter() - began
    seconds = [one_update(updater) for _ in range(AFTER)]
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
    found = {"start": stand_still(updater)}
    if asked.ahead and asked.form == "layers":
        found["ahead"] = compiled_ahead(asked, updater, model)
    first = quarter(model)
    freeze(model, first, updater.optimizer)
    found["first event"] = stand_still(updater)
    counts = [sum(layer == at for layer, _ in first) for at in range(model.config.num_layers)]
    more = [(layer, count) for layer, count in enumerate(counts) if count < model.config.num_heads][::4]
    freeze(model, more, updater.optimizer)
    found["second event"] = stand_still(updater) | {"heads": more}
    found["frozen"] = counts
    return found


def compared(asked: argparse.Namespace, text: str, rate: float) -> dict:
    """Return the ratio of whole to layers at a point: below 1, layers are slower."""
    point = point_of(text)
    model = build(asked, point, Execution.of(asked.device).device)
    if rate:
        freeze(model, quarter(model))
    updaters = {form: updater_of(model, form, asked, point) for form in FORMS}  # whole first: it drops all programs
    for updater in updaters.values():
        for _ in range(2):
            updater.update(LEARNING_RATE)

    def timed(form: str) -> float:
        return 1e3 * statistics.mean(one_update(updaters[form]) for _ in range(asked.repeats))

    times = [measure_pair(lambda: timed("whole"), lambda: timed("layers"), n) for n in range(asked.pairs)]
    ratios = sorted(whole / layers for whole, layers in times)
    whole, layers = (statistics.median(each) for each in zip(*times, strict=True))
    row = {"point": text, "rate": rate, "whole_ms": whole, "layers_ms": layers, "ratio": statistics.median(ratios)}
    print(json.dumps(row), flush=True)
    return row | {"ratios": ratios}


def main() -> None:
    """Measure what was asked for and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="124m")
    parser.add_argument(
        "--points", nargs="+", default=["4096x8x4"], help="LENGTHxBATCHxMICRO_BATCHES; events: the first"
    )
    parser.add_argument("--kernel", default=None, help="of live heads; cudnn on CUDA")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=2, help="updates in a timed block")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--form", choices=FORMS, help="measure the events of one form, in this process")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="whose events are measured")
    parser.add_argument("--warm", action="store_true", help="measure events again with the caches filled by the first")
    parser.add_argument(
        "--ahead", action="store_true", help="compile layouts in another process before the first event"
    )
    parser.add_argument("--only", choices=("events", "pairs"))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    asked.kernel = asked.kernel or ("cudnn" if Execution.of(asked.device).device.type == "cuda" else "auto")
    if asked.form:
        print(json.dumps(events(asked)))
        return
    record: dict = {"device": Execution.of(asked.device).device_name, "torch": torch.__version__, "model": asked.model}
    if asked.only != "pairs":
        record["events"] = {}
        for form in asked.forms:
            with tempfile.TemporaryDirectory() as folder:
                caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
                words = [sys.executable, *sys.argv, "--form", form]
                for name in (form, f"{form}, warm")[: 1 + asked.warm]:
                    reply = subprocess.run(
                        words, env=os.environ | caches, stdout=subprocess.PIPE, check=True, text=True
                    )
                    record["events"][name] = json.loads(reply.stdout.splitlines()[-1])
                    print(name, json.dumps(record["events"][name]), flush=True)
    if asked.only != "events":
        record["pairs"] = [compared(asked, point, rate) for point in asked.points for rate in (0.0, RATE)]
    if asked.out:
        asked.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
