"""What the benchmark of interventions is asked to measure, and at which points."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from saf.arguments import at_least, check_fields
from saf.bench.harness.settings import BenchSettings, Point, parse_shape
from saf.errors import InputError
from saf.models import preset
from saf.settings import documented

FEWEST = 3
"""Warm interventions without which nothing is reported: the fewest whose median one slow one does not move."""
POINTS = {"tiny": (256, 16), "124m": (4096, 32), "774m": (4096, 32), "1b": (8192, 16)}
"""Context and sequences of each preset, where no points are given."""


@documented
@dataclass(kw_only=True)
class CalibrationSettings(BenchSettings):
    """Measure the whole intervention, calibration to installation, beside a dense collection."""

    kind: ClassVar[str] = "calibration"
    model: str = "124m"
    """Preset of the model's shape; its weights are random, with some structure."""
    model_folder: Path | None = None
    """A trained model instead: a checkpoint, a run (its newest checkpoint), or a folder written by saf.save."""
    data: Path | None = None
    """Calibrate on text of this data folder; random tokens if not given."""
    points: tuple[str, ...] = ()
    """Shapes, as context x sequences: 4096x32, which is what the 124m model has; 8192x16 the 1b model."""
    rates: tuple[float, ...] = (0.25,)
    """Shares of heads to freeze; none, to fit the heads of --statistics alone."""
    batch_size: int = 8
    """Sequences in a forward pass."""
    repeats: int = 5
    """Timed interventions, each on the model as it was; 3 at least. One more before them is the first use."""
    fit_all: bool = True
    """Also fit all heads, whatever the rates."""
    dense_layers: int = 2
    """Layers collected densely too, for comparison; the time of all is extrapolated from them. 0 is none."""
    statistics: Path | None = None
    """Also fit all heads of this file: .npz of marginals and entropies, or what AttentionStatistics.save wrote."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto is bf16 autocast on CUDA and fp32 on CPU."""
    seed: Annotated[int, at_least(0)] = 0
    """Of weights and tokens."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """CUDA if there is one."""
    seconds: float | None = None
    """Stop cleanly when another measurement would not end within this, and say what was left out."""

    def __post_init__(self):
        """Raise InputError naming the first field that cannot be used."""
        check_fields(self)
        rules = {
            "repeats": (self.repeats >= FEWEST, f"at least {FEWEST}"),
            "batch_size": (self.batch_size >= 1, "at least 1"),
            "dense_layers": (self.dense_layers >= 0, "at least 0"),
            "rates": (all(0 < rate <= 1 for rate in self.rates), "shares in (0, 1]"),
            "seconds": (self.seconds is None or self.seconds > 0, "above 0"),
        }
        for name, (usable, expected) in rules.items():
            self._require(name, usable, expected)
        if not self.rates and self.statistics is None:
            raise InputError("nothing to measure: give rates, or a file of statistics to fit")
        if self.data is not None and self.model_folder is None:
            raise InputError("data is text for a trained model; give model_folder too, or leave data out")


def points_of(settings: CalibrationSettings) -> list[Point]:
    """Return the points asked for, or that of the model; raise InputError for what is not context x sequences."""
    if settings.points:
        return [Point(shape[0], shape[1]) for shape in (parse_shape(text, "calibration") for text in settings.points)]
    if settings.model_folder is None:
        preset(settings.model)
    if settings.model_folder is not None or settings.model not in POINTS:
        raise InputError("say at which context and number of sequences to calibrate, such as --points 4096x32")
    return [Point(*POINTS[settings.model])]
