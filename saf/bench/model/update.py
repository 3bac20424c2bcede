"""`saf bench update`: whole optimiser updates, run by the trainer's own code."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from saf.bench.harness.arms import FREE, PRUNED, Arm, Comparison
from saf.bench.harness.kernels import kernels_of
from saf.bench.harness.measured import Group, Record, groups_of, model_of
from saf.bench.harness.runner import Subject
from saf.bench.harness.settings import Point
from saf.bench.harness.shape import ModelShape
from saf.bench.harness.synthetic import random_tokens
from saf.bench.harness.timing import GRAPH, UPDATE, parted, variant_of, wait_for, ways_of
from saf.bench.harness.work import Work, layers_work
from saf.bench.model.measuring import ModelKind
from saf.bench.model.models import ModelSettings, build_model
from saf.heads import HeadLayout
from saf.machine.cuda_graphs import GraphPool
from saf.machine.execution import Execution
from saf.machine.processes import gathered, group_place
from saf.records import paper
from saf.records.paper import Quoted
from saf.settings import documented
from saf.train.optimizer import build_optimizer
from saf.train.parallel import Alone, Parallel
from saf.train.sharing import micro_batches_of_one, parallel_of
from saf.train.updater import Updater

LEARNING_RATE = 6e-8
"""The first update's of the trainer's warm-up to 6e-4 over 10,000 updates: so small that the weights stay ordinary."""
CLIP = 1.0
"""Largest gradient norm, the trainer's default."""
PRELOADED = 4
"""Micro-batches kept on the device and used in turn."""


@documented
@dataclass(kw_only=True)
class UpdateSettings(ModelSettings):
    """Time whole optimiser updates: accumulation, backward, clipping, AdamW, gradient reset; no data are loaded."""

    kind: ClassVar[str] = "update"
    grid: Literal["contexts", "batches", "native"] = "contexts"
    """32,768 tokens a micro-batch at 4K, 8K, 16K; batches 2, 4, 8 at 4K; or the largest batches 20, 10, 5."""
    warmup: int = 2
    """Untimed updates of each arm."""
    repeats: int = 2
    """Updates in a timed block, timed as one; its time is their mean."""
    activation_checkpointing: bool = False
    """Keep only what enters each decoder layer and compute it again in the backward pass, in all arms; one more
    ordinary arm keeps everything, and shows what that costs."""
    parallel: Literal["none", "ddp", "fsdp"] = "none"
    """How the processes that torchrun started share updates, as in `saf pretrain`; one process may be a group, too. A
    block's time is the slowest one's. In one more arm each process updates an ordinary model by itself, with its share
    of the micro-batches: what that takes less is what messages cost."""
    graphs: Literal["off", "on", "both"] = "off"
    """Launch micro-batches kernel by kernel, replay their passes as CUDA graphs, or both; in all arms."""

    def __post_init__(self):
        """Check the settings of updates too."""
        super().__post_init__()
        for name in ("memory", "fresh", "precompile"):
            self._refuse(name, self.parallel != "none", "in a group of processes; leave one of them out")
        if self.graphs != "off":
            for name in ("activation_checkpointing", "memory"):
                self._refuse(name, getattr(self, name), "with CUDA graphs; leave one of them out")
            self._require("parallel", self.parallel == "none", "none with CUDA graphs")


class Preloaded:
    """Hand out micro-batches that are on the device already, in place of the loader."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]]):
        self._batches = batches
        self._taken = 0

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the next inputs and targets."""
        self._taken += 1
        return self._batches[self._taken % len(self._batches)]


def execution_of(settings: UpdateSettings) -> Execution:
    """Resolve device, precision and compilation as the trainer does."""
    return Execution.of(
        settings.device, compile=settings.compile, activation_checkpointing=settings.activation_checkpointing
    )


class UpdateSubject:
    """Run the updates of one model with its optimiser."""

    def __init__(
        self,
        settings: ModelSettings,
        model: nn.Module,
        execution: Execution,
        *,
        batches: list[tuple[Tensor, Tensor]],
        accumulation: int,
        parallel: Parallel | None = None,
        graphs: str = "off",
    ):
        self._settings = settings
        optimizer = build_optimizer(model.train())
        self.updaters = {
            way: Updater(
                model=model,
                optimizer=optimizer,
                batches=Preloaded(batches),
                execution=execution,
                accumulation=accumulation,
                clip=CLIP,
                parallel=Alone() if parallel is None else parallel,
                graphed=way == GRAPH,
            )
            for way in ways_of(graphs, execution.device)
        }
        """What makes the updates of each way that is timed, of one model with one optimiser."""
        self.updater = list(self.updaters.values())[-1]

    def warm_up(self) -> None:
        """Compile, capture graphs where they are asked for, and run untimed updates."""
        for updater in self.updaters.values():
            # The first micro-batch runs as it is: of one in an update the second update captures.
            for _ in range(max(self._settings.warmup, 2 * updater.graphed)):
                updater.update(LEARNING_RATE)

    def timed_block(self, variant: str) -> float:
        """Return the mean milliseconds of `repeats` updates in a row, the device waited for before and after.

        Of several processes it is the time of the slowest one.
        """
        self.updater = self.updaters[parted(variant)[1]]
        device, repeats = self.updater.execution.device, self._settings.repeats
        wait_for(device)
        began = time.perf_counter()
        for _ in range(repeats):
            self.updater.update(LEARNING_RATE)
        wait_for(device)
        return max(gathered(1e3 * (time.perf_counter() - began) / repeats))

    def kernels(self) -> list[dict[str, Any]]:
        """Return the kernels of one update."""
        return kernels_of(lambda: self.updater.update(LEARNING_RATE), self.updater.execution.device)


