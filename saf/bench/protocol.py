"""The paired protocol of every speed benchmark: how arms are timed (`compare`), and what a record says (`Session`).

A baseline and an arm take turns (AB BA AB BA). The speedup is the median of the ratios within pairs, the baseline's
time over the arm's: above 1 the arm is faster. Clocks that drift slowly cancel within a pair. A control, a second
ordinary model, must come out at 1 within a tolerance; otherwise everything compared with its baseline is refused.

A record is one JSON object with the header of every result (`saf.records.result`) and

    finished, seconds   whether the benchmark reached its end, and how long it took
    rows                one for each comparison: `point`, `variant` (how it ran), `role`, `baseline`, `arm`, the fields
                        of `Arm`; `baseline_ms`, `arm_ms` (medians), `ratio` with `q25`, `q75`, `min`, `max`, `pairs`,
                        `pair_ms`; `control_ratio`, `refused`; `heads`; of whole models `model` and `per_layer`
    memory              peak memory of each arm in a process of its own: `point`, `arm`, `bytes`, `change_percent`
    kernels             the kernels that one pass of each arm ran, and whether the pinned one is among them
    left_out            `what` was not measured, and `why`
"""

import gc
import math
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from saf.distributed import all_ranks_or_raise, is_rank0, on_rank0, rank_and_size
from saf.errors import InputError, UnsupportedError
from saf.machine import Call, Execution, device_name, driver_version
from saf.ops.frozen_heads import BACKENDS
from saf.records.files import to_json, write_json
from saf.records.result import result_header

FREE, PRUNED = "free", "pruned"
"""Names that an arm has in place of a backend: heads whose mixing costs nothing, and heads that are removed."""
FLEX = "flex"
"""The attention kernel that is PyTorch's flex attention."""
MIN_PAIRS = 2
"""Fewest pairs of a row, unless the settings have one pair."""
OUT_OF_TIME = "out of time"
RECOMPILES = 64
"""Programs that the compiler may hold for one function: one for each arm, and some to spare. PyTorch allows 8."""

Row = dict[str, Any]
Pair = tuple[float, float]
"""Milliseconds of a block of the baseline and of the arm."""
Block = Callable[[], float]
"""Runs a timed block and returns the milliseconds of one call."""


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
        return self.backend if self.backend in (FREE, PRUNED) else "frozen"

    @property
    def live_kernel(self) -> str:
        """The kernel to pin where heads are frozen: "auto" for a backend that computes live heads itself."""
        # "pruned" is no backend: without a frozen head nothing else computes live ones.
        backend = BACKENDS.get(str(self.backend))
        return "auto" if backend is not None and backend.mixes_live else self.kernel


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


class Comparison(NamedTuple):
    """An arm and its baseline, the ordinary arm whose time is divided by the arm's."""

    baseline: Arm
    arm: Arm


class Subject(ABC):
    """One arm that can be timed."""

    facts: Mapping[str, Any] = {}
    """More entries of its rows; in rows where it is the baseline their names begin with `baseline_`."""

    @abstractmethod
    def warm_up(self) -> None:
        """Compile, capture and check whatever is timed later, and run it untimed."""

    @abstractmethod
    def timed_block(self, variant: str) -> float:
        """Return the milliseconds of one call, from a block of several."""

    @abstractmethod
    def kernels(self) -> list[Row]:
        """Return the kernels that one call runs (`kernels_of`)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything that one point compares: its arms, how each is built, what is timed, and what its rows say."""

    name: str
    fields: Mapping[str, Any]
    """Entries that all rows share."""
    comparisons: Sequence[Comparison]
    build: Callable[[Arm], Subject]
    variants: Sequence[str]
    describe: Callable[[Arm], Mapping[str, Any]]
    """Entries of the rows of an arm."""


# --- the comparison


