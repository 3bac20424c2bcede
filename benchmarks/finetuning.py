"""Updates of finetuning on a task's own examples, at their own lengths, in several orders.

Micro-batches are padded to their longest example; all arms take the same ones, which are on the device already. Each
order is measured by itself, and the mean of their ratios is reported.
"""

import sys
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, islice
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from benchmarks import command
from saf.bench.models import ModelPlan
from saf.bench.protocol import GRAPH, Arm, Point, Subject, kernels_of
from saf.bench.speed import ModelSpeed, measure, require
from saf.bench.subjects import LEARNING_RATE, UpdateSubject, launch_mode
from saf.errors import SafWarning
from saf.machine import Compile, GraphPool
from saf.tasks import TASKS, FinetuneSettings
from saf.train import TrainConfig
from saf.train.finetune import TASK_SETTINGS

TIMED = {"sst2": (256, 1), "boolq": (64, 1), "quality": (4, 4)}
"""Examples of a micro-batch, and micro-batches of an update, by task: those of the paper's timing."""

Batches = list[tuple[Tensor, Tensor]]


@dataclass(kw_only=True)
class Finetuning(ModelSpeed):
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
    graphs: Literal["off", "on", "both"] = "off"
    points: tuple[str, ...] = ()
    """Left out: the examples make the one point."""
    repeats: int = 4
    """Updates of a timed block, the same ones in every block of an order; its time is their mean."""

    @property
    def sizes(self) -> tuple[int, int]:
        usual = TIMED.get(self.task, (16, 1))
        return self.batch_size or usual[0], self.accumulation or usual[1]

    def check(self) -> None:
        require(not self.points, "points must be left out: the task's examples make them")
        one_program_a_length = self.graphs != "off" and self.compile != "off"
        require(not one_program_a_length, "compile must be off with CUDA graphs: every length is a program")
        require(len({*self.orders}) == len(self.orders) > 0, "orders must be different seeds")
        super().check()
        # On CUDA an id beyond the embedding ends the process with an error of the device that names no setting.
        highest = max(int(inputs.max()) for batches in self.batches.values() for inputs, _ in batches)
        known = self.plan(self.all_points()[0]).shape.vocab_size
        require(highest < known, f"the examples have token ids up to {highest}, {self.model} knows {known}")

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

    def all_points(self) -> list[Point]:
        return [Point(max(inputs.shape[1] for each in self.batches.values() for inputs, _ in each), *self.sizes)]

    def plan(self, point: Point) -> ModelPlan:
        return super().plan(replace(point, length=self.length))  # of the parent's context, not of the longest example

    def variants(self) -> tuple[str, ...]:
        modes = super().variants()
        return tuple(f"{name} {GRAPH}" if mode == GRAPH else name for mode in modes for name in self.batches)

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        device = self.execution.device
        orders = {name: [(x.to(device), y.to(device)) for x, y in own] for name, own in self.batches.items()}
        model = self.plan(point).build(arm)
        return FinetuneSubject(self, model, orders)


class FinetuneSubject(UpdateSubject):
    """Updates of one model on the micro-batches of each order, the same ones in every timed block."""

    def __init__(self, settings: Finetuning, model: Any, orders: dict[str, Batches]):
        first = next(iter(orders.values()))
        super().__init__(settings, model, batches=first, accumulation=settings.sizes[1])
        self.orders = orders

    def warm_up(self) -> None:
        # Whole blocks, because every length of a batch has kernels to choose, and a graph to capture, of its own.
        for _ in range(self.settings.warmup):
            for variant in self.settings.variants():
                self.timed_block(variant)

    def timed_block(self, variant: str) -> float:
        # From the first batch on: each block has the same batches, in both arms.
        self.updaters[launch_mode(variant)].batches = cycle(self.orders[variant.removesuffix(f" {GRAPH}")])
        return super().timed_block(variant)

    def kernels(self) -> list[dict[str, Any]]:
        # A whole block, as its updates have batches of different lengths; tables divide by `repeats`.
        updater = list(self.updaters.values())[-1]
        block = [updater] * self.settings.repeats
        return kernels_of(lambda: [each.update(LEARNING_RATE) for each in block], self.device)


main = command(Finetuning, measure, prog="finetuning")

if __name__ == "__main__":
    sys.exit(main())
