"""Measuring the intervention: stage by stage, warm and at first use, beside a dense collection of the same inputs."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from saf.bench.calibration_point import CalibrationPoint, record_fits
from saf.bench.calibration_settings import CalibrationSettings
from saf.bench.clean_process import clean_process
from saf.bench.environment import environment
from saf.bench.fits import read_goals
from saf.bench.grids import Point, parse_shape
from saf.bench.recorder import Recorder, Say, say_on_stderr
from saf.bench.timing import Budget
from saf.errors import InputError
from saf.machine.execution import Execution
from saf.models import preset

POINTS = {"tiny": (256, 16), "124m": (4096, 32), "774m": (4096, 32), "1b": (8192, 16)}
"""Context and sequences of each preset, where no points are given."""


def measure_calibration(
    settings: CalibrationSettings, *, out: Path | None = None, say: Say = say_on_stderr
) -> dict[str, Any]:
    """Run the benchmark and return its record, written to `out` after every row.

    Raises:
        InputError: Settings that name something unknown, a folder or file that cannot be used, or `out` exists.
        UnsupportedError: A device that is not there.
    """
    budget = Budget(settings.seconds)
    points = points_of(settings) if settings.rates else []
    execution = Execution.of(settings.device, precision=settings.precision, compile="off")
    goals = None if settings.statistics is None else read_goals(settings.statistics)
    recorder = Recorder(out, kind="calibration", settings=settings.to_dict(), budget=budget, say=say)
    with recorder, empty_kernel_cache():
        recorder.trace(**environment(execution.device, execution.device_name))
        if goals is not None:
            fields = {"part": "fit", "of": str(settings.statistics)}
            record_fits(recorder, goals, settings, execution, fields)
        for point in points:
            with clean_process():
                CalibrationPoint(recorder, settings, execution, point).measure()
    return recorder.record


def points_of(settings: CalibrationSettings) -> list[Point]:
    """Return the points asked for, or that of the model; raise InputError for what is not context x sequences."""
    if settings.points:
        return [Point(shape[0], shape[1]) for shape in (parse_shape(text, "calibration") for text in settings.points)]
    if settings.model_folder is None:
        preset(settings.model)
    if settings.model_folder is not None or settings.model not in POINTS:
        raise InputError("say at which context and number of sequences to calibrate, such as --points 4096x32")
    return [Point(*POINTS[settings.model])]


@contextmanager
def empty_kernel_cache() -> Iterator[None]:
    """Give Triton an empty folder for compiled kernels, so that the first use compiles what it needs."""
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="saf-bench-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = before
