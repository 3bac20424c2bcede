"""Points to measure at, and the grids of the paper's tables."""

from dataclasses import asdict, dataclass
from typing import Any

from saf.bench.settings import OpSettings, PrefillSettings, Settings, UpdateSettings
from saf.errors import InputError

MICRO_BATCHES = 15
TOKENS = 32_768


@dataclass(frozen=True)
class Point:
    """One shape: `length` tokens, `batch_size` sequences, and what else the kind of benchmark varies."""

    length: int
    batch_size: int
    accumulation: int | None = None
    precision: str | None = None

    @property
    def name(self) -> str:
        """A short label."""
        parts = [f"T={self.length}", f"B={self.batch_size}"]
        parts += [f"x{self.accumulation}"] if self.accumulation else []
        return " ".join([*parts, self.precision or ""]).strip()

    def to_dict(self) -> dict[str, Any]:
        """Return what is set, for JSON."""
        return {key: value for key, value in asdict(self).items() if value is not None}


QWEN = tuple((length, size) for size in (4, 8) for length in (2048, 4096, 8192))
GRIDS: dict[str, dict[str, tuple[tuple[int, ...], ...]]] = {
    "update": {
        "contexts": ((4096, 8, 15), (8192, 4, 15), (16384, 2, 15)),
        "batches": ((4096, 2, 60), (4096, 4, 30), (4096, 8, 15)),
        "native": ((4096, 20, 6), (8192, 10, 6), (16384, 5, 6)),
    },
    "prefill": {
        "lengths": tuple((length, 64) for length in (512, 1024, 2048, 4096, 8192, 16384)),
        "batches": tuple((4096, size) for size in (1, 2, 4, 8, 16, 32, 64)),
        "qwen": QWEN,
    },
    "op": {
        "lengths": tuple(
            (length, max(1, TOKENS // length)) for length in (1024, 2048, 4096, 8192, 16384, 32768, 65536)
        ),
        "qwen": QWEN,
    },
}
RATES = {"batches": (0.1, 0.25, 0.5, 0.75), "qwen": (0.1, 0.2, 0.3, 0.5, 0.75)}
USUAL_RATES = (0.25, 0.5)


def kind_of(settings: Settings) -> str:
    """Return the kind of benchmark that settings are for."""
    kinds = {UpdateSettings: "update", PrefillSettings: "prefill", OpSettings: "op"}
    return next(kind for owner, kind in kinds.items() if isinstance(settings, owner))


def points_of(settings: Settings) -> list[Point]:
    """Return the points asked for; raise InputError for one that is not numbers joined by x."""
    kind = kind_of(settings)
    shapes = [parse_shape(text, kind) for text in settings.points] or GRIDS[kind][settings.grid]  # type: ignore[attr-defined]
    return [Point(shape[0], shape[1], shape[2] if kind == "update" else None) for shape in shapes]


def rates_of(settings: Settings) -> tuple[float, ...]:
    """Return the rates asked for, or the grid's; without 0, which is the control."""
    usual = USUAL_RATES if settings.points else RATES.get(settings.grid, USUAL_RATES)  # type: ignore[attr-defined]
    return tuple(rate for rate in dict.fromkeys(settings.rates or usual) if rate > 0)


def parse_shape(text: str, kind: str) -> tuple[int, ...]:
    """Return the numbers of a point; raise InputError when they are not joined by x."""
    numbers = [int(part) if part.isdigit() else 0 for part in text.lower().split("x")]
    longest = 3 if kind == "update" else 2
    if not 2 <= len(numbers) <= longest or min(numbers) < 1:
        form = "4096x8x15 (context x sequences x micro-batches)" if longest == 3 else "4096x8 (context x sequences)"
        raise InputError(f"a point of {kind} is written {form}; got {text!r}")
    return (*numbers, MICRO_BATCHES) if kind == "update" and len(numbers) == 2 else tuple(numbers)
