"""Updates of finetuning on a task's own examples, as long as they are, in several orders of theirs.

Micro-batches are padded to their longest example; all arms take the same ones, which are on the device already. Each
order is measured by itself, and the mean of their ratios is reported.
"""

import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from benchmarks import run
from saf.bench.models import ModelPlan
from saf.bench.protocol import GRAPH, Arm, Point, Subject, Work, kernels_of
from saf.bench.speed import ModelSpeed, measure
from saf.bench.whole import LEARNING_RATE, Preloaded, UpdateSubject, update_work, way_of
from saf.errors import SafWarning
from saf.machine.cuda_graphs import GraphPool
from saf.machine.execution import Compile
from saf.tasks import TASKS, FinetuneSettings
from saf.train import TrainConfig
from saf.train.finetuning import OF_TASKS

TIMED = {"sst2": (256, 1), "boolq": (64, 1), "quality": (4, 4)}
"""Examples of a micro-batch and micro-batches of an update when the paper times finetuning."""


@dataclass(kw_only=True)
class Finetuning(ModelSpeed):
    """Time updates of finetuning on real examples, padded to the longest of each micro-batch."""

    kind: ClassVar[str] = "finetune"

    task: str
    """Task whose examples are trained on: sst2, boolq, quality; jsonl is a user's own."""
    data: str
    """File of training examples."""
    test: str
    """File of test examples: the longest of both is what patterns must reach."""
    tokenizer: str
    """Folder of the tokenizer."""
    length: int = 4_096
    """Context of the parent, which its patterns cover."""
    max_tokens: int | None = None
    """Most tokens of an example; the task's own by default."""
    batch_size: int | None = None
    """Examples of a micro-batch; those of the paper's timing by default."""
    accumulation: int | None = None
    """Micro-batches of an update; those of the paper's timing by default."""
    orders: tuple[int, ...] = (1337, 1338, 1339)
    """Seeds of the orders of examples."""
    compile: Compile = "off"
    """torch.compile; off as in finetuning, whose batches have many lengths."""
    graphs: Literal["off", "on", "both"] = "off"
    points: tuple[str, ...] = ()
    """Left out: the examples make the one point."""
    repeats: int = 4
    """Updates of a timed block, the same ones in every block of an order; its time is their mean."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the examples of a micro-batch and the micro-batches of an update."""
        usual = TIMED.get(self.task, (16, 1))
        return self.batch_size or usual[0], self.accumulation or usual[1]

    def check(self) -> list[tuple[bool, str]]:
        """Return conditions that settings must meet, each with its message."""
        graphed, own = self.graphs != "off", super(Finetuning, replace(self, points=("1x1",))).check()
        highest = max(int(inputs.max()) for batches in self.batches().values() for inputs, _ in batches)
        known = self.plan(self.cases()[0]).shape.vocab_size
        return [
            *own,
            (not self.points, "points must be left out: the task's examples make them"),
            (not graphed or self.compile == "off", "compile must be off with CUDA graphs: every length is a program"),
            (len({*self.orders}) == len(self.orders) > 0, "orders must be different seeds"),
            (highest < known, f"the examples have token ids up to {highest}, {self.model} knows {known}: take another"),
        ]

    def batches(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """Return the micro-batches of a timed block by the name of their order, inputs and targets on the CPU."""
        size, accumulation = self.sizes
        files = (self.data, self.test, self.tokenizer)
        return read_batches(
            self.task, files, self.max_tokens, self.length, size, self.repeats * accumulation, self.orders
        )

    def cases(self) -> list[Point]:
        """Return the one point: the longest micro-batch's tokens, its examples, the micro-batches of an update."""
        longest = max(inputs.shape[1] for batches in self.batches().values() for inputs, _ in batches)
        return [Point(longest, *self.sizes)]

    def plan(self, point: Point) -> ModelPlan:
        """Return the models, which take the parent's context."""
        return super().plan(replace(point, length=self.length))

    def variants(self) -> tuple[str, ...]:
        """Return the orders, each timed by itself, in each way."""
        ways = super().variants()
        return tuple(name + f" {GRAPH}" * (way == GRAPH) for way in ways for name in self.batches())

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        """Return an arm that is ready to be warmed up."""
        device = self.execution.device
        orders = {name: [(x.to(device), y.to(device)) for x, y in own] for name, own in self.batches().items()}
        how = {"accumulation": self.sizes[1], "graphs": self.graphs, "warmup": self.warmup, "repeats": self.repeats}
        return FinetuneSubject(self.plan(point).build(arm), self.execution, orders=orders, **how)

    def work(self, point: Point, arm: Arm) -> Work:
        """Return the work of one update, with all micro-batches as long as they are on average."""
        widths = [inputs.shape[1] for batches in self.batches().values() for inputs, _ in batches]
        size, accumulation = self.sizes
        length = round(statistics.fmean(widths))
        return update_work(self.plan(point), arm, batch=size, length=length, accumulation=accumulation)


@lru_cache(maxsize=1)
def read_batches(
    task: str,
    files: tuple[str, str, str],
    max_tokens: int | None,
    length: int,
    size: int,
    count: int,
    orders: tuple[int, ...],
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Return `count` micro-batches of each order as finetuning hands them out."""
    data, test, tokenizer = files
    own = {name: value for name, value in OF_TASKS[task].items() if name in ("max_tokens", "too_long")}
    own |= {} if max_tokens is None else {"max_tokens": max_tokens}
    finetuning = FinetuneSettings(test=test, tokenizer=tokenizer, **own)
    config = TrainConfig(data=data, out="", task=task, finetuning=finetuning, batch_size=size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SafWarning)  # what is left out of accuracy matters to no time
        opened: Any = TASKS[task](config, length=length)
    found = {}
    for seed in orders:
        opened.settings = replace(config, seed=seed)
        training = opened.training(0, torch.device("cpu"))
        found[f"{task} order-{seed}"] = [training.take() for _ in range(count)]
    return found


class FinetuneSubject(UpdateSubject):
    """Updates of one model on the micro-batches of each order, the same ones in every timed block."""

    def __init__(self, *model: Any, orders: dict[str, list[tuple[Tensor, Tensor]]], **how: Any):
        super().__init__(*model, batches=next(iter(orders.values())), **how)
        self.orders = orders

    def warm_up(self) -> None:
        """Meet every length of every order, so many times."""
        for _ in range(self.warmup):
            for order in self.orders:
                for way in self.updaters:
                    self.timed_block(order + f" {GRAPH}" * (way == GRAPH))

    def timed_block(self, variant: str) -> float:
        """Return the mean milliseconds of the updates on an order's micro-batches."""
        order = variant.removesuffix(f" {GRAPH}")
        self.updaters[way_of(variant)].batches = Preloaded(self.orders[order])
        return super().timed_block(variant)

    def kernels(self) -> list[dict[str, Any]]:
        """Return the kernels of all updates of a block, those of graphs where they are timed."""
        updater = list(self.updaters.values())[-1]

        def block() -> None:
            for _ in range(self.repeats):
                updater.update(LEARNING_RATE)

        return kernels_of(block, self.device)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command."""
    run(Finetuning, measure, words, prog="finetuning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
