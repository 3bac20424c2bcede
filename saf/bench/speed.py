"""`measure` runs a speed benchmark; `Speed` and `ModelSpeed` are the settings and steps that all of them share.

A benchmark (saf/bench/subjects.py) adds its own settings and says how an arm is built. `cases` yields the comparisons
of each point, `compare` of saf/bench/protocol.py times them. Below: arms in processes of their own.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from saf.bench.models import ModelPlan, free_backend, is_folder
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
    clean_process,
    compare,
    launch_modes,
)
from saf.distributed import all_ranks_or_raise
from saf.errors import InputError, check_name
from saf.machine import Compile, Device, Execution, GraphPool
from saf.ops import BACKENDS
from saf.ops.live import FLASH_DECODE, KERNELS
from saf.records.table import byte_size, change_percent, signed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BEGIN_SHARE = 0.5
"""A point begins if the time left is more than this share of the longest point before it; it may end with fewer pairs
than were asked for."""
SPAWN = multiprocessing.get_context("spawn")  # a forked process could not use CUDA


def require(holds: bool, message: str) -> None:
    """Raise InputError unless a condition on the settings holds."""
    if not holds:
        raise InputError(message)


@dataclass(kw_only=True)
class Speed:
    """Settings of every speed benchmark."""

    kind: ClassVar[str]
    micro_batches: ClassVar[int | None] = None
    """Micro-batches of a point that names none; None for benchmarks whose points have none."""
    cuda_others: ClassVar[tuple[str, ...]] = ("auto", "flash", FLEX)
    """`others` on CUDA by default."""
    cuda_backends: ClassVar[tuple[str, ...]] = ("toeplitz", "fused")
    """`backends` on CUDA by default."""

    model: str = "124m"
    """Time this preset with random weights, or a folder with its own frozen heads: a checkpoint, a run, or what
    saf.save or save_pretrained wrote."""
    points: tuple[str, ...] = ("4096x8",)
    """Time these shapes, as context x sequences (x micro-batches of an update): 4096x8 or 4096x8x15."""
    rates: tuple[float, ...] = ()
    """Freeze these shares of heads: 0.25 and 0.5 by default. A folder has its own heads."""
    backends: tuple[str, ...] = ()
    """Execute frozen heads by these backends: toeplitz, linear (exponential patterns), fused, reference. By default
    toeplitz and, on CUDA, fused, the paper's execution; those of a folder by its own."""
    kernels: tuple[str, ...] = ()
    """Run live heads by these attention kernels, on both sides of a ratio: by default cudnn on CUDA, auto on a CPU."""
    others: tuple[str, ...] | None = None
    """Compare these kernels of ordinary attention with the first, too: auto, cudnn, flash, efficient, math, flex. By
    default auto, flash and flex on CUDA, none on a CPU; --others without a name compares none."""
    free: bool = True
    """Whether to measure the free bound too, frozen heads whose mixing costs nothing; --no-free leaves it out."""
    pairs: int = 8
    """Time this many pairs, the ordinary model and the other in turn; 0 with --memory times nothing."""
    repeats: int = 1
    """Time so many calls in a block; the block's time is their median."""
    warmup: int = 3
    """Call each arm so many times before, untimed."""
    tolerance: float = 0.01
    """Refuse comparisons where the ratio of two ordinary models is further than this from 1."""
    seed: int = 0
    """Draw weights, inputs, patterns and the choice of heads by this random seed."""
    device: Device = "auto"
    """Measure on this device; auto is CUDA if there is one."""
    compile: Compile = "auto"
    """Compile with torch.compile: on for CUDA, off for a CPU. "layers" compiles decoder layers by themselves, for
    updates."""
    profile: bool = True
    """Whether to record the kernels that one pass of each arm runs; --no-profile leaves them out."""
    seconds: float | None = None
    """Stop cleanly where another measurement would not end within this, and record what was left out."""

    @property
    def execution(self) -> Execution:
        return Execution.of(self.device, compile=self.compile)

    @property
    def cuda(self) -> bool:
        return self.execution.device.type == "cuda"

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a name; "auto" is bf16 on CUDA and fp32 on a CPU."""
        return DTYPES[("bf16" if self.cuda else "fp32") if name == "auto" else name]

    def plan(self, point: Point) -> ModelPlan:
        """Return the models of a point; raise InputError for an unknown model, or a context that it does not take."""
        return ModelPlan(model=self.model, length=point.length, device=self.execution.device, seed=self.seed)

    def check(self) -> None:
        kernels, known = [*self.kernels, *(self.others or [])], ["auto", FLEX, *KERNELS]
        if self.kind == "decode":  # a kernel for few queries after a cache
            known.append(FLASH_DECODE)
        for name in kernels:
            check_name("attention kernel", name, known)
        for name in self.backends:
            check_name("backend", name, BACKENDS)
        require(all(0 < rate <= 1 for rate in self.rates), f"rates must be shares in (0, 1], got {self.rates}")
        # Uncompiled it is no kernel but a matrix of scores: a baseline that nobody runs.
        uncompiled = FLEX in kernels and self.cuda and not self.execution.compile
        require(not uncompiled, "flex attention is a kernel only where it is compiled; use --compile on")
        require(self.compile != "layers" or self.kind == "update", "compile='layers' is for updates; use 'on' or 'off'")
        require(not (is_folder(self.model) and self.rates), "rates must be left out: a folder has its own heads")

    def parsed_points(self) -> list[Point]:
        """Parse the points; raise InputError for one that is not numbers joined by x."""
        form = "4096x8" if self.micro_batches is None else "4096x8 or 4096x8x15"
        points = []
        for text in self.points:
            numbers = [int(part) if part.isdigit() else 0 for part in text.lower().split("x")]
            fits = 2 <= len(numbers) <= (2 if self.micro_batches is None else 3) and min(numbers) >= 1
            require(fits, f"a point of {self.kind} must be written like {form}, got {text!r}")
            points.append(Point(numbers[0], numbers[1], self.micro_batches if len(numbers) == 2 else numbers[2]))
        return points

    def comparisons(
        self, rates: Sequence[float], *, backend: str | None = None, pruned: bool = False
    ) -> list[Comparison]:
        """List the comparisons of a point at some rates, controls first; `backend` is that of a folder's heads.

        Each kernel has an ordinary baseline, its control and the arms of every rate. Ordinary arms of later kernels,
        and of `others`, are compared with the first kernel's.
        """
        # `dict.fromkeys` drops what is named twice and keeps the order.
        kernels = list(dict.fromkeys(self.kernels)) or (["cudnn"] if self.cuda else ["auto"])
        others = self.others
        if others is None:
            others = [each for each in self.cuda_others if each != FLEX or self.execution.compile] if self.cuda else ()
        if self.backends:
            edits = list(self.backends)
        elif backend is not None:
            edits = [backend]
        else:
            edits = list(self.cuda_backends) if self.cuda else ["toeplitz"]
        if self.free:
            edits.append(FREE)
        if pruned:
            edits.append(PRUNED)
        comparisons = [Comparison(Arm(kernel), Arm(kernel, control=True)) for kernel in kernels]
        for kernel in dict.fromkeys([*kernels, *others]):
            if kernel != kernels[0]:
                comparisons.append(Comparison(Arm(kernels[0]), Arm(kernel)))
        for kernel, rate, edit in product(kernels, dict.fromkeys(rates), dict.fromkeys(edits)):
            comparisons.append(Comparison(Arm(kernel), Arm(kernel, edit, rate)))
        return comparisons

    def cases(self, session: Session) -> Iterator[Case]:
        """Yield what is compared, point by point, and record in the session what cannot be."""
        raise NotImplementedError

    def run(self, session: Session, case: Case) -> None:
        if self.pairs:
            compare(session, case, pairs=self.pairs, tolerance=self.tolerance, profile=self.profile)


def measure(settings: Speed, *, out: Path | None = None) -> dict[str, Any]:
    """Run a benchmark and return its record, written to `out` after every point.

    Raises:
        InputError: A setting that is unknown or has no effect here, or `out` exists.
        UnsupportedError: A device that is not there.
    """
    with all_ranks_or_raise():
        settings.check()
        execution = settings.execution
        session = Session(settings.kind, asdict(settings), execution, out=out, seconds=settings.seconds)
    longest = 0.0
    with session, free_backend():
        for case in settings.cases(session):
            # Skipped, not ended: a later point may be shorter.
            if not session.fits(BEGIN_SHARE * longest):
                session.skip(case.name, OUT_OF_TIME)
                continue
            began = session.spent
            with clean_process(compiles=execution.compile):
                settings.run(session, case)
            longest = max(longest, session.spent - began)
    return session.record


# --- whole models


@dataclass(kw_only=True)
class ModelSpeed(Speed):
    """Settings of benchmarks of whole models."""

    num_layers: int | None = None
    """Build so many layers, not the preset's: compiling all of a large model takes minutes."""
    pruned: bool = False
    """Measure each rate with the same heads pruned too: their values and output columns are gone."""
    graphs: Literal["off", "on", "both"] = "off"
    """Launch kernel by kernel, replay CUDA graphs, or both; in all arms."""
    fresh: bool = False
    """Take every timed block in a process of its own."""
    memory: bool = False
    """Measure peak memory on CUDA too, one arm a process."""

    def check(self) -> None:
        super().check()
        cut = is_folder(self.model) and self.num_layers is not None
        require(not cut, "num_layers must be left out: a folder has its own layers")
        require(self.pairs > 0 or self.memory, "pairs must be at least 1 unless memory is measured")
        require(self.cuda or not self.memory, "memory is measured on CUDA alone; leave it out")
        self.variants()
        for point in self.all_points():
            self.plan(point)

    def plan(self, point: Point) -> ModelPlan:
        return replace(super().plan(point), num_layers=self.num_layers)

    def all_points(self) -> list[Point]:
        """Return the points with everything that varies filled in."""
        return self.parsed_points()

    def variants(self) -> tuple[str, ...]:
        """Name the ways in which each arm is timed (`launch_modes`); raise UnsupportedError for graphs without CUDA."""
        return launch_modes(self.graphs, self.execution.device)

    def arms(self, point: Point) -> list[Comparison]:
        """List the comparisons of a point: of a folder those of the heads that it froze or pruned."""
        folder = self.plan(point).folder
        if folder is None:
            return self.comparisons(self.rates or (0.25, 0.5), pruned=self.pruned)
        if folder.frozen:
            return self.comparisons([folder.rate], backend=folder.backend, pruned=self.pruned)
        comparisons = self.comparisons([folder.rate], pruned=True)
        return [each for each in comparisons if each.arm.role not in ("frozen", "free")]

    def build(self, point: Point, arm: Arm, pool: GraphPool) -> Subject:
        """Return an arm that can be warmed up in this process."""
        raise NotImplementedError

    def cases(self, session: Session) -> Iterator[Case]:
        for point in self.all_points():
            models = self.plan(point)
            # One pool a point: the graphs of its arms never run together and can share memory.
            build = partial(FreshSubject, self, point) if self.fresh else partial(self.build, point, pool=GraphPool())
            yield Case(
                name=point.name,
                fields={"model": models.name, "point": point.to_dict()},
                comparisons=self.arms(point),
                build=build,
                variants=self.variants(),
                describe=models.describe,
            )

    def run(self, session: Session, case: Case) -> None:
        if self.memory:  # first, while this process holds nothing on the device
            arms = dict.fromkeys(arm for each in case.comparisons for arm in each if not arm.control)
            _measure_memory(session, self, Point(**case.fields["point"]), list(arms))
        super().run(session, case)


