"""`measure`: a whole benchmark from its settings to its record."""

from pathlib import Path
from typing import Any

from saf.bench.context import Context
from saf.bench.environment import environment
from saf.bench.flex import FLEX
from saf.bench.free import free_backend
from saf.bench.grids import kind_of, points_of
from saf.bench.model_points import measure_models
from saf.bench.op_points import measure_operators
from saf.bench.recorder import Recorder, Say, say_on_stderr
from saf.bench.settings import ModelSettings, OpSettings, Settings
from saf.bench.shape import shape_of
from saf.bench.timing import GRAPH, Budget, ways_of
from saf.errors import InputError
from saf.machine.execution import Execution
from saf.ops import BACKENDS
from saf.ops.live import KERNELS


def measure(settings: Settings, *, out: Path | None = None, say: Say = say_on_stderr) -> dict[str, Any]:
    """Run a benchmark and return its record, written to `out` after every point.

    Raises:
        InputError: Settings that name something unknown or have no effect here, or `out` exists.
        UnsupportedError: A device that is not there.
    """
    budget = Budget(settings.seconds)
    _check_names(settings)
    points = points_of(settings)
    execution = Execution.of(settings.device, compile=settings.compile)
    recorder = Recorder(out, kind=kind_of(settings), settings=settings.to_dict(), budget=budget, say=say)
    _check_compile(settings, execution)
    context = Context(settings, execution, recorder)
    with recorder, free_backend():
        recorder.trace(**environment(execution.device, execution.device_name))
        if isinstance(settings, OpSettings):
            measure_operators(context, settings, points)
        elif isinstance(settings, ModelSettings):
            measure_models(context, settings, points)
    return recorder.record


def _check_names(settings: Settings) -> None:
    """Raise InputError for names nothing answers to."""
    known = ("auto", FLEX, *KERNELS)
    for name in (*settings.kernels, *(settings.others or ())):
        if name not in known:
            raise InputError(f"unknown attention kernel {name!r}; expected one of {', '.join(known)}")
    for name in settings.backends:
        if name not in BACKENDS:
            raise InputError(f"unknown backend {name!r}; expected one of {', '.join(BACKENDS)}")
    if isinstance(settings, OpSettings | ModelSettings):
        shape_of(settings.shape if isinstance(settings, OpSettings) else settings.model, 1)


def _check_compile(settings: Settings, execution: Execution) -> None:
    """Raise InputError for settings that need compiled models, or that have nothing to compile."""
    flex = FLEX in (*settings.kernels, *(settings.others or ()))
    if flex and execution.device.type == "cuda" and not execution.compile:
        raise InputError("flex attention is a kernel only where it is compiled; use --compile on, or leave flex out")
    if isinstance(settings, ModelSettings) and settings.precompile and not execution.compile:
        raise InputError("precompile has no effect where models are not compiled; use --compile on, or leave it out")
    if isinstance(settings, OpSettings) and settings.compile == "on" and not flex:
        if "layer" not in settings.parts:
            raise InputError("compile='on' has no effect on frozen heads alone, one operator each; use --compile auto")
        if GRAPH not in ways_of(settings.graphs, execution.device):
            raise InputError("compile='on' has no effect on calls, which are eager; use --compile auto, or time graphs")
