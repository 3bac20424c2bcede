"""What every speed benchmark takes, and how one is run: settings, their checks, the arms of a point, `measure`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from saf.bench.models import (
    ModelPlan,
    Placement,
    free_backend,
    is_folder,
)
from saf.bench.processes import FreshSubject, compile_in_advance, measure_memory
from saf.bench.protocol import (
    FLEX,
    FREE,
    OUT_OF_TIME,
    PRUNED,
    Arm,
    Case,
    Comparison,
    Point,
    Session,
    Subject,
    Work,
    clean_process,
    compare,
    plan,
    say_on_stderr,
    ways_of,
)
from saf.errors import InputError
from saf.machine.cuda_graphs import GraphPool
from saf.machine.execution import Compile, Device, Execution
from saf.machine.processes import agreed, group_place
from saf.ops import BACKENDS
from saf.ops.live import KERNELS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BEGIN_SHARE = 0.5
"""A point begins when this share of the longest before it is left; it then ends with fewer pairs."""


@dataclass(kw_only=True)
class Speed:
    """What every speed benchmark takes."""

    kind: ClassVar[str]
    micro_batches: ClassVar[int | None] = None
    """Of a point that does not say; None where a point has none."""
    more_kernels: ClassVar[tuple[str, ...]] = ()

    model: str = "124m"
    """Preset with random weights, or a folder with its own frozen heads: a checkpoint, a run, what saf.save or
    save_pretrained wrote."""
    points: tuple[str, ...] = ("4096x8",)
    """Shapes, as context x sequences (x micro-batches of an update): 4096x8 or 4096x8x15."""
    rates: tuple[float, ...] = ()
    """Shares of heads to freeze; 0.25 and 0.5 by default, the folder's own heads of a folder."""
    backends: tuple[str, ...] = ()
    """Backends of frozen heads; by default toeplitz and, on CUDA, fused, the paper's execution; the folder's own."""
    kernels: tuple[str, ...] = ()
    """Attention kernels of live heads, on both sides of a ratio; by default cudnn on CUDA, auto on a CPU."""
    others: tuple[str, ...] | None = None
    """More kernels of ordinary attention to compare with the first: auto, cudnn, flash, efficient, math, flex. By
    default auto, flash and flex on CUDA, none on a CPU; --others alone is none."""
    free: bool = True
    """Also measure the free bound: frozen heads whose mixing costs nothing."""
    pairs: int = 8
    """Alternating pairs of each arm with its baseline; 0, beside --memory, times nothing."""
    repeats: int = 1
    """Timed calls in a timed block; the block's time is their median."""
    warmup: int = 3
    """Untimed calls of each arm."""
    tolerance: float = 0.01
    """How far from 1 the ratio of two ordinary models may be before a comparison is refused."""
    seed: int = 0
    """Random seed for weights, inputs, patterns and the choice of heads."""
    device: Device = "auto"
    """CUDA if there is one."""
    compile: Compile = "auto"
    """torch.compile: on for CUDA, off for a CPU; layers compiles decoder layers by themselves, for updates."""
    profile: bool = True
    """Record the kernels that one pass of each arm runs."""
    seconds: float | None = None
    """Stop cleanly where another measurement would not end within this, and record what was left out."""

    @property
    def execution(self) -> Execution:
        """Return the resolved device, precision and compilation."""
        return Execution.of(self.device, compile=self.compile)

    def check(self) -> list[tuple[bool, str]]:
        """Return conditions that settings must meet, each with the message where one does not."""
        kernels, known = (*self.kernels, *(self.others or ())), ("auto", FLEX, *KERNELS, *self.more_kernels)
        strange = next((name for name in kernels if name not in known), None)
        unknown = next((name for name in self.backends if name not in BACKENDS), None)
        execution = self.execution
        uncompiled = FLEX in kernels and execution.device.type == "cuda" and not execution.compile
        return [
            (min(self.pairs, self.warmup, self.seed) >= 0, "pairs, warmup and seed must be at least 0"),
            (self.repeats >= 1, f"repeats must be at least 1; got {self.repeats}"),
            (self.tolerance > 0, f"tolerance must be above 0; got {self.tolerance}"),
            (self.seconds is None or self.seconds > 0, f"seconds must be above 0; got {self.seconds}"),
            (all(0 <= rate <= 1 for rate in self.rates), f"rates must be shares in [0, 1]; got {self.rates}"),
            (strange is None, f"attention kernel must be one of {', '.join(known)}; got {strange!r}"),
            (unknown is None, f"backend must be one of {', '.join(BACKENDS)}; got {unknown!r}"),
            (not uncompiled, "flex attention is a kernel only where it is compiled; use --compile on, or leave it out"),
            (not (is_folder(self.model) and self.rates), "rates must be left out of a folder, which has its own heads"),
            (group_place()[1] == 1 or self.kind == "update", f"{self.kind} must be measured by one process"),
        ]

    def parsed_points(self) -> list[Point]:
        """Return the points; InputError for one that is not numbers joined by x."""
        most, found = 2 if self.micro_batches is None else 3, []
        for text in self.points:
            numbers = [int(part) if part.isdigit() else 0 for part in text.lower().split("x")]
            if not 2 <= len(numbers) <= most or min(numbers) < 1:
                form = (
                    "4096x8x15 (context x sequences x micro-batches)" if most == 3 else "4096x8 (context x sequences)"
                )
                raise InputError(f"a point of {self.kind} must be written {form}; got {text!r}")
            accumulation = self.micro_batches if len(numbers) == 2 else numbers[2]
            found.append(Point(numbers[0], numbers[1], accumulation))
        return found

    def comparisons(self, rates: Sequence[float], *, own: str | None = None, more: bool = True) -> list[Comparison]:
        """Return the comparisons of a point at some rates; `own` is the backend of a folder's heads.

        Unless `more`, neither other kernels nor the free bound are among them.
        """
        cuda, compiled = self.execution.device.type == "cuda", self.execution.compile
        usual = (own,) if own else ("toeplitz", "fused") if cuda else ("toeplitz",)
        others = self.others
        if others is None:
            others = ("auto", "flash", *([FLEX] if compiled else [])) if cuda else ()
        return plan(
            kernels=self.kernels or (("cudnn",) if cuda else ("auto",)),
            others=others if more else (),
            backends=self.backends or usual,
            rates=[rate for rate in dict.fromkeys(rates) if rate > 0],
            free=self.free and more,
        )

    def run(self, session: Session) -> None:
        """Measure everything that there is time for."""
        raise NotImplementedError


