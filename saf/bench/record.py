"""`Session` holds the record of a benchmark while it is measured; `kernels_of` lists the kernels that a call runs.

A record is one JSON object with the header of every result (`saf.records.result`) and

    finished, seconds   whether the benchmark reached its end, and how long it took
    rows                one for each comparison: `point`, `variant` (how it ran), `role`, `baseline`, `arm`, the fields
                        of `Arm`; `baseline_ms`, `arm_ms` (medians), `ratio` with `q25`, `q75`, `min`, `max`, `pairs`,
                        `pair_ms`; `control_ratio`, `refused`; `heads`; of whole models `model` and `per_layer`
    memory              peak memory of each arm in a process of its own: `point`, `arm`, `bytes`, `change_percent`
    kernels             the kernels that one pass of each arm ran, and whether the pinned one is among them
    left_out            `what` was not measured, and `why`
"""

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from saf.distributed import is_rank0, is_shared, on_rank0, rank_and_size
from saf.errors import InputError
from saf.machine import Call, Execution, device_name, driver_version, wait_for
from saf.records.files import to_json, write_json
from saf.records.result import result_header

Row = dict[str, Any]


class Session:
    """The rows of a record, what was left out, and the time allowed.

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
        machine = {"device": device_name(execution.device), "driver": None, "processes": rank_and_size()[1]}
        if execution.device.type == "cuda":
            properties = torch.cuda.get_device_properties(execution.device)
            machine |= {"driver": driver_version(), "memory_bytes": properties.total_memory}
            machine |= {"multiprocessors": properties.multi_processor_count}
        self._header["provenance"] |= machine

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

    def skip_failed(self, what: str, error: Exception, *, why: str = "") -> None:
        """Leave `what` out for an error that every rank raised; raise an error that other ranks do not have."""
        # The others wait for this rank's gradients, for ever if it went on; when it ends by the error, they end too.
        if rank_and_size()[1] > 1 and not is_shared(error):
            raise error
        message = (str(error).strip() or "no reason given").splitlines()[0][:200]
        self.skip(what, f"{why}{type(error).__name__}: {message}")

    def add_kernels(self, entry: Row, kernels: Sequence[Row], *, pinned: str) -> None:
        """Record the kernels of one pass of an arm, which `entry` names; warn where `pinned` is not among them."""
        seen = kernel_seen(pinned, kernels, self.execution.device)
        names = [each["name"] for each in kernels if any(part in each["name"].lower() for part in ATTENTION)]
        self.kernels.append({**entry, "kernel_seen": seen, "attention": names, "kernels": kernels})
        if seen is False:  # None where no kernel is pinned, or the device shows no names
            self.log(f"warning: the kernels of {entry['arm']} do not show {pinned}")
        self.save()

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Record an error of the enclosed work as the reason why `what` is left out, and go on."""
        try:
            yield
        except Exception as error:  # also PyTorch's, such as out of memory: the other arms can still be measured
            self.skip_failed(what, error)

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
MAX_KERNELS = 250
"""Kernels of a pass that are recorded, the longest ones; a compiled update runs some 200."""


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
    """Return whether the pinned `kernel` is among those that ran; None where nothing was recorded or pinned."""
    if device.type != "cuda" or not kernels or kernel not in MARKS:
        return None
    names = [entry["name"].lower() for entry in kernels]
    if kernel == "flash":  # cuDNN's kernels have "flash" in their names, too
        names = [name for name in names if "cudnn" not in name]
    return any(mark in name for name in names for mark in MARKS[kernel])
