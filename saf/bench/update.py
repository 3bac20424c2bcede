"""Timing whole optimiser updates, run by the trainer's own code."""

import time
from typing import Any

import torch
from torch import Tensor

from saf.bench.arms import Arm
from saf.bench.grids import Point
from saf.bench.models import ModelPlan, build_model
from saf.bench.profiling import kernels_of
from saf.bench.settings import UpdateSettings
from saf.bench.synthetic import random_tokens
from saf.bench.timing import wait_for
from saf.bench.work import Work, update_work
from saf.machine.execution import Execution
from saf.train.optimizer import build_optimizer
from saf.train.updater import Updater

VARIANTS = ("update",)
LEARNING_RATE = 6e-8
"""The first update's of the trainer's warm-up to 6e-4 over 10,000 updates: so small that the weights stay ordinary."""
CLIP = 1.0
"""Largest gradient norm, the trainer's default."""
PRELOADED = 4
"""Micro-batches kept on the device and used in turn."""


class Preloaded:
    """Hands out micro-batches that are on the device already, in place of the loader."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]]):
        self._batches = batches
        self._taken = 0

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the next inputs and targets."""
        self._taken += 1
        return self._batches[self._taken % len(self._batches)]


def execution_of(settings: UpdateSettings) -> Execution:
    """Resolve device, precision and compilation as the trainer does."""
    return Execution.of(settings.device, compile=settings.compile)


class UpdateSubject:
    """One model with its optimiser."""

    def __init__(self, settings: UpdateSettings, point: Point, arm: Arm):
        self._settings = settings
        execution = execution_of(settings)
        accumulation = point.accumulation or 1
        plan = ModelPlan.of(settings, point.length)
        vocabulary = plan.config.vocab_size
        model = build_model(plan, arm, device=execution.device)
        generator = torch.Generator().manual_seed(settings.seed)
        tokens = random_tokens(
            min(PRELOADED, accumulation),
            point.batch_size,
            point.length,
            vocabulary,
            generator,
            execution.device,
        )
        self.updater = Updater(
            model=model.train(),
            optimizer=build_optimizer(model),
            batches=Preloaded(tokens),
            execution=execution,
            accumulation=accumulation,
            clip=CLIP,
        )

    def warm_up(self) -> None:
        """Compile and run untimed updates."""
        for _ in range(self._settings.warmup):
            self.updater.update(LEARNING_RATE)

    def block(self, variant: str) -> float:
        """Return the mean milliseconds of `repeats` updates in a row, the device waited for before and after."""
        device, repeats = self.updater.execution.device, self._settings.repeats
        wait_for(device)
        began = time.perf_counter()
        for _ in range(repeats):
            self.updater.update(LEARNING_RATE)
        wait_for(device)
        return 1e3 * (time.perf_counter() - began) / repeats

    def kernels(self) -> list[dict[str, Any]]:
        """Return the kernels of one update."""
        return kernels_of(lambda: self.updater.update(LEARNING_RATE), self.updater.execution.device)


def work_of(settings: UpdateSettings, point: Point, arm: Arm) -> Work:
    """Return the work of one update of an arm."""
    plan = ModelPlan.of(settings, point.length)
    return update_work(
        plan.shape,
        plan.per_layer(arm),
        batch=point.batch_size,
        length=point.length,
        accumulation=point.accumulation or 1,
        free=arm.backend == "free",
    )
