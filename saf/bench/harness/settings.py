"""What a benchmark of arms is asked to measure, and the points that it measures at."""

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

from saf.arguments import check_fields
from saf.errors import InputError
from saf.machine.execution import Compile, Device

MICRO_BATCHES = 15
"""Of an update whose point does not say: the paper's, 491,520 tokens at its contexts and sequences."""
QWEN_POINTS = tuple((length, size) for size in (4, 8) for length in (2048, 4096, 8192))
QWEN_RATES = (0.1, 0.2, 0.3, 0.5, 0.75)
"""Both of the paper's table of Qwen3-4B: op measures its heads alone, attention its layers, prefill the whole model."""


@dataclass(kw_only=True)
class BenchSettings:
    """Hold what one kind of benchmark is asked for; a class of settings names its kind, and a command may add to it."""

    kind: ClassVar[str]
    """The benchmark that takes these settings, by its name on the command line."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: the fields of the benchmark's own settings, without a command's."""
        owner = next(each for each in type(self).__mro__ if "kind" in vars(each))
        own = {field.name for field in fields(owner)}
        return {name: value for name, value in asdict(self).items() if name in own}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build settings from `to_dict`'s form, lists standing for tuples."""
        plain: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        return cls(**plain)

    def _require(self, name: str, usable: bool, expected: str) -> None:
        """Raise InputError that says what was expected of a field."""
        if not usable:
            raise InputError(f"{name} must be {expected}; got {getattr(self, name)!r}")

    def _refuse(self, name: str, idle: bool, why: str) -> None:
        """Raise InputError when `idle` for a field that is there and was changed from its default."""
        usual = {field.name: field.default for field in fields(self)}
        if idle and name in usual and getattr(self, name) != usual[name]:
            raise InputError(f"{name}={getattr(self, name)!r} has no effect {why}")


@dataclass(kw_only=True)
class SpeedSettings(BenchSettings):
    """Hold what every benchmark of arms takes; InputError names a field that cannot be used or has no effect."""

    points: tuple[str, ...] = ()
    """Shapes, as context x sequences (x micro-batches of an update): 4096x8 or 4096x8x15. Instead of --grid."""
    rates: tuple[float, ...] = ()
    """Shares of heads to freeze; the grid's when left out. 0 is always measured, as the control."""
    backends: tuple[str, ...] = ()
    """Backends of frozen heads; left out: toeplitz and, on CUDA, fused, the paper's execution."""
    kernels: tuple[str, ...] = ()
    """Attention kernels of live heads, the same on both sides of a ratio; left out: cudnn on CUDA, auto on CPU."""
    others: tuple[str, ...] | None = None
    """More kernels of ordinary attention to measure against the first one: auto, cudnn, flash, efficient, flex. Left
    out: auto, flash and flex on CUDA, none on CPU; --others alone is none."""
    free: bool = True
    """Also measure the bound: frozen heads whose mixing costs nothing."""
    pairs: int = 8
    """Pairs of each arm with its baseline, in ABBA order; 0, beside --memory, times nothing."""
    repeats: int = 1
    """Timed calls in a timed block; the block's time is their median."""
    warmup: int = 3
    """Untimed calls of each arm."""
    tolerance: float = 0.01
    """How far from 1 the ratio of two ordinary models may be before a measurement is refused."""
    seed: int = 0
    """Of weights, inputs, patterns and the choice of heads."""
    device: Device = "auto"
    """CUDA if there is one."""
    compile: Compile = "auto"
    """torch.compile; on for CUDA, off for CPU. layers is for updates: decoder layers by themselves."""
    profile: bool = True
    """Record the kernels that one iteration of each arm runs."""
    seconds: float | None = None
    """Stop cleanly when another measurement would not end within this, and say what was left out."""

    def __post_init__(self):
        """Check what needs neither a device nor a model."""
        check_fields(self)
        for name in ("pairs", "warmup", "seed"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        self._require("repeats", self.repeats >= 1, "at least 1")
        self._require("tolerance", self.tolerance > 0, "above 0")
        self._require("seconds", self.seconds is None or self.seconds > 0, "above 0")
        self._require("rates", all(0 <= rate <= 1 for rate in self.rates), "shares in [0, 1]")
        self._refuse("grid", bool(self.points), "beside points; leave one of them out")


@dataclass(frozen=True)
class Point:
    """Hold one shape: `length` tokens, `batch_size` sequences, and what else the kind of benchmark varies."""

    length: int
    batch_size: int
    accumulation: int | None = None
    precision: str | None = None

    @property
    def name(self) -> str:
        """Return a short label."""
        parts = [f"T={self.length}", f"B={self.batch_size}"]
        parts += [f"x{self.accumulation}"] if self.accumulation else []
        return " ".join([*parts, self.precision or ""]).strip()

    def to_dict(self) -> dict[str, Any]:
        """Return what is set, for JSON."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def parse_shape(text: str, kind: str, *, micro_batches: bool = False) -> tuple[int, ...]:
    """Return the numbers of a point of a kind of benchmark: context, sequences, and the micro-batches of an update.

    Raises InputError when they are not joined by x.
    """
    numbers = [int(part) if part.isdigit() else 0 for part in text.lower().split("x")]
    longest = 3 if micro_batches else 2
    if not 2 <= len(numbers) <= longest or min(numbers) < 1:
        form = "4096x8x15 (context x sequences x micro-batches)" if longest == 3 else "4096x8 (context x sequences)"
        raise InputError(f"a point of {kind} is written {form}; got {text!r}")
    return (*numbers, MICRO_BATCHES) if micro_batches and len(numbers) == 2 else tuple(numbers)
