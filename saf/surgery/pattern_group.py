"""Trainable patterns in an optimiser: they join it without weight decay, and leave it again."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from saf.adapters import adapter_for
from saf.errors import UnsupportedError
from saf.patterns import trained_logits

_OWN = ("params", "param_names", "weight_decay")


def pattern_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the key and distance logits that are trained, two parameters `[T]` a head, layer by layer."""
    frozen = [site.frozen for site in adapter_for(model).sites() if site.frozen is not None]
    return [logits for heads in frozen for logits in trained_logits(heads.patterns)]


def check_group(optimizer: torch.optim.Optimizer | None, weight: Tensor) -> None:
    """Raise UnsupportedError when patterns cannot join the optimiser that trains a layer's `weight`."""
    if optimizer is None:
        return
    source = _group_of(optimizer, weight)
    if "param_names" in source:
        raise UnsupportedError("an optimizer of named parameters cannot take patterns; make it of model.parameters()")
    if _undecayed(optimizer, source) is None and _scheduled(optimizer):
        raise UnsupportedError(
            "a learning-rate scheduler counts on this optimizer's groups, and none has the settings of the attention "
            "weights with weight_decay=0, where trainable patterns would join; before making the scheduler, call "
            'optimizer.add_param_group({"params": [], "weight_decay": 0.0})'
        )


def add_logits_(optimizer: torch.optim.Optimizer, logits: Sequence[nn.Parameter], weight: Tensor) -> None:
    """Let the optimiser of a layer's `weight` train logits of its patterns: same settings, no weight decay, no moments.

    They join the group that has these settings already, so that learning-rate schedules reach them; else a new one.
    """
    source = _group_of(optimizer, weight)
    group = _undecayed(optimizer, source)
    if group is None:
        settings = {name: value for name, value in source.items() if name not in _OWN}
        optimizer.add_param_group({**settings, "params": list(logits), "weight_decay": 0.0})
    else:
        group["params"].extend(logits)


def drop_logits_(optimizer: torch.optim.Optimizer, logits: Iterable[nn.Parameter]) -> None:
    """Take logits and their moments out of the optimiser; a group left empty goes too, unless a scheduler has it."""
    gone = {id(parameter) for parameter in logits}
    for group in list(optimizer.param_groups):
        for parameter in [parameter for parameter in group["params"] if id(parameter) in gone]:
            optimizer.state.pop(parameter, None)
        kept = [parameter for parameter in group["params"] if id(parameter) not in gone]
        emptied = bool(group["params"]) and not kept
        group["params"] = kept
        if emptied and not _scheduled(optimizer):
            optimizer.param_groups.remove(group)


def _group_of(optimizer: torch.optim.Optimizer, weight: Tensor) -> dict[str, Any]:
    """Return the group that holds a weight; the first when it is not trained."""
    groups = optimizer.param_groups
    return next((group for group in groups if any(one is weight for one in group["params"])), groups[0])


def _undecayed(optimizer: torch.optim.Optimizer, source: dict[str, Any]) -> dict[str, Any] | None:
    """Return the group with the settings of `source` and no weight decay, itself perhaps; None when there is none."""
    for group in optimizer.param_groups:
        names = (group.keys() | source.keys()) - {*_OWN}
        if group.get("weight_decay", 0) == 0 and all(_same(group.get(name), source.get(name)) for name in names):
            return group
    return None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other or float(one) == float(other)
    return one == other


def _scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scheduler of PyTorch was made for the optimiser; it marks the step it watches."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")
