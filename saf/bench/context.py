"""What every point of one benchmark shares."""

from collections.abc import Sequence
from typing import Any

from saf.bench.arms import Comparison, default_backends, default_kernels, default_others, plan
from saf.bench.recorder import Recorder
from saf.bench.runner import PointRunner
from saf.bench.settings import Settings
from saf.machine.execution import Execution
from saf.machine.peaks import Peak, peak_of


class Context:
    """Settings, device and record."""

    def __init__(self, settings: Settings, execution: Execution, recorder: Recorder):
        self.settings = settings
        self.execution = execution
        self.recorder = recorder
        self.peak: Peak | None = peak_of(execution.device_name)

    def plan(self, rates: Sequence[float], *, others: bool = True, free: bool = True) -> list[Comparison]:
        """Return what to compare at some rates."""
        settings, device = self.settings, self.execution.device.type
        return plan(
            kernels=default_kernels(settings.kernels, device),
            others=default_others(settings.others, device, compiled=self.execution.compile) if others else (),
            backends=default_backends(settings.backends, device),
            rates=rates,
            free=settings.free and free,
        )

    def runner(self, name: str, fields: dict[str, Any], *, sixteen_bit: bool) -> PointRunner:
        """Return what measures one point; the device's peaks are those of 16-bit operands."""
        peak = self.peak if sixteen_bit else None
        return PointRunner(
            self.recorder, self.settings, name=name, fields=fields, device=self.execution.device, peak=peak
        )
