"""Choosing how the Toeplitz product runs on the device at hand: every candidate timed, the fastest kept."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from saf.bench.environment import environment
from saf.bench.grids import parse_shape
from saf.bench.recorder import Recorder, Say, say_on_stderr
from saf.bench.timing import Budget
from saf.errors import InputError, UnsupportedError
from saf.machine.execution import device_name
from saf.ops.operator import has_triton

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True)
class TuneSettings:
    """Shapes of frozen heads' products, and which directions."""

    points: tuple[str, ...] = ("4096x8", "8192x4", "16384x2")
    """Contexts x sequences."""
    heads: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    """Frozen heads of a layer."""
    head_dim: int = 64
    """Channels of a head."""
    dtype: Literal["bf16", "fp16"] = "bf16"
    """Of the operands."""
    directions: tuple[Literal["forward", "transposed"], ...] = ("forward", "transposed")
    """Prefill needs the first; training both."""
    seconds: float | None = None
    """Stop cleanly when another shape would not end within this."""

    def __post_init__(self):
        """Raise InputError for sizes that are none."""
        if min((*self.heads, self.head_dim)) < 1:
            raise InputError(f"heads and head_dim must be at least 1; got {self.heads} and {self.head_dim}")


def measure_tuning(settings: TuneSettings, *, out: Path | None = None, say: Say = say_on_stderr) -> dict[str, Any]:
    """Tune every shape and return the record, written to `out` after each.

    Raises:
        UnsupportedError: No CUDA device or no Triton.
        InputError: Points that are not numbers joined by x, or `out` exists.
    """
    shapes = [parse_shape(point, "op") for point in settings.points]
    if not torch.cuda.is_available() or not has_triton():
        raise UnsupportedError("tuning times Triton kernels: it needs a CUDA device and Triton")
    from saf.ops.toeplitz.choices import cache_file
    from saf.ops.toeplitz.tuning import tune

    device = torch.device("cuda", torch.cuda.current_device())
    asked = {field.name: getattr(settings, field.name) for field in fields(TuneSettings)}
    budget = Budget(settings.seconds)
    recorder = Recorder(out, kind="tune", settings=asked, budget=budget, say=say)
    with recorder:
        recorder.trace(**environment(device, device_name(device)))
        recorder.describe(kept_in=cache_file(device).name)
        longest = 0.0
        for length, batch in shapes:
            for heads in settings.heads:
                for direction in settings.directions:
                    if not budget.fits(longest):
                        recorder.leave_out(f"T={length} B={batch}, {heads} heads, {direction}", "out of time")
                        continue
                    began = budget.spent
                    found = tune(
                        length=length,
                        batch=batch,
                        heads=heads,
                        dim=settings.head_dim,
                        dtype=DTYPES[settings.dtype],
                        transpose=direction == "transposed",
                        device=device,
                        report=recorder.say,
                    )
                    longest = max(longest, budget.spent - began)
                    row = {"shape": found.shape, "chosen": found.config.name, "microseconds": found.microseconds}
                    recorder.show([row])
                    recorder.keep()
    return recorder.record