def compare(session: "Session", case: Case, *, pairs: int, tolerance: float, profile: bool) -> None:
    """Build and warm up all arms of a case, time their pairs, and add a row for each comparison and variant.

    An arm that fails is left out with its reason; the others go on.
    """
    subjects = _ready(session, case)
    blocks = {}
    for variant in case.variants:
        for comparison in case.comparisons:
            if comparison.baseline in subjects and comparison.arm in subjects:
                pair = (partial(subjects[arm].timed_block, variant) for arm in comparison)
                blocks[comparison, variant] = tuple(pair)
    rows = _rows(case, subjects, alternate(session, case.name, blocks, pairs), tolerance)
    session.add(rows)
    for row in rows:
        times = f"{row['arm']} {row['arm_ms']:.4g} ms, {row['baseline']} {row['baseline_ms']:.4g} ms"
        ratio = f"{row['ratio']:.3f}×" + (", refused" if row["refused"] else "")
        session.log(f"{case.name} {row['variant']}: {times}, {ratio}")
    # After all timing: a profiler that was used once may slow launches down.
    for arm, subject in subjects.items() if profile else ():
        if not arm.control:
            with session.attempt(f"{case.name}: kernels of {arm.name}"):
                _record_kernels(session, case, arm, subject)


def _ready(session: "Session", case: Case) -> dict[Arm, Subject]:
    """Build all arms of a case, then warm up each; return those that run on every rank."""
    # Not in one loop: an `Updater` that compiles drops what the process had compiled. An arm warmed up before the next
    # one is built would compile again in its first timed block.
    built: dict[Arm, Subject] = {}
    for arm in dict.fromkeys(arm for comparison in case.comparisons for arm in comparison):
        with session.attempt(f"{case.name}: {arm.name}"):
            with all_ranks_or_raise():
                subject = case.build(arm)
            built[arm] = subject
    ready: dict[Arm, Subject] = {}
    for arm, subject in built.items():
        began = session.spent
        with session.attempt(f"{case.name}: {arm.name}"):
            with all_ranks_or_raise():
                subject.warm_up()
            ready[arm] = subject
            session.log(f"{case.name} warmed up: {arm.name}, {session.spent - began:.1f} s")
    return ready


def alternate(
    session: "Session", name: str, blocks: Mapping[Any, tuple[Block, Block]], pairs: int
) -> dict[Any, list[Pair]]:
    """Time pairs of every comparison in rounds, each round one pair of all; return those with enough pairs.

    An error, or the end of the time allowed, ends the rounds; earlier pairs stand.
    """
    # Rounds over all comparisons, not one comparison after the other: what is left out at the end of the time, and
    # slow changes of the machine, then fall on all alike.
    times: dict[Any, list[Pair]] = {key: [] for key in blocks}
    longest = 0.0
    for number in range(pairs):
        if not session.fits(longest):
            session.skip(name, f"pairs {number + 1} to {pairs}: {OUT_OF_TIME}")
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
            session.skip(name, f"pairs from {number + 1}: {in_short(error)}")
            break
        longest = max(longest, time.perf_counter() - began)
    return {key: each for key, each in times.items() if len(each) >= min(MIN_PAIRS, pairs)}


def _rows(case: Case, subjects: Mapping[Arm, Subject], times: Mapping[Any, list[Pair]], tolerance: float) -> list[Row]:
    """Return a row for each comparison; refused where its control is missing or further than `tolerance` from 1."""
    summaries = {key: summary(pairs) for key, pairs in times.items()}
    controls = {}
    for (comparison, variant), numbers in summaries.items():
        if comparison.arm.control:
            controls[comparison.baseline, variant] = numbers["ratio"]
    rows = []
    for ((baseline, arm), variant), numbers in summaries.items():
        control = controls.get((baseline, variant))
        row = {**case.fields, "variant": variant, "role": arm.role, "baseline": baseline.name, "arm": arm.name}
        row |= {**asdict(arm), **numbers, "control_ratio": control}
        # Without a control nobody knows how far apart two equal models would be.
        row["refused"] = control is None or abs(control - 1) > tolerance
        row |= {f"baseline_{name}": value for name, value in subjects[baseline].facts.items()}
        rows.append({**row, **subjects[arm].facts, **case.describe(arm)})
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


def _record_kernels(session: "Session", case: Case, arm: Arm, subject: Subject) -> None:
    kernels = subject.kernels()
    seen = kernel_seen(arm.live_kernel, kernels, session.execution.device)
    names = [each["name"] for each in kernels if any(part in each["name"].lower() for part in ATTENTION)]
    session.kernels.append(
        {**case.fields, "arm": arm.name, "kernel_seen": seen, "attention": names, "kernels": kernels}
    )
    if seen is False:  # None where no kernel is pinned, or the device shows no names
        session.log(f"{case.name} warning: the kernels of {arm.name} do not show {arm.kernel}")
    session.save()