def measure(settings: Speed, *, out: Path | None = None, say: Callable[[str], None] = say_on_stderr) -> dict[str, Any]:
    """Run a benchmark and return its record, written to `out` after every point.

    Raises:
        InputError: Settings that name something unknown or have no effect here, or `out` exists.
        UnsupportedError: A device that is not there.
    """
    with agreed():
        settings.parsed_points()
        for holds, message in settings.check():
            if not holds:
                raise InputError(message)
        values = {field.name: getattr(settings, field.name) for field in fields(settings)}
        session = Session(settings.kind, values, settings.execution, out=out, seconds=settings.seconds, say=say)
    with session, free_backend():
        settings.run(session)
    return session.record


# Whole models


@dataclass(kw_only=True)
class ModelSpeed(Speed):
    """What benchmarks of whole models take."""

    graphed: ClassVar[tuple[str, ...]] = ()
    transformers_only: ClassVar[str | None] = None
    """Why this project's decoder cannot be measured; None where it can."""

    num_layers: int | None = None
    """Layers, instead of the preset's: compiling all of a large model takes minutes."""
    placement: Placement = "early"
    """Which layers have frozen heads: mostly early ones, as measured on trained models, or all alike; groups are whole
    groups of heads that share keys, in early layers."""
    per_layer: tuple[int, ...] = ()
    """Frozen heads of each layer, instead of --rates and --placement."""
    pruned: bool = False
    """Also measure each rate with the same heads pruned: their values and output columns are gone too."""
    graphs: Literal["off", "on", "both"] = "off"
    """Launch kernel by kernel, replay CUDA graphs, or both; in all arms."""
    fresh: bool = False
    """Take every timed block in a process of its own."""
    memory: bool = False
    """Also measure peak memory, one arm a process."""
    precompile: bool = False
    """First compile all arms in processes of their own, for the compiler's cache on disk."""
    workers: int = 1
    """Processes of --memory and --precompile at a time."""

    def check(self) -> list[tuple[bool, str]]:
        """Return conditions that settings must meet, each with its message."""
        folder, timed = is_folder(self.model), self.pairs > 0
        plans = [self.plan(point) for point in self.cases()]
        for each in plans:
            each.heads(Arm("auto", FREE, each.own_rate or 0.5))  # raises where a layer has fewer
        self.variants()
        idle = self.fresh or self.precompile
        compiles = self.execution.compile
        return [
            *super().check(),
            (self.num_layers is None or self.num_layers >= 1, "num_layers must be at least 1"),
            (self.workers >= 1, f"workers must be at least 1; got {self.workers}"),
            (not (self.per_layer and self.rates), "per_layer must be left out where rates are given"),
            (not self.per_layer or (min(self.per_layer) >= 0 < sum(self.per_layer)), "per_layer must freeze some head"),
            (not folder or not (self.per_layer or self.num_layers), "a folder has its own heads and layers"),
            (timed or self.memory, "pairs must be at least 1 unless memory is measured"),
            (timed or not idle, "fresh and precompile have no effect with pairs=0, which times nothing"),
            (not (self.precompile and self.fresh), "precompile has no effect with fresh, where every process compiles"),
            (compiles or not self.precompile, "precompile has no effect where models are not compiled"),
            (self.workers == 1 or self.memory or self.precompile, "workers has no effect without memory or precompile"),
            (
                self.transformers_only is None or not any(each.own_decoder for each in plans),
                f"{self.model} {self.transformers_only}",
            ),
            (
                not self.execution.by_layer or self.kind == "update",
                "compile='layers' is for updates; use 'on' or 'off'",
            ),
        ]

    def plan(self, point: Point) -> ModelPlan:
        """Return the models of a point."""
        return ModelPlan(
            model=self.model,
            length=point.length,
            device=self.execution.device,
            seed=self.seed,
            num_layers=self.num_layers,
            placement=self.placement,
            counts=self.per_layer,
        )

    def cases(self) -> list[Point]:
        """Return the points with everything that varies filled in."""
        return self.parsed_points()

    def variants(self) -> tuple[str, ...]:
        """Return what is timed of each arm; UnsupportedError for graphs without CUDA."""
        return ways_of(self.graphs, self.execution.device)

    def arms(self, point: Point) -> list[Comparison]:
        """Return the comparisons of a point."""
        plan = self.plan(point)
        if plan.folder and not plan.folder.frozen:
            rate = plan.own_rate or 0.0
            return [
                each._replace(arm=replace(each.arm, backend=PRUNED), role="pruned") if each.role == "free" else each
                for each in replace(self, free=True, backends=()).comparisons([rate], own=PRUNED)
                if each.role != "frozen"
            ]
        rates = self.rates or (0.25, 0.5) if plan.own_rate is None else [plan.own_rate]
        found = self.comparisons(rates, own=plan.folder and plan.folder.backend)
        free = {each.arm: each for each in found if each.role in ("free", "frozen")}
        pruned = dict.fromkeys((each.baseline, replace(arm, backend=PRUNED)) for arm, each in free.items())
        return found + [Comparison(*pair, "pruned") for pair in pruned] * self.pruned

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        """Return an arm that is ready to be warmed up in this process."""
        raise NotImplementedError

    def work(self, point: Point, arm: Arm) -> Work:
        """Return the work of one timed call."""
        raise NotImplementedError

    def describe(self, point: Point, arm: Arm) -> Mapping[str, Any]:
        """Return what a row says of an arm."""
        return self.plan(point).describe(arm)

    def run(self, session: Session) -> None:
        """Measure the memory, then the speed, of every arm at every point that there is time for."""
        longest = 0.0
        for point in self.cases():
            if not session.fits(BEGIN_SHARE * longest):
                session.leave_out(point.name, OUT_OF_TIME)
                continue
            began = session.spent
            comparisons = self.arms(point)
            arms = dict.fromkeys(arm for each in comparisons for arm in each[:2] if not arm.control)
            if self.memory:
                measure_memory(session, self, point, list(arms))
            if self.pairs and self.precompile:
                compile_in_advance(session, self, point, list(arms))
            if self.pairs:
                with clean_process(compiles=session.execution.compile):
                    case = self._case(session, point, comparisons)
                    compare(session, case, pairs=self.pairs, tolerance=self.tolerance, profile=self.profile)
            longest = max(longest, session.spent - began)

    def _case(self, session: Session, point: Point, comparisons: Sequence[Comparison]) -> Case:
        """Return everything that a point compares."""
        pool = GraphPool()
        return Case(
            name=point.name,
            fields={"model": self.plan(point).name, "point": point.to_dict()},
            comparisons=comparisons,
            build=lambda arm: FreshSubject(session, self, point, arm) if self.fresh else self.build(point, arm, pool),
            variants=self.variants(),
            work=lambda arm, _: self.work(point, arm),
            describe=lambda arm, _: self.describe(point, arm),
            sixteen_bit=(point.precision or session.execution.precision) != "fp32",
        )
