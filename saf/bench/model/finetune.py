"""`saf bench finetune`: updates on a task's own examples, as long as they are, in several orders of theirs."""

import math
import statistics
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from saf.bench.harness.arms import FREE, PRUNED, Arm
from saf.bench.harness.kernels import kernels_of
from saf.bench.harness.kind import USUAL_RATES
from saf.bench.harness.measured import Group, Record, edited_name
from saf.bench.harness.runner import Subject
from saf.bench.harness.settings import Point
from saf.bench.harness.timing import CALL, GRAPH, parted, variant_of, ways_of
from saf.bench.harness.work import Work
from saf.bench.model.measuring import ModelKind
from saf.bench.model.models import ModelPlan, ModelSettings, build_model
from saf.bench.model.update import LEARNING_RATE, Preloaded, UpdateSubject, update_work
from saf.errors import InputError, SafWarning
from saf.machine.cuda_graphs import GraphPool
from saf.machine.execution import Compile, Execution
from saf.records import paper
from saf.records.paper import Quoted
from saf.records.quantities import MISSING, number
from saf.records.table import Cell, Part, Table
from saf.settings import OneOf, documented
from saf.tasks import TASKS, FinetuneSettings
from saf.tasks.examples import FORMS
from saf.train import TrainConfig
from saf.train.finetuning import OF_TASKS

TIMED = {"sst2": (256, 1), "boolq": (64, 1), "quality": (4, 4)}
"""Examples of a micro-batch and micro-batches of an update when the paper times finetuning."""


@documented
@dataclass(kw_only=True)
class FinetuneUpdateSettings(ModelSettings):
    """Time updates of finetuning on real examples, padded to the longest of each micro-batch.

    All arms take the same micro-batches, which are on the device already.
    """

    kind: ClassVar[str] = "finetune"
    task: Annotated[str, OneOf(FORMS)]
    """Task whose examples are trained on; jsonl is a user's own."""
    data: str
    """File of training examples."""
    test: str
    """File of test examples: the longest of both is what patterns must reach."""
    tokenizer: str
    """Folder of the tokenizer."""
    length: int = 4_096
    """Context of the parent, which its patterns cover."""
    max_tokens: int | None = None
    """Most tokens of an example; the task's own when None."""
    batch_size: int | None = None
    """Examples of a micro-batch; those of the paper's timing when None."""
    accumulation: int | None = None
    """Micro-batches of an update; those of the paper's timing when None."""
    orders: tuple[int, ...] = (1337, 1338, 1339)
    """Seeds of the orders of examples; each is measured by itself, and their ratios are averaged."""
    compile: Compile = "off"
    """torch.compile; off as in finetuning, whose batches have many lengths."""
    graphs: Literal["off", "on", "both"] = "off"
    """Launch updates kernel by kernel, replay forward and backward passes as CUDA graphs, or both; in all arms."""
    repeats: int = 4
    """Updates of a timed block, the same ones in every block of an order; its time is their mean."""

    def __post_init__(self):
        """Check the settings of a task too."""
        super().__post_init__()
        self._require("points", not self.points, "left out: the task's examples make them")
        called = self.graphs == "off" or self.compile == "off"
        self._require("compile", called, "off with CUDA graphs, where every length of examples would be a program")
        self._require("orders", bool(self.orders) and len({*self.orders}) == len(self.orders), "different seeds")
        for name in ("length", "max_tokens", "batch_size", "accumulation"):
            self._require(name, getattr(self, name) is None or getattr(self, name) >= 1, "at least 1")

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the examples of a micro-batch and the micro-batches of an update."""
        usual = TIMED.get(self.task, (16, 1))
        return self.batch_size or usual[0], self.accumulation or usual[1]

    def micro_batches(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """Return the micro-batches of a timed block by the name of their order, inputs and targets on the CPU."""
        size, accumulation = self.sizes
        files = (self.data, self.test, self.tokenizer)
        given = (self.task, files, self.max_tokens, self.length, size, self.repeats * accumulation, self.orders)
        return _micro_batches(*given)


@lru_cache(maxsize=1)
def _micro_batches(
    task: str,
    files: tuple[str, str, str],
    max_tokens: int | None,
    length: int,
    size: int,
    count: int,
    orders: tuple[int, ...],
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Return `count` micro-batches of each order as finetuning hands them out; kept, since every arm asks for them."""
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
        taken = opened.training(0, torch.device("cpu"))
        found[f"{task} order-{seed}"] = [taken.take() for _ in range(count)]
    return found


