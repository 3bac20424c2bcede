"""One optimiser update."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saf.errors import DivergenceError
from saf.train.optimizer import set_learning_rate_, step_if_finite_
from saf.train.training import Training


def run_update(training: Training) -> dict[str, Any]:
    """Do one update and return its line for metrics.jsonl.

    The host waits once, for the loss and the gradient norm; the optimiser's step then still runs on the device.

    Raises:
        DivergenceError: Loss or gradient norm is not finite; weights and moments are as before the update.
    """
    began = time.perf_counter()
    cuda = training.execution.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    rate = training.next_learning_rate()
    set_learning_rate_(training.optimizer, rate)
    loss = _accumulate_gradients(training)
    if training.gradient is not None:
        training.gradient.update()
    norm = torch.nn.utils.clip_grad_norm_(training.model.parameters(), training.config.clip)
    watched = torch.stack([loss, norm])
    read = _start_reading(watched)
    step_if_finite_(training.optimizer, watched)
    training.optimizer.zero_grad(set_to_none=True)
    loss_value, norm_value = read()
    seconds = time.perf_counter() - began
    number = training.update + 1
    if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
        raise DivergenceError(
            f"update {number} was not applied: its loss is {loss_value}, its gradient norm {norm_value}"
        )
    if cuda and number >= training.timed_from:
        training.peak_memory = max(training.peak_memory or 0, torch.cuda.max_memory_allocated())
    training.updated_(seconds)
    return {
        "update": number,
        "tokens": number * training.tokens_per_update,
        "loss": loss_value,
        "lr": rate,
        "grad_norm": norm_value,
        "update_seconds": seconds,
    }


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


def _accumulate_gradients(training: Training) -> Tensor:
    """Add up the gradients of the micro-batches' mean losses and return the mean loss, on the device."""
    share = 1.0 / training.config.accumulation
    total = torch.zeros((), device=training.execution.device)
    for _ in range(training.config.accumulation):
        inputs, targets = training.batches.take()
        with training.execution.autocast():
            loss = training.forward(inputs, targets=targets) * share
        loss.backward()
        total += loss.detach()
    return total
