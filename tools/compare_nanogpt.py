"""The ordinary arm's update against nanoGPT's, on one device in one process, in alternating pairs.

    python tools/compare_nanogpt.py --nanogpt path/to/nanoGPT --out results/bench/nanogpt.json

`--nanogpt` is a clone of nanoGPT (github.com/karpathy/nanoGPT); its `model.py` is used as it is and its update repeats
the lines of its `train.py`: compiled model, bfloat16 autocast, fused AdamW, gradient scaler switched off, clipping at
1, gradients set to None, the loss never read. Both models have learned positions, 12 layers of 12 heads of 64
channels and 50,304 tokens; both take micro-batches that are on the device already. A second nanoGPT is the control.
"""

import argparse
import hashlib
import importlib.util
import time
from pathlib import Path

import torch

from saf.bench.harness.arms import Arm
from saf.bench.harness.environment import clean_process, environment
from saf.bench.harness.pairs import measure_pair, refused, summary
from saf.bench.harness.recorder import Recorder, say_on_stderr
from saf.bench.harness.synthetic import random_tokens
from saf.bench.harness.timing import Budget, wait_for
from saf.bench.model.models import ModelPlan
from saf.bench.model.nanogpt import NanoGPTKind
from saf.bench.model.update import PRELOADED, UpdateKind, UpdateSettings, execution_of
from saf.errors import InputError
from saf.machine.cuda_graphs import GraphPool

MODEL = "124m-learned"


class NanoGPT:
    """nanoGPT's model and the update of its training script."""

    def __init__(self, settings, point, source):
        execution = execution_of(settings)
        config = ModelPlan.of(settings, point.length).config
        torch.manual_seed(settings.seed)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        shape = source.GPTConfig(
            block_size=point.length, vocab_size=config.vocab_size, n_layer=config.num_layers, n_head=config.num_heads,
            n_embd=config.hidden_size, dropout=0.0, bias=False,
        )  # fmt: skip
        self.device, self.repeats, self.accumulation = execution.device, settings.repeats, point.accumulation
        model = source.GPT(shape).to(self.device)
        self.optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), self.device.type)
        self.parameters = list(model.parameters())
        self.model = torch.compile(model) if execution.compile else model
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=False)
        self.autocast = execution.autocast
        tokens = random_tokens(
            min(PRELOADED, self.accumulation), point.batch_size, point.length, config.vocab_size,
            torch.Generator().manual_seed(settings.seed), self.device,
        )  # fmt: skip
        self.batches = [(inputs.contiguous(), targets.contiguous()) for inputs, targets in tokens]
        self.warmup = settings.warmup

    def update(self):
        """Do one update; return its loss, on the device."""
        for step in range(self.accumulation):
            inputs, targets = self.batches[step % len(self.batches)]
            with self.autocast():
                _, loss = self.model(inputs, targets)
                loss = loss / self.accumulation
            self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def warm_up(self):
        """Compile and run untimed updates."""
        for _ in range(self.warmup):
            self.update()

    def timed_block(self, _):
        """Return the mean milliseconds of some updates in a row."""
        wait_for(self.device)
        began = time.perf_counter()
        for _ in range(self.repeats):
            self.update()
        wait_for(self.device)
        return 1e3 * (time.perf_counter() - began) / self.repeats


def main():
    """Measure every point and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True, help="folder with nanoGPT's model.py")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write; a new one")
    parser.add_argument("--points", nargs="+", default=["1024x32x4", "4096x8x4"])
    parser.add_argument("--model", default=MODEL, help="preset of the shape")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=None, help="stop cleanly after this long")
    options = parser.parse_args()
    path = options.nanogpt / "model.py"
    if not path.exists():
        raise InputError(f"{path} does not exist; give the folder of a nanoGPT clone")
    specification = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert specification is not None
    assert specification.loader is not None
    source = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(source)
    settings = UpdateSettings(points=tuple(options.points), model=options.model, pairs=options.pairs)
    execution, budget = execution_of(settings), Budget(options.seconds)
    recorder = Recorder(
        options.out, kind=NanoGPTKind.name, settings=settings.to_dict(), budget=budget, say=say_on_stderr
    )
    with recorder:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        recorder.trace(**environment(execution.device, execution.device_name))
        recorder.describe(nanogpt_model_sha256=digest)
        for point in UpdateKind().points(settings):
            with clean_process():
                measure(settings, point, source, recorder)


def measure(settings, point, source, recorder):
    """Compare at one point: nanoGPT is the baseline, so a ratio above 1 says that this project's update is faster."""
    began = time.perf_counter()
    arms = {"nanoGPT": NanoGPT(settings, point, source), "control nanoGPT": NanoGPT(settings, point, source)}
    kernel = "cudnn" if recorder.record["provenance"]["device"].startswith("NVIDIA") else "auto"
    arms["ordinary"] = UpdateKind().build(settings, point, Arm(kernel), GraphPool())
    for name, subject in arms.items():
        subject.warm_up()
        recorder.say(f"{point.name} ready: {name}")
    taken = {name: [] for name in ("control nanoGPT", "ordinary")}
    for number in range(settings.pairs):
        if not recorder.budget.fits((time.perf_counter() - began) / max(number, 1)):
            recorder.leave_out(point.name, f"pairs {number + 1} to {settings.pairs}: out of time")
            break
        for name, pairs in taken.items():
            baseline, arm = arms["nanoGPT"], arms[name]
            pairs.append(measure_pair(lambda b=baseline: b.timed_block(""), lambda a=arm: a.timed_block(""), number))
    control = summary(taken["control nanoGPT"])["ratio"] if taken["control nanoGPT"] else None
    tokens = point.length * point.batch_size * point.accumulation
    for name, pairs in taken.items():
        if pairs:
            found = summary(pairs)
            rates = {f"{side}_tokens_per_second": 1e3 * tokens / found[f"{side}_ms"] for side in ("baseline", "arm")}
            row = {"model": settings.model, "point": point.to_dict(), "variant": "update", "baseline": "nanoGPT"}
            row |= {"arm": name, "control": name != "ordinary", **found, **rates, "control_ratio": control}
            row |= {"refused": refused(control, settings.tolerance)}
            recorder.show([row])
            recorder.keep()
            recorder.say(f"{point.name} {name}: {found['ratio']:.4f}x ({found['arm_ms']:.1f} ms)")


if __name__ == "__main__":
    main()