class FinetuneSubject(UpdateSubject):
    """Run updates of one model on the micro-batches of each order, the same ones in every timed block."""

    def __init__(
        self,
        settings: FinetuneUpdateSettings,
        model: nn.Module,
        execution: Execution,
        *,
        orders: dict[str, list[tuple[Tensor, Tensor]]],
        accumulation: int,
        graphs: str = "off",
    ):
        first = next(iter(orders.values()))
        super().__init__(settings, model, execution, batches=first, accumulation=accumulation, graphs=graphs)
        self.orders = orders

    def warm_up(self) -> None:
        """Meet every length of every order, so many times."""
        for _ in range(self._settings.warmup):
            for order in self.orders:
                for way in self.updaters:
                    self.timed_block(variant_of(order, way))

    def timed_block(self, variant: str) -> float:
        """Return the mean milliseconds of the updates on an order's micro-batches."""
        order, way = parted(variant)
        self.updaters[way].batches = Preloaded(self.orders[order])
        return super().timed_block(variant)

    def kernels(self) -> list[dict[str, Any]]:
        """Return the kernels of all updates of a block, those of graphs where they are timed."""
        self.updater = self.updaters.get(GRAPH, self.updater)

        def block() -> None:
            for _ in range(self._settings.repeats):
                self.updater.update(LEARNING_RATE)

        return kernels_of(block, self.updater.execution.device)


