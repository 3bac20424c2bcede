"""The paired protocol of every speed benchmark, in reading order: what is compared, `measure`, pairs, rows.

A baseline and an arm take turns (AB BA AB BA). The speedup is the median of the ratios within pairs, the baseline's
time over the arm's: above 1 the arm is faster. Clocks that drift slowly cancel within a pair. A control, a second
ordinary model, must come out at 1 within a tolerance; otherwise everything compared with its baseline is refused. The
free bound is the speedup of frozen heads that cost nothing.

A benchmark is a class of settings (saf/bench/models.py, layer.py). It returns a `Case` for each point, which builds the
arms; an arm that is warmed up is `Ready` to be timed.
"""

import math
import multiprocessing
import os
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from saf.bench.record import Row, Session
from saf.distributed import all_ranks_or_raise
from saf.errors import InputError, UnsupportedError, check_name
from saf.machine import Call, Compile, Device, Execution, GraphPool, clean_process, wait_for
from saf.ops.backend import Backend, Tables
from saf.ops.frozen_heads import BACKENDS
from saf.ops.live import FLASH_DECODE, KERNELS
from saf.ops.tensors import CachePosition, take_heads
from saf.patterns import Pattern
from saf.records.table import byte_size, change_percent, signed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Block = Callable[[], float]
"""Runs a timed block and returns the milliseconds of one call."""
Pair = tuple[float, float]
"""Milliseconds of a block of the baseline and of the arm."""

# --- what is compared


@dataclass(frozen=True)
class Arm:
    """One way to run a model or layer: the attention kernel of its live heads, and what replaces the others."""

    kernel: str
    backend: str | None = None
    """Backend of frozen heads, "free" or "pruned"; None for an ordinary model."""
    rate: float = 0.0
    control: bool = False
    """A second, independent ordinary model."""

    @property
    def name(self) -> str:
        """Such as "ordinary cudnn" or "25% toeplitz cudnn"."""
        if self.backend is None:
            return f"{'control' if self.control else 'ordinary'} {self.kernel}"
        return f"{100 * self.rate:.3g}% {self.backend} {self.kernel}"

    @property
    def role(self) -> str:
        """What the arm is compared for: control, kernel (ordinary, with another kernel), frozen, free or pruned."""
        if self.backend is None:
            return "control" if self.control else "kernel"
        return self.backend if self.backend in ("free", "pruned") else "frozen"

    @property
    def live_kernel(self) -> str:
        """The kernel to pin where heads are frozen: "auto" for a backend that computes live heads itself."""
        # "pruned" is no backend: without a frozen head nothing else computes live ones.
        backend = BACKENDS.get(str(self.backend))
        return "auto" if backend is not None and backend.mixes_live else self.kernel


Comparison = tuple[Arm, Arm]
"""A baseline, which is ordinary, and the arm that its time is divided by."""


@dataclass(frozen=True)
class Point:
    """One shape: tokens of context, sequences, and what else a benchmark varies."""

    length: int
    batch_size: int
    accumulation: int | None = None
    precision: str | None = None

    @property
    def name(self) -> str:
        """Such as "T=4096 B=8 x4"."""
        words = [f"T={self.length}", f"B={self.batch_size}", f"x{self.accumulation}" if self.accumulation else ""]
        return " ".join(filter(None, [*words, self.precision]))

    def to_dict(self) -> Row:
        return {key: value for key, value in asdict(self).items() if value is not None}


class Ready(NamedTuple):
    """An arm that is compiled, captured, checked and warmed up."""

    blocks: Mapping[str, Block]
    """What is timed, by variant: the way in which it runs, such as "call" and "graph"."""
    kernels: Callable[[], list[Row]]
    """Returns the kernels that one call runs (`kernels_of`)."""
    facts: Row
    """More entries of its rows; in rows where it is the baseline their names begin with `baseline_`."""


