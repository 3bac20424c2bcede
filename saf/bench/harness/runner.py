"""Measuring one point: every arm made ready, then compared with its baseline in interleaved ABBA pairs."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from saf.bench.harness.arms import Arm, Comparison, arms_of, default_backends, default_kernels, default_others, plan
from saf.bench.harness.kernels import attention_kernels, kernel_seen
from saf.bench.harness.pairs import FEWEST, Taken, WorkOf, make_rows, measure_pair
from saf.bench.harness.recorder import Recorder, in_short
from saf.bench.harness.settings import SpeedSettings
from saf.bench.harness.speed_tables import row_line
from saf.machine.execution import Execution
from saf.machine.peaks import Peak, peak_of
from saf.machine.processes import agreed


class Subject(Protocol):
    """Run one arm of one point."""

    def warm_up(self) -> None:
        """Compile and run untimed."""
        ...

    def timed_block(self, variant: str) -> float:
        """Return the milliseconds of one timed block."""
        ...

    def kernels(self) -> list[dict[str, Any]]:
        """Return the kernels of one iteration."""
        ...


Build = Callable[[Arm], Subject]
Describe = Callable[[Arm, str], Mapping[str, Any]]
"""What else a row tells of an arm and a variant."""


class PointRunner:
    """Measure one point; `fields` are what its rows have in common."""

    def __init__(
        self,
        recorder: Recorder,
        settings: SpeedSettings,
        *,
        name: str,
        fields: Mapping[str, Any],
        device: torch.device,
        peak: Peak | None,
    ):
        self.recorder = recorder
        self.settings = settings
        self.name = name
        self.fields = fields
        self.device = device
        self.peak = peak

    def run(
        self,
        comparisons: Sequence[Comparison],
        build: Build,
        *,
        variants: Sequence[str],
        work: WorkOf,
        describe: Describe = lambda *_: {},
    ) -> None:
        """Measure and record; an arm that cannot run is left out with its reason."""
        subjects = self._ready(comparisons, build)
        possible = [c for c in comparisons if c.baseline in subjects and c.arm in subjects]
        taken: Taken = {(c, variant): [] for variant in variants for c in possible}
        longest = 0.0
        for number in range(self.settings.pairs):
            if not self.recorder.budget.fits(longest):
                self.recorder.leave_out(self.name, f"pairs {number + 1} to {self.settings.pairs}: out of time")
                break
            began = time.perf_counter()
            try:
                with agreed():
                    self._round(taken, subjects, number)
            except Exception as error:
                self.recorder.leave_out(self.name, f"pairs from {number + 1}: {in_short(error)}")
                break
            longest = max(longest, time.perf_counter() - began)
            self.recorder.show(self._rows(taken, work, describe))
        if alone := sum(0 < len(pairs) < self._fewest for pairs in taken.values()):
            self.recorder.leave_out(self.name, f"{alone} comparisons of one pair; {FEWEST} are the fewest recorded")
        rows = self._rows(taken, work, describe)
        self.recorder.show(rows)
        self.recorder.keep()
        for row in rows:
            self.recorder.say(f"{self.name} {row_line(row)}")
        if self.settings.profile:
            self._profile(subjects)

    @property
    def _fewest(self) -> int:
        """Return how many pairs a comparison needs to be recorded."""
        return min(FEWEST, self.settings.pairs)

    def _ready(self, comparisons: Sequence[Comparison], build: Build) -> dict[Arm, Subject]:
        """Build all arms, then warm each: building one drops what others had compiled."""
        built: dict[Arm, Subject] = {}
        for arm in arms_of(comparisons):
            self._attempt(arm, lambda arm=arm: built.__setitem__(arm, build(arm)))
        subjects: dict[Arm, Subject] = {}
        longest = 0.0
        for arm, subject in built.items():
            if not self.recorder.budget.fits(longest):
                self.recorder.leave_out(f"{self.name}: {arm.name}", "out of time")
                continue
            began = time.perf_counter()
            if self._attempt(arm, lambda arm=arm, subject=subject: self._warm(arm, subject)):
                subjects[arm] = subject
            longest = max(longest, time.perf_counter() - began)
        return subjects

    def _attempt(self, arm: Arm, action: Callable[[], None]) -> bool:
        """Do it; whatever error stops one arm, in any process, is recorded, and the others go on."""
        try:
            with agreed():
                action()
        except Exception as error:
            self.recorder.leave_out(f"{self.name}: {arm.name}", in_short(error))
            return False
        return True

    def _warm(self, arm: Arm, subject: Subject) -> None:
        began = time.perf_counter()
        subject.warm_up()
        self.recorder.say(f"{self.name} ready: {arm.name}, {time.perf_counter() - began:.1f} s")

    def _profile(self, subjects: Mapping[Arm, Subject]) -> None:
        """Record what ran, after all timing: a profiler that was used once may slow launches down."""
        for arm, subject in subjects.items():
            if arm.control:
                continue
            if not self.recorder.budget.fits(0):
                self.recorder.leave_out(f"{self.name}: kernels of {arm.name}", "out of time")
            else:
                self._attempt(arm, lambda arm=arm, subject=subject: self._kernels(arm, subject))

    def _kernels(self, arm: Arm, subject: Subject) -> None:
        """Record which kernels an arm ran, and say where its attention kernel is not among them."""
        kernels = subject.kernels()
        seen = kernel_seen(arm.live_kernel, kernels, self.device)
        entry = {"arm": arm.name, "kernel_seen": seen, "attention": attention_kernels(kernels)}
        self.recorder.add("kernels", **self.fields, **entry, kernels=kernels)
        if seen is False:
            self.recorder.say(f"{self.name} warning: the kernels of {arm.name} do not show {arm.kernel}")

    def _round(self, taken: Taken, subjects: Mapping[Arm, Subject], number: int) -> None:
        """Time one pair of blocks of each comparison; the round's number decides which arm of a pair runs first."""
        for (comparison, variant), pairs in taken.items():
            baseline, arm = subjects[comparison.baseline], subjects[comparison.arm]
            times = measure_pair(
                lambda baseline=baseline, variant=variant: baseline.timed_block(variant),
                lambda arm=arm, variant=variant: arm.timed_block(variant),
                number,
            )
            pairs.append(times)

    def _rows(self, taken: Taken, work: WorkOf, describe: Describe) -> list[dict[str, Any]]:
        enough = {key: pairs for key, pairs in taken.items() if len(pairs) >= self._fewest}
        rows = make_rows(enough, work=work, peak=self.peak, tolerance=self.settings.tolerance)
        return [{**self.fields, **row, **describe(arm, row["variant"])} for arm, row in rows]


class Context:
    """Hold what every point of one benchmark shares: settings, device, its peaks, and the record."""

    def __init__(self, settings: SpeedSettings, execution: Execution, recorder: Recorder):
        self.settings = settings
        self.execution = execution
        self.recorder = recorder
        self.peak: Peak | None = peak_of(execution.device_name)

    def plan(
        self, rates: Sequence[float], *, others: bool = True, free: bool = True, pruned: bool = False
    ) -> list[Comparison]:
        """Return what to compare at some rates."""
        settings, device = self.settings, self.execution.device.type
        return plan(
            kernels=default_kernels(settings.kernels, device),
            others=default_others(settings.others, device, compiled=self.execution.compile) if others else (),
            backends=default_backends(settings.backends, device),
            rates=rates,
            free=settings.free and free,
            pruned=pruned,
        )

    def runner(self, name: str, fields: dict[str, Any], *, sixteen_bit: bool) -> PointRunner:
        """Return what measures one point; the device's peaks are those of 16-bit operands."""
        peak = self.peak if sixteen_bit else None
        return PointRunner(
            self.recorder, self.settings, name=name, fields=fields, device=self.execution.device, peak=peak
        )
