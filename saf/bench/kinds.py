"""The kinds of benchmarks: another one is a folder and a line here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saf.bench.accuracy.errors import ErrorsKind
from saf.bench.freezing.calibration import CalibrationKind
from saf.bench.harness.kind import Benchmark, Kind, SpeedKind
from saf.bench.harness.measured import Group
from saf.bench.harness.recorder import Say, say_on_stderr
from saf.bench.harness.settings import BenchSettings
from saf.bench.model.attention import AttentionKind
from saf.bench.model.compiling import CompileKind
from saf.bench.model.decode import DecodeKind
from saf.bench.model.finetune import FinetuneKind
from saf.bench.model.measuring import ModelKind
from saf.bench.model.nanogpt import NanoGPTKind
from saf.bench.model.prefill import PrefillKind
from saf.bench.model.update import UpdateKind
from saf.bench.operator.operator import OperatorKind
from saf.errors import InputError
from saf.machine.processes import group_place

MODEL_KINDS: dict[str, ModelKind[Any]] = {
    kind.name: kind for kind in (UpdateKind(), FinetuneKind(), PrefillKind(), AttentionKind(), DecodeKind())
}
"""Those whose arms are whole models, which may run in processes of their own."""
SPEED_KINDS: dict[str, SpeedKind[Any]] = {**MODEL_KINDS, OperatorKind.name: OperatorKind()}
"""Those that compare arms."""
BENCHMARKS: dict[str, Benchmark[Any]] = {
    **SPEED_KINDS,
    CalibrationKind.name: CalibrationKind(),
    ErrorsKind.name: ErrorsKind(),
}
"""Those that `saf bench` measures."""
KINDS: dict[str, Kind] = {
    UpdateKind.name: BENCHMARKS[UpdateKind.name],
    NanoGPTKind.name: NanoGPTKind(),
    CompileKind.name: CompileKind(),
    **BENCHMARKS,
}
"""Those that there are records of, in the order of documents."""


def measure(settings: BenchSettings, *, out: Path | None = None, say: Say = say_on_stderr) -> dict[str, Any]:
    """Run the benchmark that takes these settings and return its record, written to `out` after every point.

    Raises:
        InputError: Settings that name something unknown or have no effect here, `out` exists, or several processes for
            what one measures.
        UnsupportedError: A device that is not there.
    """
    processes = group_place()[1]
    if processes > 1 and not BENCHMARKS[settings.kind].shared:
        raise InputError(f"{processes} processes were started, and one measures {settings.kind}: start one")
    return BENCHMARKS[settings.kind].measure(settings, out=out, say=say)


def compares_arms(record: Mapping[str, Any]) -> bool:
    """Return whether a record's rows are arms beside baselines, which figures draw as bars."""
    return record.get("kind") in SPEED_KINDS


def groups_of(record: Mapping[str, Any], *, file: str = "") -> list[Group]:
    """Return a record's rows in groups of what one baseline is compared with; none of a kind that compares no arms."""
    kind = SPEED_KINDS.get(str(record.get("kind")))
    return [] if kind is None else kind.groups(record, file=file)