@contextmanager
def clean_process(*, compiles: bool = True) -> Iterator[None]:
    """Begin and end with an empty compiler and allocator cache.

    Where nothing is compiled the compiler is not loaded, which takes seconds.
    """

    def forget() -> None:
        if compiles:
            torch._dynamo.reset()
        if torch.cuda.is_available():
            gc.collect()  # models with frozen heads are in reference cycles: only this frees their memory
            torch.cuda.empty_cache()

    with ExitStack() as stack:
        if compiles:
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=RECOMPILES))  # type: ignore[attr-defined]
            # The pinned attention kernel is no part of this cache's key: it would hand one arm's graph to another.
            stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))  # type: ignore[attr-defined]
        forget()
        stack.callback(forget)
        yield


# --- the record


class Session:
    """The record of one benchmark while it is measured: rows, what was left out, and the time allowed.

    Use it as a context. Its file is written after every case and complete at any moment; `finished` is false after an
    exception. In a group of processes rank 0 writes.
    """

    def __init__(
        self,
        kind: str,
        settings: Mapping[str, Any],
        execution: Execution,
        *,
        out: Path | None = None,
        seconds: float | None = None,
        **header: Any,
    ):
        """Write nothing yet; raise InputError where `out` exists. `header` goes to `result_header`."""
        if out is not None and out.exists():
            raise InputError(f"{out} exists already; remove it, or write to another file")
        self.execution = execution
        self.rows: list[Row] = []
        self.memory: list[Row] = []
        self.kernels: list[Row] = []
        self.left_out: list[Row] = []
        self._out = out if is_rank0() else None
        self._limit = math.inf if seconds is None else seconds
        self._began = time.perf_counter()
        self._header: Row = result_header(kind, settings, **header) | {"finished": False}
        self._header["provenance"] |= _environment(execution)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._header |= {"finished": kind is None, "seconds": round(self.spent, 1)}
        self.save()

    @property
    def spent(self) -> float:
        return time.perf_counter() - self._began

    def fits(self, seconds: float) -> bool:
        """Return whether work of so many seconds would end in time, by rank 0's clock."""
        # Ranks that decided by their own clocks could differ, and the ones that go on would wait for ever.
        return math.isinf(self._limit) or on_rank0(lambda: self._limit - self.spent > seconds)

    def add(self, rows: Sequence[Row]) -> None:
        self.rows += rows
        self.save()

    def skip(self, what: str, why: str) -> None:
        """Record and print what is not measured."""
        self.left_out.append({"what": what, "why": why})
        self.log(f"left out: {what}: {why}")
        self.save()

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Record an error of the enclosed work, in any process, as the reason why `what` is left out, and go on."""
        try:
            with all_ranks_or_raise():
                yield
        except Exception as error:  # also PyTorch's, such as out of memory: the other arms can still be measured
            self.skip(what, in_short(error))

    def log(self, line: str) -> None:
        """Print a line of progress with the seconds spent; standard output is for results."""
        if is_rank0():
            print(f"[{self.spent:6.1f} s] {line}", file=sys.stderr, flush=True)

    @property
    def record(self) -> Row:
        lists = {name: getattr(self, name) for name in ("rows", "memory", "kernels", "left_out")}
        return to_json({"seconds": round(self.spent, 1), **self._header, **lists})

    def save(self) -> None:
        if self._out is not None:
            write_json(self._out, self.record)


def in_short(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0][:200]}"


def _environment(execution: Execution) -> Row:
    result: Row = {"device": device_name(execution.device), "driver": None, "processes": rank_and_size()[1]}
    if execution.device.type == "cuda":
        properties = torch.cuda.get_device_properties(execution.device)
        result["driver"] = driver_version()
        result |= {"memory_bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count}
    return result


# --- timed blocks

CALL, GRAPH = "call", "graph"
SETTLE_MS = 400.0
"""Untimed calls before a timed block of a model on CUDA, ms: clocks follow the load over more than 100 ms."""
REST_MS = 200.0
"""Idle time before a timed block of an operator on CUDA, ms: clocks are at their highest again after about 150."""
MAX_KERNELS = 250
"""Kernels of a pass that are recorded, the longest ones; a compiled update runs some 200."""


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_block(call: Call, *, repeats: int, device: torch.device, settle: int = 0) -> float:
    """Return the median milliseconds of `repeats` calls, each synchronised, after `settle` untimed ones."""
    for _ in range(settle):
        call()
    return statistics.median(mean_block(call, repeats=1, device=device) for _ in range(repeats))


def mean_block(call: Call, *, repeats: int, device: torch.device) -> float:
    """Return the mean milliseconds of `repeats` calls in a row, synchronised before the first and after the last."""
    wait_for(device)
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    wait_for(device)
    return 1e3 * (time.perf_counter() - began) / repeats


def event_block(call: Call, *, repeats: int, device: torch.device, rest_ms: float = 0.0) -> float:
    """Return the median milliseconds between CUDA events around `repeats` calls, after an idle time.

    A GPU at its power limit lowers its clocks some 20 ms after a demanding arm began and raises them over more than
    100 ms: short blocks after a rest see neither (docs/log.md). Without CUDA it is the wall clock.
    """
    wait_for(device)
    time.sleep(1e-3 * rest_ms)
    if device.type != "cuda":
        return wall_block(call, repeats=repeats, device=device)
    # Events, not the host's clock: calls of microseconds are submitted without waiting for the one before.
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        call()
        end.record()
    wait_for(device)
    return statistics.median(start.elapsed_time(end) for start, end in events)


def repeats_within(block_ms: float, once_ms: float, most: int) -> int:
    """Return how many calls of `once_ms` fill a timed block of `block_ms`: 1 to `most`."""
    return min(most, max(1, math.ceil(block_ms / once_ms)))


def launch_modes(graphs: str, device: torch.device) -> tuple[str, ...]:
    """Return the modes that `graphs` ("off", "on", "both") times: called, replayed as a CUDA graph.

    Without CUDA only calls are timed, and "on" raises UnsupportedError.
    """
    if device.type == "cuda":
        return {"off": (CALL,), "on": (GRAPH,), "both": (CALL, GRAPH)}[graphs]
    if graphs == "on":
        raise UnsupportedError("CUDA graphs need a CUDA device; use --graphs off")
    return (CALL,)


# --- kernels

ATTENTION = ("attention", "sdpa", "flash", "fmha", "toeplitz", "fused_forward", "key_block", "query_block", "prescale")
"""Parts of names of GPU kernels that mix positions; records list these kernels as `attention`."""
MARKS = {
    "cudnn": ("cudnn",),
    "flash": ("flash_fwd", "flash_attention", "flashattnfwd", "flash_attncute"),  # PyTorch's own, FlashAttention-3, -4
    "flex": ("flex_attention", "triton_tem"),
    "flash_decode": ("flash_decode_kernel",),
}
"""Parts of names of GPU kernels that show which attention kernel ran."""


def kernels_of(call: Call, device: torch.device) -> list[Row]:
    """Return name, calls and milliseconds of the longest kernels of one call (operators on a CPU)."""
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        call()
        wait_for(device)
    kernels = []
    for event in profiler.key_averages():
        # A trace of CUDA has the host's launches, too; they are no kernels.
        if not cuda or str(event.device_type).endswith("CUDA"):
            microseconds = event.self_device_time_total if cuda else event.self_cpu_time_total
            kernels.append({"name": event.key[:200], "calls": event.count, "ms": microseconds / 1e3})
    return sorted(kernels, key=lambda kernel: -kernel["ms"])[:MAX_KERNELS]


def kernel_seen(kernel: str, kernels: Sequence[Mapping[str, Any]], device: torch.device) -> bool | None:
    """Return whether the pinned kernel is among those that ran; None where nothing was recorded or pinned."""
    if device.type != "cuda" or not kernels or kernel not in MARKS:
        return None
    names = [entry["name"].lower() for entry in kernels]
    if kernel == "flash":  # cuDNN's kernels have "flash" in their names, too
        names = [name for name in names if "cudnn" not in name]
    return any(mark in name for name in names for mark in MARKS[kernel])