def update_work(
    shape: ModelShape, layouts: Sequence[HeadLayout], *, batch: int, length: int, accumulation: int, free: bool
) -> Work:
    """Return the work of one optimiser update: products of all matrices, attention, AdamW in float32.

    Activations between layers are not counted as traffic: how often they move is the compiler's choice.
    """
    # An entry of a matrix: a multiplication and an addition, forward and for both gradients; 12 bytes a micro-batch:
    # its 16 bits are read forward and backward and its float32 gradient is read and written; 28 bytes by AdamW, which
    # reads weight, gradient and two moments and writes all but the gradient.
    matrices = sum(map(shape.layer_entries, layouts)) + shape.vocab_size * shape.hidden_size
    products = Work(6.0 * matrices * batch * length, 12.0 * matrices)
    mixing = layers_work(layouts, batch=batch, length=length, dim=shape.head_dim, backward=True, free=free)
    return (products + mixing) * accumulation + Work(0.0, 28.0 * matrices)


class UpdateKind(ModelKind[UpdateSettings]):
    """Measure whole optimiser updates."""

    name = "update"
    title = "Updates: speed"
    memory_title: ClassVar = "Updates: peak memory"
    """The heading of records that timed nothing."""
    panel = "Optimiser update"
    gains = "update"
    subject = "updates"
    settings = UpdateSettings
    up_to_repeats = False
    micro_batches = True
    by_layer = True
    shared = True
    grids: ClassVar = {
        "contexts": ((4096, 8, 15), (8192, 4, 15), (16384, 2, 15)),
        "batches": ((4096, 2, 60), (4096, 4, 30), (4096, 8, 15)),
        "native": ((4096, 20, 6), (8192, 10, 6), (16384, 5, 6)),
    }
    grid_rates: ClassVar = {"batches": (0.1, 0.25, 0.5, 0.75)}

    def title_of(self, record: Record) -> str:
        """Return the heading for one record; one that timed nothing measured memory."""
        return self.title if record["rows"] else self.memory_title

    def variants(self, settings: UpdateSettings, device: torch.device) -> tuple[str, ...]:
        """Return what is timed of each arm: updates, in each way; raise UnsupportedError for graphs without CUDA."""
        return tuple(variant_of(UPDATE, way) for way in ways_of(settings.graphs, device))

    def check_compile(self, settings: UpdateSettings, execution: Execution) -> None:
        """Raise InputError or UnsupportedError, too, where the processes that there are cannot share updates."""
        super().check_compile(settings, execution)
        parallel_of(settings.parallel, parameters=0, execution=execution, trained_patterns=False)

    def compared(self, settings: UpdateSettings, comparisons: list[Comparison]) -> list[Comparison]:
        """Return what is compared; with activation checkpointing an ordinary model without it, in a group one apart."""
        first, more = comparisons[0].baseline, list(comparisons)
        if settings.activation_checkpointing:
            more.append(Comparison(first, replace(first, keeping=True), "keeping"))
        if settings.parallel != "none":
            more.append(Comparison(first, replace(first, apart=True), "apart"))
        return more

    def build(self, settings: UpdateSettings, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        """Return an arm ready to be warmed up in this process."""
        execution = execution_of(settings)
        if arm.keeping:
            execution = replace(execution, activation_checkpointing=False)
        parallel, (rank, processes) = None, group_place()
        if not arm.apart:
            parallel, _ = parallel_of(settings.parallel, parameters=0, execution=execution, trained_patterns=False)
        accumulation = micro_batches_of_one(point.accumulation or 1, processes, batch_size=point.batch_size)
        plan = self.plan(settings, point)
        tokens = random_tokens(
            min(PRELOADED, accumulation),
            point.batch_size,
            point.length,
            plan.config.vocab_size,
            torch.Generator().manual_seed(settings.seed + rank),
            execution.device,
        )
        model = build_model(plan, arm, device=execution.device)
        shared = {"accumulation": accumulation, "parallel": parallel, "graphs": settings.graphs}
        return UpdateSubject(settings, model, execution, batches=tokens, **shared)

    def work(self, settings: UpdateSettings, point: Point, arm: Arm) -> Work:
        """Return the work of one update of an arm, of which each process has its share."""
        plan = self.plan(settings, point)
        return update_work(
            plan.shape,
            plan.layouts(arm),
            batch=point.batch_size,
            length=point.length,
            accumulation=(point.accumulation or 1) // group_place()[1],
            free=arm.backend == FREE,
        )

    def groups(self, record: Record, *, file: str = "") -> list[Group]:
        """Return a record's rows in groups; what several processes shared stands beside what the paper's GPUs did."""
        quoted = partial(self.quoted, together=record["provenance"].get("processes", 1) > 1)
        return groups_of(record, quoted=quoted, apart=self.apart, unusual=self.unusual(record), file=file)

    def quoted(self, row: Record, *, together: bool = False) -> Quoted | None:
        """Return the paper's speedup of an update at the shape of a row; it replayed none as CUDA graphs."""
        if parted(row["variant"])[1] == GRAPH:
            return None
        point = (row["model"], row["point"]["length"], row["point"]["batch_size"])
        return paper.update_speed(point, row["rate"], pruned=row["backend"] == PRUNED, together=together)

    def quoted_memory(self, record: Record, entry: Record) -> Quoted | None:
        """Return the paper's peak memory of an update at the shape of an entry."""
        point = (model_of(record), entry["point"]["length"], entry["point"]["batch_size"])
        return paper.update_memory(point, entry["rate"], pruned=entry["backend"] == PRUNED)
