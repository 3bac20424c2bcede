"""Updates of finetuning on a task's own examples, at their own lengths, in several orders.

Micro-batches are padded to their longest example; all arms take the same ones, which are on the device already. Each
order is measured by itself, and the mean of their ratios is reported.
"""

import sys
import warnings
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import cycle, islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks import command
from saf.bench.models import CLIP, LEARNING_RATE, model_cases, plan_of, time_updates
from saf.bench.protocol import Arm, Block, Case, Point, Ready, Speed, WarmUp, measure, require
from saf.bench.record import Session, kernels_of
from saf.errors import SafWarning
from saf.machine import Compile, GraphPool
from saf.tasks import TASKS, FinetuneSettings
from saf.train import TrainConfig
from saf.train.finetune import TASK_SETTINGS
from saf.train.step import Updater, build_optimizer

TIMED = {"sst2": (256, 1), "boolq": (64, 1), "quality": (4, 4)}
"""Examples of a micro-batch, and micro-batches of an update, by task: those of the paper's timing."""

Batches = list[tuple[Tensor, Tensor]]


@dataclass(kw_only=True)
class Finetuning(Speed):
    """Time updates of finetuning on real examples, padded to the longest of each micro-batch."""

    kind: ClassVar[str] = "finetune"

    task: str
    """Task to train on: sst2, boolq, quality; jsonl is a user's own."""
    data: str
    """File of training examples."""
    test: str
    """File of test examples: patterns must reach the longest of both."""
    tokenizer: str
    """Folder of the tokenizer."""
    length: int = 4_096
    """Context of the parent, which its patterns cover."""
    max_tokens: int | None = None
    """Most tokens of an example; by default the task's own."""
    batch_size: int | None = None
    """Examples of a micro-batch; by default those of the paper's timing."""
    accumulation: int | None = None
    """Micro-batches of an update; by default those of the paper's timing."""
    orders: tuple[int, ...] = (1337, 1338, 1339)
    """Seeds of the orders of examples."""
    compile: Compile = "off"
    """Compile with torch.compile; off as in finetuning, whose batches have many lengths."""
    points: tuple[str, ...] = ()
    """Left out: the examples make the one point."""
    repeats: int = 4
    """Updates of a timed block, the same ones in every block of an order; its time is their mean."""

    @property
    def sizes(self) -> tuple[int, int]:
        usual = TIMED.get(self.task, (16, 1))
        return self.batch_size or usual[0], self.accumulation or usual[1]

    def cases(self, session: Session) -> list[Case]:
        require(not self.points, "points must be left out: the task's examples make them")
        one_program_a_length = self.graphs != "off" and self.compile != "off"
        require(not one_program_a_length, "compile must be off with CUDA graphs: every length is a program")
        require(len({*self.orders}) == len(self.orders) > 0, "orders must be different seeds")
        examples = [inputs for batches in self.batches.values() for inputs, _ in batches]
        # On CUDA an id beyond the embedding ends the process with an error of the device that names no setting.
        highest, known = max(int(inputs.max()) for inputs in examples), plan_of(self, self.length).shape.vocab_size
        require(highest < known, f"the examples have token ids up to {highest}, {self.model} knows {known}")
        point = Point(max(inputs.shape[1] for inputs in examples), *self.sizes)
        # Models of the parent's context, not of the longest example.
        return model_cases(self, [point], self.build, length=self.length)

    @cached_property
    def batches(self) -> dict[str, Batches]:
        """The micro-batches of a timed block by the name of their order, as finetuning hands them out, on the CPU."""
        size, accumulation = self.sizes
        own = {name: value for name, value in TASK_SETTINGS[self.task].items() if name in ("max_tokens", "too_long")}
        if self.max_tokens is not None:
            own["max_tokens"] = self.max_tokens
        finetuning = FinetuneSettings(test=self.test, tokenizer=self.tokenizer, **own)
        config = TrainConfig(data=self.data, out="", task=self.task, finetuning=finetuning, batch_size=size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SafWarning)  # of skipped test examples, which no time depends on
            task: Any = TASKS[self.task](config, length=self.length)
        batches = {}
        # The seed decides the order alone, so the examples are read and encoded once.
        for seed in self.orders:
            task.settings = replace(config, seed=seed)
            training = task.training(0, torch.device("cpu"))
            batches[f"{self.task} order-{seed}"] = list(islice(training, self.repeats * accumulation))
        return batches

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> WarmUp:
        device, (_, accumulation) = self.execution.device, self.sizes
        orders = {name: [(x.to(device), y.to(device)) for x, y in own] for name, own in self.batches.items()}
        model, first = plan_of(self, self.length).build(arm), next(iter(orders.values()))
        optimizer = build_optimizer(model.train())
        updaters = {
            mode: Updater(
                model=model, optimizer=optimizer, batches=cycle(first), execution=self.execution,
                accumulation=accumulation, clip=CLIP, graphed=mode == "graph",
            )
            for mode in self.launch_modes()
        }  # fmt: skip
        return partial(warm_up, self, updaters, orders)


def warm_up(settings: Finetuning, updaters: dict[str, Updater], orders: dict[str, Batches]) -> Ready:
    """Make the updates of each order, the same ones in every timed block."""

    def time_order(updater: Updater, batches: Batches) -> float:
        # From the first batch on: each block has the same batches, in both arms.
        updater.batches = cycle(batches)
        return time_updates(updater, settings.repeats)

    blocks: dict[str, Block] = {}
    for mode, updater in updaters.items():
        for name, batches in orders.items():
            blocks[name if mode == "call" else f"{name} {mode}"] = partial(time_order, updater, batches)
    # Whole blocks, because every length of a batch has kernels to choose, and a graph to capture, of its own.
    for _ in range(settings.warmup):
        for block in blocks.values():
            block()

    def several_updates() -> None:
        # A whole block, as its updates have batches of different lengths; tables divide by `repeats`.
        for _ in range(settings.repeats):
            last.update(LEARNING_RATE)

    *_, last = updaters.values()
    return Ready(blocks, partial(kernels_of, several_updates, settings.execution.device), {})


main = command(Finetuning, measure, prog="finetuning")

if __name__ == "__main__":
    sys.exit(main())
