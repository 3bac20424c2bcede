"""One optimiser update, and all that it needs: a run makes its updates by it, a benchmark without any run."""

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from saf.adapters import adapter_for
from saf.calibration import QKGradient
from saf.errors import DivergenceError
from saf.evaluate.answers import NO_TARGET
from saf.machine.execution import Execution
from saf.tasks import MicroBatches
from saf.train.graphs import GraphedPasses, check_graphs
from saf.train.optimizer import set_learning_rate_, step_if_finite_
from saf.train.parallel import Alone, Engine, Parallel

RECENT = 8
"""Updates that tell what the next one takes: one in nine is longer than all of them."""


class Updated(NamedTuple):
    """Hold what one update measured."""

    loss: float
    """Loss before the step, nats per target: the mean over the targets of all its micro-batches."""
    grad_norm: float
    """Norm of the gradient before it was clipped."""
    seconds: float
    """What the host waited, the step's own work on the device left out."""


@dataclass(kw_only=True)
class Updater:
    """Make updates of one model; nothing here knows of folders, logs, schedules or where batches come from.

    Several processes make an update together, each of its share of the micro-batches, and all get the same outcome.

    Call `compile_` whenever heads were frozen or made live again: a program of the old shapes is of no use, but for
    layers of the same layout where layers are compiled by themselves.
    """

    model: nn.Module
    optimizer: AdamW
    batches: MicroBatches
    execution: Execution
    accumulation: int
    """Micro-batches of one update that this process takes."""
    clip: float
    """Largest gradient norm; larger gradients are scaled down to it."""
    gradient: QKGradient | None = None
    """Fed after every backward pass; None when no score reads it."""
    done: int = 0
    """Updates done since the model's beginning."""
    parallel: Parallel = field(default_factory=Alone)
    """The processes that make updates together."""
    graphed: bool = False
    """Whether micro-batches are replayed as CUDA graphs; see `saf.train.graphs` for what that is refused."""
    engine: Engine = field(init=False)
    """What updates call and step."""
    forward: Callable[..., Any] = field(init=False)
    """The model as updates call it: compiled, or itself."""
    micro_batch: Callable[[Tensor, Tensor], Tensor] = field(init=False)
    """What adds the gradients of a micro-batch, given inputs and targets, and returns its share of the mean loss."""
    targets: Tensor = field(init=False)
    """Targets of the current update, mean over processes: a scalar that stays in place, as CUDA graphs read it."""
    compiling: bool = field(init=False)
    """Whether the next update compiles, which says nothing about the seconds of those after it."""
    expected_seconds: float = 0.0
    """What the next update is expected to take: as long as the longest of the last `RECENT` since heads changed that
    compiled nothing. Before any it is what is given here; 0 where nothing is known."""
    compile_seconds: float = 0.0
    """What an update that compiles is expected to take beside: what the last one did that compiled, 0 before any."""
    _compiled_in: float = field(init=False, default=0.0)
    _recent: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=RECENT))

    def __post_init__(self):
        """Prepare the callable."""
        self.targets = torch.ones((), dtype=torch.float64, device=self.execution.device)
        self.compile_()

    def compile_(self) -> None:
        """Make the callable of the model as it is now; a compiled one compiles in its first update.

        Graphs of what the model was are thrown away. Raises UnsupportedError where `graphed` cannot be.
        """
        if self.graphed:
            frozen = [site.frozen for site in adapter_for(self.model).sites() if site.frozen is not None]
            trained = any(heads.trainable for heads in frozen)
            check_graphs(self.execution, self.parallel.kind, trained_patterns=trained)
        self.engine = self.parallel.engine(self.model, self.optimizer, self.execution)
        self.forward, self.compiling = self.engine.forward, self.engine.compiles
        self._recent.clear()
        device = self.execution.device
        self.micro_batch = self._pass
        if self.graphed:
            self.micro_batch = GraphedPasses(self._pass, self.model, device, pads=not self.execution.compile)

    @property
    def uncaptured(self) -> int | None:
        """Return how many micro-batches had no graph for their shape since `compile_`; None where none are replayed."""
        return self.micro_batch.uncaptured if isinstance(self.micro_batch, GraphedPasses) else None

    def update(self, learning_rate: float) -> Updated:
        """Do one update with this learning rate.

        The host waits once, for the loss and the gradient norm; the optimiser's step then still runs on the device.

        Raises:
            DivergenceError: Loss or gradient norm is not finite; weights and moments are as before the update.
        """
        began = time.perf_counter()
        set_learning_rate_(self.engine.optimizer, learning_rate)
        loss = self.parallel.mean(self._accumulate_gradients())
        if self.gradient is not None:
            with self.engine.gradients():
                self.gradient.update()
        norm = self.engine.clip_(self.clip)
        watched = torch.stack([loss, norm])
        read = _start_reading(watched)
        step_if_finite_(self.engine.optimizer, watched)
        self.engine.optimizer.zero_grad(set_to_none=True)
        loss_value, norm_value = read()
        seconds = time.perf_counter() - began
        if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
            raise DivergenceError(
                f"update {self.done + 1} was not applied: its loss is {loss_value}, its gradient norm {norm_value}"
            )
        self.done += 1
        self._expect(seconds)
        self.compiling = False
        return Updated(loss_value, norm_value, seconds)

    def _expect(self, seconds: float) -> None:
        """Learn from what an update took: one that compiled tells what compiling takes once the next one is known.

        The last update or an average would be exceeded by every second one, and a run of a given time with them. The
        longest of a few is seldom exceeded, and then by little; a stall is forgotten after as many updates. What it
        costs is that a run may end an update early.
        """
        if self.compiling:
            self._compiled_in = seconds
            return
        if self._compiled_in:
            self.compile_seconds, self._compiled_in = max(0.0, self._compiled_in - seconds), 0.0
        self._recent.append(seconds)
        self.expected_seconds = max(self._recent)

    def _accumulate_gradients(self) -> Tensor:
        """Add up the gradients of this process's share of the mean loss and return that share, on the device.

        The mean is over the targets of the whole update: micro-batches weigh as many as they have. Processes' gradients
        are averaged, so the mean of their shares is the loss.
        """
        micro_batches = [self.batches.take() for _ in range(self.accumulation)]
        counts = torch.stack([(targets != NO_TARGET).sum() for _, targets in micro_batches])
        self.targets.copy_(self.parallel.mean(counts.sum().double()))
        total = torch.zeros((), device=self.execution.device)
        for following, (inputs, targets) in zip(reversed(range(self.accumulation)), micro_batches, strict=True):
            with self.engine.apart() if following else nullcontext():
                total += self.micro_batch(inputs, targets)
        return total

    def _pass(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Add the gradients of a micro-batch's share of the mean loss and return that share, on the device."""
        share = (targets != NO_TARGET).sum() / self.targets
        with self.execution.autocast():
            loss = self.forward(inputs, targets=targets)
        loss = loss * share.to(loss.dtype)
        loss.backward()
        return loss.detach()


def _start_reading(values: Tensor) -> Callable[[], list[float]]:
    """Begin copying values to the host and return what waits for them, not for work that is queued afterwards."""
    if values.device.type != "cuda":
        return values.tolist
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> list[float]:
        arrived.synchronize()
        return copy.tolist()

    return read