class FinetuneKind(ModelKind[FinetuneUpdateSettings]):
    """Measure updates of finetuning."""

    name = "finetune"
    title = "Finetuning updates: speed"
    panel = "Finetuning update"
    gains = "finetuning update"
    subject = "finetuning updates"
    settings = FinetuneUpdateSettings
    up_to_repeats = False
    micro_batches = True
    grids: ClassVar = {}

    def points(self, settings: FinetuneUpdateSettings) -> list[Point]:
        """Return the one point: the longest micro-batch's tokens, its examples, and the micro-batches of an update.

        Raises InputError for examples with tokens that the model does not have.
        """
        given = [inputs for taken in settings.micro_batches().values() for inputs, _ in taken]
        point = Point(max(inputs.shape[1] for inputs in given), *settings.sizes)
        highest, known = max(int(inputs.max()) for inputs in given), self.plan(settings, point).config.vocab_size
        if highest >= known:
            raise InputError(
                f"the examples have token ids up to {highest}, the model {settings.model} knows {known}; take a model "
                "or a tokenizer of the other's vocabulary"
            )
        return [point]

    def rates(self, settings: FinetuneUpdateSettings) -> tuple[float, ...]:
        """Return the rates asked for, without 0, which is the control."""
        return tuple(rate for rate in dict.fromkeys(settings.rates or USUAL_RATES) if rate > 0)

    def plan(self, settings: FinetuneUpdateSettings, point: Point) -> ModelPlan:
        """Return the models, which take the parent's context."""
        return ModelPlan.of(settings, settings.length)

    def variants(self, settings: FinetuneUpdateSettings, device: torch.device) -> tuple[str, ...]:
        """Return the orders, each timed by itself, in each way; raise UnsupportedError for graphs without CUDA."""
        ways = ways_of(settings.graphs, device)
        return tuple(variant_of(order, way) for way in ways for order in settings.micro_batches())

    def build(self, settings: FinetuneUpdateSettings, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        """Return an arm ready to be warmed up in this process."""
        execution = Execution.of(settings.device, compile=settings.compile)
        orders = {
            name: [(inputs.to(execution.device), targets.to(execution.device)) for inputs, targets in taken]
            for name, taken in settings.micro_batches().items()
        }
        model = build_model(self.plan(settings, point), arm, device=execution.device)
        return FinetuneSubject(
            settings, model, execution, orders=orders, accumulation=settings.sizes[1], graphs=settings.graphs
        )

    def work(self, settings: FinetuneUpdateSettings, point: Point, arm: Arm) -> Work:
        """Return the work of one update of an arm, with all micro-batches as long as they are on average."""
        plan, (size, accumulation) = self.plan(settings, point), settings.sizes
        widths = [inputs.shape[1] for taken in settings.micro_batches().values() for inputs, _ in taken]
        return update_work(
            plan.shape,
            plan.layouts(arm),
            batch=size,
            length=round(statistics.fmean(widths)),
            accumulation=accumulation,
            free=arm.backend == FREE,
        )

    def quoted(self, row: Record) -> Quoted | None:
        """Return the paper's speedup of an update of finetuning."""
        if row["model"] != "124m" or row["backend"] == PRUNED:
            return None
        return paper.finetuning(row["variant"].split()[0], row["rate"])

    def quoted_memory(self, record: Record, entry: Record) -> Quoted | None:
        """Return the change of peak memory that the paper measured."""
        settings = record["settings"]
        if settings["model"] != "124m" or entry["backend"] in (None, FREE, PRUNED):
            return None
        return paper.finetuning(settings["task"], entry["rate"], memory=True)

    def tables(self, record: Record, *, brief: bool = False) -> list[Part]:
        """Return what is said of any arms, the means over the orders first."""
        groups = self.groups(record)
        means = [orders_table(record, own) for own in _by_way(groups)]
        return [*(each for each in means if each.rows), *super().tables(record, brief=brief)]

    def speeds(self, records: Sequence[tuple[Cell, Record]], groups: Sequence[Group]) -> list[Part]:
        """Return the means over the orders of each record, whose rows of single orders are in its file."""
        return [
            means.titled(f"{own[0].subject}, {record['settings']['task']}: mean over the orders{_told(own)}")
            for cell, record in records
            for own in _by_way([group for group in groups if group.file == cell.text])
            if (means := orders_table(record, own)).rows
        ]

    def main_groups(self, record: Record) -> list[Group]:
        """Return one group of each task and point, whose arms have the mean ratio of the orders that were accepted."""
        by_task: dict[Hashable, list[Group]] = {}
        for group in self.groups(record):
            way = parted(group.variant)[1]
            key = group.variant.split()[0], way, *group.point.values(), group.baseline
            by_task.setdefault(key, []).append(group)
        return [_mean_group(groups) for groups in by_task.values()]


def _mean_group(groups: Sequence[Group]) -> Group:
    """Return the group of several orders of one task, those that were accepted; refused where none was."""
    taken = [group for group in groups if group.reason is None] or list(groups)
    arms = []
    for arm in taken[0].arms:
        rows = [each.row for group in taken for each in group.arms if each.row["arm"] == arm.row["arm"]]
        means = {name: statistics.fmean(row[name] for row in rows) for name in ("ratio", "baseline_ms", "arm_ms")}
        arms.append(replace(arm, row={**arm.row, **means}, free=None))
    variant = f"{taken[0].variant.split()[0]} mean-of-{len(taken)}-orders"
    way = parted(taken[0].variant)[1]
    return replace(taken[0], variant=variant_of(variant, way), arms=tuple(arms))


def _by_way(groups: Sequence[Group]) -> list[list[Group]]:
    """Return groups by the way that was timed, updates that were called first; no list is empty."""
    parts = [[group for group in groups if parted(group.variant)[1] == way] for way in (CALL, GRAPH)]
    return [part for part in parts if part]


def _told(groups: Sequence[Group]) -> str:
    """Return what a title adds for groups of one way."""
    return ", passes replayed as CUDA graphs" if parted(groups[0].variant)[1] == GRAPH else ""


def orders_table(record: Record, groups: Sequence[Group]) -> Table:
    """Return the mean over orders of each arm's ratio, its standard error, and what its kernels take of an update.

    Groups are of one way. Orders whose control refuses them are left out, so that no row may be left. Where kernels
    take less than the update, the host bounds it; where both ways were timed, kernels are told beside graphs.
    """
    found: dict[str, list[Record]] = {}
    quoted: dict[str, Quoted | None] = {}
    for group in groups:
        for arm in group.arms:
            quoted[arm.row["arm"]] = arm.paper
            for row in (arm.row, arm.free):
                if row is not None and row["backend"] and not row["refused"] and row not in found.get(row["arm"], []):
                    found.setdefault(row["arm"], []).append(row)
    told = record["provenance"]["driver"] and (record["settings"].get("graphs") != "both" or bool(_told(groups)))
    kernels = {entry["arm"]: entry["kernels"] for entry in record["kernels"]} if told else {}
    repeats = record["settings"]["repeats"]
    rows = []
    for arm, measured in found.items():
        ratios = [row["ratio"] for row in measured]
        error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else None
        times = [statistics.fmean(row[side] for row in measured) for side in ("baseline_ms", "arm_ms")]
        own = [kernels.get(name) for name in (measured[0]["baseline"], arm)]
        said = quoted.get(arm)
        rows.append(
            [
                edited_name(measured[0]),
                f"{statistics.fmean(ratios):.3f}×" + ("" if error is None else f" ± {error:.3f}"),
                len(ratios),
                *(number(time) for time in times),
                " / ".join(f"{sum(one['calls'] for one in each) / repeats:,.0f}" for each in own if each) or MISSING,
                " / ".join(f"{sum(one['ms'] for one in each) / repeats:.1f}" for each in own if each) or MISSING,
                MISSING if said is None else said.text,
            ]
        )
    head = ["arm", "speedup, mean ± SE", "orders", "ordinary, ms", "arm, ms"]
    head += ["kernels an update", "ms on the device", "paper"]
    return Table.of(f"Mean over the orders of the examples{_told(groups)}", head, rows).used()
