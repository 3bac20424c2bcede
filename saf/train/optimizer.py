"""AdamW: which parameters decay, its learning rate over the schedule, and its state by parameter name."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from saf.errors import CheckpointError, InputError

STEP, MOMENTS = "step", ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of a parameter, under its own names."""


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups: matrices decay (the tied embedding is one), vectors do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, *, betas: tuple[float, float] = (0.9, 0.95), weight_decay: float = 0.1) -> AdamW:
    """Return the paper's AdamW; each update sets the learning rate.

    The fused kernel runs on CPU and CUDA and skips an update on the device when told that a value is not finite.
    """
    return _adamw(parameter_groups(model, weight_decay), betas)


def _adamw(groups: list[dict[str, Any]], betas: Sequence[float]) -> AdamW:
    return AdamW([g for g in groups if g["params"]], lr=0.0, betas=(betas[0], betas[1]), fused=True)


def learning_rate(progress: float, *, peak: float, min_ratio: float = 0.1, warmup: float = 0.0) -> float:
    """Return the learning rate at `progress` in [0, 1]; below 0 and above 1 it stays at the ends.

    `warmup` is the share of the schedule that rises linearly from 0 to `peak`; the rest is half a cosine from
    `peak` to `peak * min_ratio`.

    >>> [round(learning_rate(p, peak=1.0, warmup=0.1), 3) for p in (0.05, 0.1, 0.55, 1.0)]
    [0.5, 1.0, 0.55, 0.1]
    """
    if not 0 <= warmup < 1:
        raise InputError(f"warm-up is a share of the schedule in [0, 1); got {warmup}")
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return peak * progress / warmup
    decay = (progress - warmup) / (1 - warmup)
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * decay)))


def rise_after_event(since: int | None, *, over: int) -> float:
    """Return the share of the scheduled rate that the update to come takes, `since` updates after the newest event.

    It rises linearly over as many updates as asked for; without an event, or over none, it is the whole rate.

    >>> [rise_after_event(since, over=4) for since in (None, 0, 3, 4)]
    [1.0, 0.25, 1.0, 1.0]
    """
    return 1.0 if since is None or over == 0 else min((since + 1) / over, 1.0)


def progress_by_update(update: int, *, updates: int, start: int = 0) -> float:
    """Return the progress of update number `update` (1-based) in a schedule over updates `start + 1 ... updates`.

    >>> progress_by_update(3, updates=4), progress_by_update(3, updates=4, start=2)
    (0.75, 0.5)
    """
    return (update - start) / (updates - start)


def progress_by_share(share: float, *, begin: float = 0.0) -> float:
    """Return the progress after a share of its allowance in a run that began at progress `begin`.

    >>> progress_by_share(0.5, begin=0.5)
    0.75
    """
    return begin + (1 - begin) * min(share, 1.0)


def set_learning_rate_(optimizer: AdamW, rate: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def step_if_finite_(optimizer: AdamW, watched: Tensor) -> None:
    """Step unless a watched value is not finite; weights, moments and step counts then stay as they are.

    The check runs on the device, so the host need not wait for the values before it launches the step.
    """
    # The fused kernels read this attribute, as they do for a gradient scaler.
    optimizer.found_inf = (~torch.isfinite(watched)).any().float()  # type: ignore[attr-defined]
    optimizer.step()


def optimizer_state(optimizer: AdamW, model: nn.Module) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return the groups, as names and settings, and every moment and step count by parameter name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups, tensors = [], {}
    for group in optimizer.param_groups:
        if unknown := [list(p.shape) for p in group["params"] if p not in names]:
            raise CheckpointError(f"the optimiser holds parameters of shapes {unknown} that are not the model's")
        members = [names[parameter] for parameter in group["params"]]
        groups.append(
            {"names": members, "weight_decay": group["weight_decay"], "betas": list(group["betas"]), "lr": group["lr"]}
        )
        for name, parameter in zip(members, group["params"], strict=True):
            tensors |= {f"{name}.{key}": value for key, value in state_of_parameter(optimizer, parameter).items()}
    return groups, tensors


def state_of_parameter(optimizer: AdamW, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the moments and the step count of a parameter; none before its first step.

    A parameter without elements is left out of steps, also where a checkpoint told its count: that is the others'.
    """
    own = dict(optimizer.state.get(parameter, {}))
    if parameter.numel():
        return own
    counts = [state[STEP] for other, state in optimizer.state.items() if other.numel()]
    if not counts:
        return own
    steps = max(counts, key=float)  # of those that an event added since there are fewer
    return {STEP: steps.clone(), **{name: torch.zeros(parameter.shape, device=steps.device) for name in MOMENTS}}


def restore_optimizer(model: nn.Module, groups: list[dict[str, Any]], tensors: dict[str, Tensor]) -> AdamW:
    """Return an AdamW over `model` in the state that `optimizer_state` described.

    Raises:
        CheckpointError: The state names other parameters or other shapes than the model's.
    """
    parameters = dict(model.named_parameters())
    if unknown := [name for group in groups for name in group["names"] if name not in parameters]:
        raise CheckpointError(f"the optimiser state names parameters the model does not have: {unknown[:5]}")
    optimizer = _adamw(
        [{**group, "params": [parameters[name] for name in group["names"]]} for group in groups], groups[0]["betas"]
    )
    for group in groups:
        for name in group["names"]:
            state = {key: tensors[f"{name}.{key}"] for key in (STEP, *MOMENTS) if f"{name}.{key}" in tensors}
            parameter = parameters[name]
            for key, value in state.items():
                if key != STEP and value.shape != parameter.shape:
                    raise CheckpointError(
                        f"optimiser state {name}.{key} has shape {list(value.shape)}, "
                        f"the parameter {list(parameter.shape)}"
                    )
            if state:
                optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in state.items()}
    return optimizer
