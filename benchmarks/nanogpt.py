"""The ordinary arm's update against nanoGPT's, on one device in one process, in alternating pairs.

    python -m benchmarks.nanogpt --nanogpt path/to/nanoGPT --out results/bench/nanogpt.json

`--nanogpt` is a clone of nanoGPT (github.com/karpathy/nanoGPT); its `model.py` is used as it is and its update repeats
the lines of its `train.py`: compiled model, bfloat16 autocast, fused AdamW, gradient scaler switched off, clipping at
1, gradients set to None, the loss never read. Both models have learned positions, 12 layers of 12 heads of 64 channels
and 50,304 tokens; both take micro-batches that are on the device already. A second nanoGPT is the control.
"""

import importlib.util
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks import command
from saf.bench.models import PRELOADED, model_cases, plan_of, update_arm, update_variant
from saf.bench.protocol import Arm, Case, Point, Ready, Speed, WarmUp, mean_block, measure, require
from saf.bench.record import Session, kernels_of
from saf.machine import GraphPool
from saf.models import preset
from saf.records.files import file_hash
from saf.train.step import Parallel

NANOGPT = Arm("nanoGPT")  # arms are told apart by the name of their kernel, and nothing pins this one


@dataclass(kw_only=True)
class AgainstNanoGPT(Speed):
    """Compare updates of the ordinary arm with nanoGPT's own: a ratio above 1 says that this project's are faster."""

    kind: ClassVar[str] = "nanogpt"
    micro_batches: ClassVar[int | None] = 15

    nanogpt: Path
    """Folder with nanoGPT's model.py."""
    model: str = "124m-learned"
    points: tuple[str, ...] = ("1024x32x4", "4096x8x4")
    warmup: int = 2
    repeats: int = 2
    """Updates in a timed block, timed as one; its time is their mean."""

    def cases(self, session: Session) -> list[Case]:
        require(self.graphs == "off" or not self.memory, "memory must be left out with CUDA graphs")
        require(self.source.exists(), f"{self.source} does not exist; name the folder of a nanoGPT clone")
        control, ordinary = Arm(NANOGPT.kernel, control=True), Arm("cudnn" if self.cuda else "auto")
        pairs = [(NANOGPT, control), (NANOGPT, ordinary)]
        cases = model_cases(self, self.parsed_points(), self.build)
        return [replace(case, comparisons=pairs) for case in cases]

    @property
    def source(self) -> Path:
        return self.nanogpt / "model.py"

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> WarmUp:
        if arm.kernel == NANOGPT.kernel:
            return NanoGPT(self, point).warm_up
        return update_arm(self, point, arm, execution=self.execution, parallel=Parallel())


class NanoGPT:
    """nanoGPT's model and the update of its training script."""

    def __init__(self, settings: AgainstNanoGPT, point: Point):
        execution, self.settings = settings.execution, settings
        specification: Any = importlib.util.spec_from_file_location("nanogpt_model", settings.source)
        source = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(source)
        config = preset(settings.model, max_length=point.length)
        torch.manual_seed(settings.seed)  # its model draws from PyTorch's global generator
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # as its train.py does
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
        tokens = plan_of(settings, point.length).tokens(min(PRELOADED, self.accumulation), point.batch_size)
        self.batches = [(inputs.contiguous(), targets.contiguous()) for inputs, targets in tokens]

    def update(self) -> None:
        # Line by line as in its train.py, the scaler that is switched off included.
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

    def warm_up(self) -> Ready:
        for _ in range(self.settings.warmup):
            self.update()
        block = partial(mean_block, self.update, repeats=self.settings.repeats, device=self.device)
        facts = {"source_sha256": file_hash(self.settings.source)}
        # Its script calls every update: where ours are replayed, the baseline is the same.
        blocks = {update_variant(mode): block for mode in self.settings.launch_modes()}
        return Ready(blocks, partial(kernels_of, self.update, self.device), facts)


main = command(AgainstNanoGPT, measure, prog="nanogpt")

if __name__ == "__main__":
    sys.exit(main())
