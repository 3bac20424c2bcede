"""The ordinary arm's update against nanoGPT's, on one device in one process, in alternating pairs.

    python -m benchmarks.nanogpt --nanogpt path/to/nanoGPT --out results/bench/nanogpt.json

`--nanogpt` is a clone of nanoGPT (github.com/karpathy/nanoGPT); its `model.py` is used as it is and its update repeats
the lines of its `train.py`: compiled model, bfloat16 autocast, fused AdamW, gradient scaler switched off, clipping at
1, gradients set to None, the loss never read. Both models have learned positions, 12 layers of 12 heads of 64 channels
and 50,304 tokens; both take micro-batches that are on the device already. A second nanoGPT is the control.
"""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import run
from saf.bench import Update
from saf.bench.protocol import Arm, Point, Session, alternate, clean_process, refused, summary
from saf.bench.timing import row_block
from saf.bench.whole import PRELOADED
from saf.errors import InputError
from saf.machine import GraphPool
from saf.models import preset


@dataclass(kw_only=True)
class BesideNanoGPT(Update):
    """Compare updates of the ordinary arm with nanoGPT's own: a ratio above 1 says that this project's are faster."""

    nanogpt: Path
    """Folder with nanoGPT's model.py."""
    model: str = "124m-learned"
    points: tuple[str, ...] = ("1024x32x4", "4096x8x4")


class NanoGPT:
    """nanoGPT's model and the update of its training script."""

    def __init__(self, settings: BesideNanoGPT, point: Point, source: Any):
        execution, self.settings = settings.execution, settings
        config = preset(settings.model, max_length=point.length)
        torch.manual_seed(settings.seed)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        shape = source.GPTConfig(
            block_size=point.length, vocab_size=config.vocab_size, n_layer=config.num_layers, n_head=config.num_heads,
            n_embd=config.hidden_size, dropout=0.0, bias=False,
        )  # fmt: skip
        self.device, self.autocast, self.accumulation = execution.device, execution.autocast, point.accumulation or 1
        model = source.GPT(shape).to(self.device)
        self.optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), self.device.type)
        self.parameters = list(model.parameters())
        self.model = torch.compile(model) if execution.compile else model
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=False)
        tokens = settings.plan(point).tokens(min(PRELOADED, self.accumulation), point.batch_size)
        self.batches = [(inputs.contiguous(), targets.contiguous()) for inputs, targets in tokens]

    def update(self) -> None:
        """Do one update."""
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

    def warm_up(self) -> None:
        """Compile and run untimed updates."""
        for _ in range(self.settings.warmup):
            self.update()

    def timed_block(self, _: str) -> float:
        """Return the mean milliseconds of some updates in a row."""
        return row_block(self.update, repeats=self.settings.repeats, device=self.device)


def measure(settings: BesideNanoGPT, *, out: Path | None = None) -> dict[str, Any]:
    """Measure every point and return the record."""
    path = settings.nanogpt / "model.py"
    if not path.exists():
        raise InputError(f"{path} does not exist; name the folder of a nanoGPT clone")
    specification: Any = importlib.util.spec_from_file_location("nanogpt_model", path)
    source = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(source)
    options: dict[str, Any] = {"out": out, "seconds": settings.seconds, "files": {"nanogpt": path}}
    with Session("nanogpt", asdict(settings), settings.execution, **options) as session:
        for point in settings.parsed_points():
            with clean_process():
                compare_point(session, settings, point, source)
    return session.record


def compare_point(session: Session, settings: BesideNanoGPT, point: Point, source: Any) -> None:
    """Compare at one point; nanoGPT is the baseline."""
    ordinary = settings.build(point, Arm("cudnn" if settings.cuda else "auto"), GraphPool())
    arms: dict[str, Any] = {name: NanoGPT(settings, point, source) for name in ("nanoGPT", "control nanoGPT")}
    arms["ordinary"] = ordinary
    for name, subject in arms.items():
        subject.warm_up()
        session.say(f"{point.name} ready: {name}")
    blocks = {
        name: (lambda: arms["nanoGPT"].timed_block("update"), lambda name=name: arms[name].timed_block("update"))
        for name in ("control nanoGPT", "ordinary")
    }
    times = alternate(session, point.name, blocks, settings.pairs)
    control = summary(times["control nanoGPT"])["ratio"] if "control nanoGPT" in times else None
    tokens = point.length * point.batch_size * (point.accumulation or 1)
    for name, pairs in times.items():
        numbers = summary(pairs)
        rates = {f"{side}_tokens_per_second": 1e3 * tokens / numbers[f"{side}_ms"] for side in ("baseline", "arm")}
        row = {"model": settings.model, "point": point.to_dict(), "variant": "update", "baseline": "nanoGPT"}
        row |= {"arm": name, "control": name != "ordinary", **numbers, **rates, "control_ratio": control}
        session.add([row | {"refused": refused(control, settings.tolerance)}])
        session.say(f"{point.name} {name}: {numbers['ratio']:.4f}x ({numbers['arm_ms']:.1f} ms)")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command."""
    run(BesideNanoGPT, measure, words, prog="nanogpt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
