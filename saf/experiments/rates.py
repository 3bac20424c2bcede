"""What the time of a run is foretold from: rates that a scale states, a user names, or ended runs measured."""

from dataclasses import dataclass, replace
from typing import Annotated

from saf.arguments import above, at_least, check_fields

LATER_EVENT = 0.12
"""Of a compilation, what an event after the first one takes of a model that is compiled by layers: its new layouts
(docs/log.md, "How long do updates stand still after an event?")."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Say how fast one GPU is at runs of one size."""

    flops: float
    """FLOP/s of compiled updates, every head counted as live."""
    start: float
    """Seconds of a run beside its updates: its process, data and model, the last checkpoint and the report."""
    compilation: float
    """Seconds of compiling a model whole, at a run's start and again after every event; 0 where nothing is compiled.
    Compiled by layers, a run's later events take `LATER_EVENT` of it."""
    uncompiled: float
    """How many times as long an update takes without compilation."""
    launching: float
    """Seconds that a micro-batch takes without compilation however small it is: its kernels are launched one by one."""
    source: str
    """Where these come from, in words."""

    def seconds(self, flops: float, *, micro_batches: int, events: int, compile: str = "auto") -> float:
        """Return what a run takes of so many FLOPs and micro-batches, with so many events, compiled as a run can be."""
        updates = flops / self.flops
        if compile == "off":
            return self.start + max(updates * self.uncompiled, micro_batches * self.launching)
        later = LATER_EVENT if compile == "layers" else 1.0
        compilations = 1 + min(events, 1) + later * max(events - 1, 0)
        return self.start + updates + compilations * self.compilation

    def described(self) -> str:
        """Return the rates in a sentence."""
        return (
            f"One device: {_speed(self.flops)}, {self.start:g} s a run beside its updates, "
            f"{self.compilation:g} s a compilation, updates {self.uncompiled:g} times as long uncompiled and at least "
            f"{1e3 * self.launching:g} ms a micro-batch ({self.source})."
        )


def _speed(flops: float) -> str:
    """Return FLOP/s in the largest unit that leaves one at least.

    >>> _speed(3.3e14), _speed(1e9)
    ('330 TFLOP/s', '1.0 GFLOP/s')
    """
    size, unit = next(((s, u) for s, u in ((1e12, "T"), (1e9, "G")) if flops >= s), (1e6, "M"))
    return f"{flops / size:,.{0 if flops >= 10 * size else 1}f} {unit}FLOP/s"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Replace what a scale states of its rates by what was measured; None keeps it."""

    tokens_per_second: Annotated[float | None, above(0)] = None
    """Tokens that one GPU trains on in a second, at the shortest context of the plan, compiled and with all heads live;
    other contexts by their arithmetic."""
    compile_seconds: Annotated[float | None, at_least(0)] = None
    """Seconds of compiling a model, at a run's start and after every event."""
    start_seconds: Annotated[float | None, at_least(0)] = None
    """Seconds of a run beside its updates and compilation."""

    def __post_init__(self):
        """Raise InputError for a rate that no GPU has."""
        check_fields(self)

    def applied(self, rates: Rates, *, flops_per_token: float) -> Rates:
        """Return the rates with what was measured; `flops_per_token` is that of the shortest context."""
        changes = {
            "flops": self.tokens_per_second and self.tokens_per_second * flops_per_token,
            "compilation": self.compile_seconds,
            "start": self.start_seconds,
        }
        changes = {name: value for name, value in changes.items() if value is not None}
        return replace(rates, **changes, source=f"{', '.join(sorted(changes))} as named") if changes else rates