# --- single arms in processes of their own


class FreshSubject(Subject):
    """One arm whose every timed block runs in a new process; its compiled code stays on disk between them."""

    def __init__(self, settings: ModelSpeed, point: Point, arm: Arm):
        self._settings, self._point, self._arm = settings, point, arm
        # Of its own, so that the arm takes no program compiled for another kernel.
        self._cache = tempfile.TemporaryDirectory(prefix="saf-bench-", ignore_cleanup_errors=True)
        self._first: dict[str, Any] = {}
        self._blocks: dict[str, float] = {}

    def warm_up(self) -> None:
        self._first = self.run(profile=self._settings.profile)  # later processes load the compiled code
        self.facts = self._first["facts"]

    def timed_block(self, variant: str) -> float:
        # A process times every variant once, as starting and building take most of its time.
        if variant not in self._blocks:
            self._blocks = self.run()["block_ms"]
        return self._blocks.pop(variant)

    def kernels(self) -> list[dict[str, Any]]:
        return self._first["kernels"]

    def run(self, *, profile: bool = False) -> dict[str, Any]:
        with ProcessPoolExecutor(1, SPAWN) as pool:
            arguments = self._settings, self._point, self._arm, profile, self._cache.name
            return pool.submit(_in_process, *arguments).result()


def _measure_memory(session: Session, settings: ModelSpeed, point: Point, arms: Sequence[Arm]) -> None:
    """Record the peak memory of each arm, and its change from the first one's, which is ordinary."""
    peaks: dict[Arm, int] = {}
    for arm in arms:
        with session.attempt(f"{point.name}: peak memory of {arm.name}"):
            peaks[arm] = FreshSubject(settings, point, arm).run()["bytes"]
            change = change_percent(peaks.get(arms[0]), peaks[arm])
            entry = {"point": point.to_dict(), "arm": arm.name, "backend": arm.backend, "rate": arm.rate}
            entry |= {"kind": "allocated", "bytes": peaks[arm], "change_percent": change}
            session.memory.append(entry)
            session.save()
            session.log(
                f"{point.name} peak memory: {arm.name} {byte_size(peaks[arm])}, {signed(change)} against ordinary"
            )


def _in_process(settings: ModelSpeed, point: Point, arm: Arm, profile: bool, cache: str) -> dict[str, Any]:
    """Build and time an arm in this process; return its times by variant, peak memory, kernels and facts."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    with clean_process(compiles=settings.execution.compile), free_backend():
        subject = settings.build(point, arm, GraphPool())
        subject.warm_up()
        if settings.cuda:
            torch.cuda.reset_peak_memory_stats()  # of timed calls alone, without compiling and tuning
        block_ms = {variant: subject.timed_block(variant) for variant in settings.variants()}
        peak = torch.cuda.max_memory_allocated() if settings.cuda else None
        kernels = subject.kernels() if profile else []
    return {"block_ms": block_ms, "bytes": peak, "kernels": kernels, "facts": subject.facts}