WarmUp = Callable[[], Ready]
"""Warms up an arm that is built already."""
Build = Callable[[Arm, GraphPool], WarmUp]
"""Builds an arm. All arms of a case share the pool: their graphs never run together."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is compared at one point, and what the rows say."""

    name: str
    fields: Row
    """Entries that all rows share."""
    comparisons: Sequence[Comparison]
    build: Build
    """Takes what a new process can be sent, for `fresh` and `memory`."""
    describe: Callable[[Arm], Row]
    """Returns the entries of an arm's rows."""


@dataclass(kw_only=True)
class Speed(ABC):
    """Settings of every speed benchmark."""

    kind: ClassVar[str]
    micro_batches: ClassVar[int | None] = None
    """Micro-batches of a point that names none; None for benchmarks whose points have none."""
    cuda_others: ClassVar[tuple[str, ...]] = ("auto", "flash", "flex")
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

    @abstractmethod
    def cases(self, session: Session) -> list[Case]:
        """Return what is compared, point by point; raise an error first for settings that cannot be used."""

    @property
    def execution(self) -> Execution:
        return Execution.of(self.device, compile=self.compile)

    @property
    def cuda(self) -> bool:
        return self.execution.device.type == "cuda"

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a name; "auto" is bf16 on CUDA and fp32 on a CPU."""
        return DTYPES[("bf16" if self.cuda else "fp32") if name == "auto" else name]

    def launch_modes(self) -> tuple[str, ...]:
        """Return the modes that `graphs` times: "call" (kernel by kernel), "graph" (replayed); on a CPU only calls."""
        if self.cuda:
            return {"off": ("call",), "on": ("graph",), "both": ("call", "graph")}[self.graphs]
        if self.graphs == "on":
            raise UnsupportedError("CUDA graphs need a CUDA device; use --graphs off")
        return ("call",)

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

    def comparisons(self, rates: Sequence[float], *, backend: str | None = None) -> list[Comparison]:
        """List the comparisons of a point at some rates, controls first; `backend` is that of a folder's heads.

        Each kernel has an ordinary baseline, its control and the arms of every rate. Ordinary arms of later kernels,
        and of `others`, are compared with the first kernel's.
        """
        # `dict.fromkeys` drops what is named twice and keeps the order.
        kernels = list(dict.fromkeys(self.kernels)) or (["cudnn"] if self.cuda else ["auto"])
        others = self.others
        if others is None:  # uncompiled flex attention is a matrix of scores, a baseline that nobody runs
            others = [each for each in self.cuda_others if self.cuda and (each != "flex" or self.execution.compile)]
        by_default = [backend] if backend else list(self.cuda_backends) if self.cuda else ["toeplitz"]
        edits = [*(self.backends or by_default), *(["free"] if self.free else []), *(["pruned"] if self.pruned else [])]
        comparisons = [(Arm(kernel), Arm(kernel, control=True)) for kernel in kernels]
        for kernel in dict.fromkeys([*kernels, *others]):
            if kernel != kernels[0]:
                comparisons.append((Arm(kernels[0]), Arm(kernel)))
        for kernel, rate, edit in product(kernels, dict.fromkeys(rates), dict.fromkeys(edits)):
            comparisons.append((Arm(kernel), Arm(kernel, edit, rate)))
        return comparisons


def require(holds: bool, message: str) -> None:
    """Raise InputError unless a condition on the settings holds."""
    if not holds:
        raise InputError(message)


def check_arms(settings: Speed) -> None:
    """Raise an error for names, rates and launch modes that no benchmark takes."""
    kernels, decodes = [*settings.kernels, *(settings.others or [])], settings.kind == "decode"
    known = ["auto", "flex", *KERNELS, *([FLASH_DECODE] if decodes else [])]  # the last is for few queries
    for name in kernels:
        check_name("attention kernel", name, known)
    for name in settings.backends:
        check_name("backend", name, BACKENDS)
    require(all(0 < rate <= 1 for rate in settings.rates), f"rates must be shares in (0, 1], got {settings.rates}")
    # Uncompiled it is no kernel but a matrix of scores: a baseline that nobody runs.
    uncompiled = "flex" in kernels and settings.cuda and not settings.execution.compile
    require(not uncompiled, "flex attention is a kernel only where it is compiled; use --compile on")
    by_layer = settings.compile == "layers" and settings.kind != "update"
    require(not by_layer, "compile='layers' is for updates; use 'on' or 'off'")
    layers = settings.num_layers
    require(layers is None or layers >= 1, f"num_layers must be at least 1, got {layers}")
    require(settings.pairs > 0 or settings.memory, "pairs must be at least 1 unless memory is measured")
    require(settings.cuda or not settings.memory, "memory is measured on CUDA alone; leave it out")
    settings.launch_modes()


# --- the benchmark

BEGIN_SHARE = 0.5
"""A point begins if the time left is more than this share of the longest point before it; it may end with fewer pairs
than were asked for."""


def measure(settings: Speed, *, out: Path | None = None) -> Row:
    """Run a benchmark and return its record, written to `out` after every point.

    Raises:
        InputError: A setting that is unknown or has no effect here, or `out` exists.
        UnsupportedError: A device that is not there.
    """
    with all_ranks_or_raise():
        check_arms(settings)
        session = Session(settings.kind, asdict(settings), settings.execution, out=out, seconds=settings.seconds)
        cases = settings.cases(session)
    longest = 0.0
    with session, free_backend():
        for case in cases:
            # Skipped, not ended: a later point may be shorter.
            if not session.fits(BEGIN_SHARE * longest):
                session.skip(case.name, "out of time")
                continue
            began = session.spent
            with clean_process(compiles=settings.execution.compile):
                if settings.memory:  # first, while this process holds nothing on the device
                    measure_memory(session, settings, case)
                if settings.pairs:
                    compare(session, settings, case)
            longest = max(longest, session.spent - began)
    return session.record


# --- pairs


def compare(session: Session, settings: Speed, case: Case) -> None:
    """Build and warm up all arms of a case, time their pairs, and add a row for each comparison and variant.

    An arm that fails is left out with its reason; the others go on.
    """
    build, pool = partial(in_fresh_processes, settings, case.build) if settings.fresh else case.build, GraphPool()
    unique = dict.fromkeys(arm for comparison in case.comparisons for arm in comparison)
    # Not one arm after the other: an `Updater` that compiles drops what the process had compiled. An arm warmed up
    # before the next one is built would compile again in its first timed block.
    built = _on_every_rank(session, case, "built", {arm: partial(build, arm, pool) for arm in unique})
    arms: dict[Arm, Ready] = _on_every_rank(session, case, "warmed up", built)
    del built  # with the memory of arms that failed to warm up
    blocks = {(arm, variant): block for arm, ready in arms.items() for variant, block in ready.blocks.items()}
    pairs = {
        ((baseline, arm), variant): (blocks[baseline, variant], blocks[arm, variant])
        for variant in dict.fromkeys(variant for _, variant in blocks)
        for baseline, arm in case.comparisons
        if (baseline, variant) in blocks and (arm, variant) in blocks
    }
    rows = _rows(case, arms, alternate(session, case.name, pairs, settings.pairs), settings.tolerance)
    session.add(rows)
    for row in rows:
        times = f"{row['arm']} {row['arm_ms']:.4g} ms, {row['baseline']} {row['baseline_ms']:.4g} ms"
        ratio = f"{row['ratio']:.3f}×" + (", refused" if row["refused"] else "")
        session.log(f"{case.name} {row['variant']}: {times}, {ratio}")
    # After all timing: a profiler that was used once may slow launches down.
    for arm, ready in arms.items() if settings.profile else ():
        if not arm.control:
            with session.attempt(f"{case.name}: kernels of {arm.name}"), all_ranks_or_raise():
                session.add_kernels({**case.fields, "arm": arm.name}, ready.kernels(), pinned=arm.live_kernel)


def _on_every_rank(session: Session, case: Case, done: str, work: Mapping[Arm, Callable[[], Any]]) -> dict[Arm, Any]:
    """Do the work of each arm and return the results of those that no rank failed to do."""
    results = {}
    for arm, each in work.items():
        began = session.spent
        with session.attempt(f"{case.name}: {arm.name}"):
            with all_ranks_or_raise():
                result = each()
            results[arm] = result
            session.log(f"{case.name} {done}: {arm.name}, {session.spent - began:.1f} s")
    return results


def alternate(
    session: Session, name: str, blocks: Mapping[Any, tuple[Block, Block]], pairs: int
) -> dict[Any, list[Pair]]:
    """Time pairs of every comparison in rounds, each round one pair of all; return those with two pairs or all.

    An error, or the end of the time allowed, ends the rounds; earlier pairs stand.
    """
    # Rounds over all comparisons, not one comparison after the other: what is left out at the end of the time, and
    # slow changes of the machine, then fall on all alike.
    times: dict[Any, list[Pair]] = {key: [] for key in blocks}
    longest = 0.0
    for number in range(pairs):
        if not session.fits(longest):
            session.skip(name, f"pairs {number + 1} to {pairs}: out of time")
            break
        began = time.perf_counter()
        try:
            with all_ranks_or_raise():
                for key, (baseline, arm) in blocks.items():
                    # AB BA: a GPU's clocks follow the load before a block, so each side leads in half of the pairs.
                    if number % 2 == 0:
                        times[key].append((baseline(), arm()))
                    else:
                        arm_ms = arm()
                        times[key].append((baseline(), arm_ms))
        except Exception as error:
            session.skip_failed(name, error, why=f"pairs from {number + 1}: ")
            break
        longest = max(longest, time.perf_counter() - began)
    return {key: each for key, each in times.items() if len(each) >= min(2, pairs)}


def _rows(case: Case, arms: Mapping[Arm, Ready], times: Mapping[Any, list[Pair]], tolerance: float) -> list[Row]:
    """Return a row for each comparison; refused where its control is missing or further than `tolerance` from 1."""
    summaries = {key: summary(pairs) for key, pairs in times.items()}
    controls = {
        (baseline, variant): numbers["ratio"]
        for ((baseline, arm), variant), numbers in summaries.items()
        if arm.control
    }
    rows = []
    for ((baseline, arm), variant), numbers in summaries.items():
        control = controls.get((baseline, variant))
        row = {**case.fields, "variant": variant, "role": arm.role, "baseline": baseline.name, "arm": arm.name}
        row |= {**asdict(arm), **numbers, "control_ratio": control}
        # Without a control nobody knows how far apart two equal models would be.
        row["refused"] = control is None or abs(control - 1) > tolerance
        row |= {f"baseline_{name}": value for name, value in arms[baseline].facts.items()}
        rows.append({**row, **arms[arm].facts, **case.describe(arm)})
    return rows


def summary(pairs: Sequence[Pair]) -> Row:
    """Compute the median times (ms) and the ratios within pairs, baseline / arm: median, quartiles, range."""
    # The median of ratios, not the ratio of medians: a clock that drifts over the pairs cancels in each of them.
    ratios = sorted(baseline / arm for baseline, arm in pairs)
    q25, _, q75 = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    baseline_ms, arm_ms = (statistics.median(side) for side in zip(*pairs, strict=True))
    return {
        "baseline_ms": baseline_ms,
        "arm_ms": arm_ms,
        "ratio": statistics.median(ratios),
        "q25": q25,
        "q75": q75,
        "min": ratios[0],
        "max": ratios[-1],
        "pairs": len(pairs),
        "pair_ms": [list(pair) for pair in pairs],
    }


# --- timed blocks


def mean_block(call: Call, *, repeats: int, device: torch.device) -> float:
    """Return the mean milliseconds of `repeats` calls in a row, synchronised before the first and after the last."""
    wait_for(device)
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    wait_for(device)
    return 1e3 * (time.perf_counter() - began) / repeats


def median_block(call: Call, *, repeats: int, device: torch.device, settle: int = 0) -> float:
    """Return the median milliseconds of `repeats` calls, each synchronised, after `settle` untimed ones."""
    for _ in range(settle):
        call()
    return statistics.median(mean_block(call, repeats=1, device=device) for _ in range(repeats))


def repeats_within(block_ms: float, once_ms: float, most: int) -> int:
    """Return how many calls of `once_ms` fill a timed block of `block_ms`: 1 to `most`."""
    return min(most, max(1, math.ceil(block_ms / once_ms)))


# --- the free bound


class FreeBackend(Backend):
    """Frozen heads that cost nothing: values pass through unmixed. Its speedup is the most that freezing can reach."""

    how = "values pass through unmixed (a bound for measurements, not a model)"

    def prepare(self, patterns: Sequence[Pattern], dtypes: Sequence[torch.dtype], *_: Any) -> dict[torch.dtype, Tables]:
        return {dtype: {} for dtype in dtypes}

    def forward(self, value: Tensor, tables: Tables, left_pad: Tensor | None = None) -> Tensor:
        return value

    def rows(self, value: Tensor, heads: tuple[int, ...], tables: Tables, position: CachePosition) -> Tensor:
        rows = torch.arange(position.count, device=value.device) + position.first
        return take_heads(value.index_select(2, rows), heads)


@contextmanager
def free_backend() -> Iterator[None]:
    """Register `FreeBackend` as the backend "free" while something is measured; "auto" never takes it."""
    BACKENDS["free"] = FreeBackend()
    try:
        yield
    finally:
        del BACKENDS["free"]


# --- processes

SPAWN = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
code_folder = partial(tempfile.TemporaryDirectory, prefix="saf-bench-", ignore_cleanup_errors=True)
"""Makes a folder for the compiled code of one arm: it must take no program compiled for another kernel."""


def in_fresh_processes(settings: Speed, build: Build, arm: Arm, _pool: GraphPool) -> WarmUp:
    """Build an arm whose every timed block runs in a new process; its compiled code stays on disk between them.

    Each process captures its graphs in a pool of its own.
    """
    code = code_folder()

    def warm_up() -> Ready:
        first = _in_new_process(settings, build, arm, code=code.name, profile=settings.profile)
        measured: dict[str, float] = {}

        def block(variant: str) -> float:
            # A process times every variant once, as starting and building take most of its time.
            if variant not in measured:
                measured.update(_in_new_process(settings, build, arm, code=code.name)["block_ms"])
            return measured.pop(variant)

        blocks = {variant: partial(block, variant) for variant in first["block_ms"]}
        return Ready(blocks, lambda: first["kernels"], first["facts"])

    return warm_up


def measure_memory(session: Session, settings: Speed, case: Case) -> None:
    """Record the peak memory of each arm but controls, and its change from the first one's, which is ordinary."""
    arms = list(dict.fromkeys(arm for comparison in case.comparisons for arm in comparison if not arm.control))
    peaks: dict[Arm, int] = {}
    for arm in arms:
        title = f"{case.name}: peak memory of {arm.name}"
        with session.attempt(title), code_folder() as code:
            peaks[arm] = _in_new_process(settings, case.build, arm, code=code)["bytes"]
            change = change_percent(peaks.get(arms[0]), peaks[arm])
            entry = {"point": case.fields["point"], "arm": arm.name, "backend": arm.backend, "rate": arm.rate}
            entry |= {"kind": "allocated", "bytes": peaks[arm], "change_percent": change}
            session.memory.append(entry)
            session.save()
            session.log(f"{title}: {byte_size(peaks[arm])}, {signed(change)} against ordinary")


def _in_new_process(settings: Speed, build: Build, arm: Arm, *, code: str, profile: bool = False) -> Row:
    with ProcessPoolExecutor(1, SPAWN) as pool:
        return pool.submit(_build_and_time, settings, build, arm, code, profile).result()


def _build_and_time(settings: Speed, build: Build, arm: Arm, code: str, profile: bool) -> Row:
    """Build and time an arm in this process; return its times by variant, peak memory, kernels and facts."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = code
    with clean_process(compiles=settings.execution.compile), free_backend():
        ready = build(arm, GraphPool())()
        if settings.cuda:
            torch.cuda.reset_peak_memory_stats()  # of timed calls alone, without compiling and tuning
        block_ms = {variant: block() for variant, block in ready.blocks.items()}
        peak = torch.cuda.max_memory_allocated() if settings.cuda else None
        kernels = ready.kernels() if profile else []
    return {"block_ms": block_ms, "bytes": peak, "kernels": kernels, "facts": ready.facts}
