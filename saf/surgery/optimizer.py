"""What an edit of a model asks of its optimiser, and does to it.

Its moments follow the rows of the weights (`saf.surgery.rows`), or are refused where they were left behind: fused
kernels do not check shapes. The logits of trainable patterns join it without weight decay, and leave it again.
"""

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from saf.errors import InputError, UnsupportedError

_OWN = ("params", "param_names", "weight_decay")
"""What a group of parameters does not share with the group that its settings are copied to."""


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the PyTorch optimiser under wrappers such as accelerate's."""
    while optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        if not hasattr(optimizer, "optimizer"):
            raise InputError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}")
        optimizer = optimizer.optimizer
    return optimizer


def check_optimizer(optimizer: torch.optim.Optimizer | None, parameters: Iterable[Tensor]) -> None:
    """Raise unless the optimiser holds the parameters' training state in a form that can be carried by rows."""
    if optimizer is None:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in parameters:
        if parameter.requires_grad and id(parameter) not in held:
            raise InputError(
                "this optimizer does not hold the model's attention weights; pass the one that trains them"
            )
        for name, state in optimizer.state.get(parameter, {}).items():
            if isinstance(state, Tensor) and state.dim() > 0 and state.shape != parameter.shape:
                kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
                raise UnsupportedError(
                    f"{kind} keeps {name!r} of shape {tuple(state.shape)} for a weight of shape "
                    f"{tuple(parameter.shape)}; only state of the weight's own shape can be carried by heads"
                )


class StaleMoments:
    """Hold parameters edited without their optimiser, weakly, until the first step that is in order.

    PyTorch offers no other place to see an optimiser that was not passed than a hook before every optimiser's step.
    It is registered by the first such edit and does nothing while no parameter is watched.
    """

    def __init__(self):
        self.shapes = WeakTensorKeyDictionary()
        self.handle: RemovableHandle | None = None

    def watch(self, parameter: Tensor) -> None:
        """Remember the shape that a parameter is about to lose."""
        self.shapes[parameter] = {*(self.shapes.get(parameter) or ()), parameter.shape}
        if self.handle is None:
            self.handle = register_optimizer_step_pre_hook(self.check)

    def check(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raise InputError when the optimiser holds a watched parameter's state in a shape that it no longer has."""
        if not len(self.shapes):
            return
        mine = [p for group in optimizer.param_groups for p in group["params"] if p in self.shapes]
        for parameter in mine:
            for name, state in optimizer.state.get(parameter, {}).items():
                if not isinstance(state, Tensor) or state.shape == parameter.shape:
                    continue
                if state.shape in self.shapes[parameter]:
                    raise InputError(
                        f"{type(optimizer).__name__} keeps {name!r} of shape {tuple(state.shape)} for an edited "
                        f"weight of shape {tuple(parameter.shape)}; pass optimizer= to install_ and uninstall_, or "
                        "make a new optimizer"
                    )
        for parameter in mine:
            del self.shapes[parameter]


watch_stale_moments = StaleMoments().watch

_edited_with = WeakTensorKeyDictionary()
"""The optimiser whose moments followed the last edit of a parameter, held weakly."""


def remember_optimizer(parameter: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Remember that an edit of a parameter took this optimiser along."""
    _edited_with[parameter] = weakref.ref(optimizer)


def check_left_behind(parameters: Iterable[Tensor]) -> None:
    """Raise InputError when an optimiser that followed the last edit still has moments of one of the parameters."""
    found = [parameter for parameter in parameters if _has_moments(parameter)]
    if not found:
        return
    # A scheduler and its optimiser hold one another: dropped ones live on until they are collected.
    gc.collect()
    if any(map(_has_moments, found)):
        raise InputError(
            "these heads were frozen together with an optimizer, whose moments would be left behind; pass it as "
            "optimizer=, even if it is not used any more"
        )


def _has_moments(parameter: Tensor) -> bool:
    """Return whether the optimiser that followed the last edit of a parameter still has its moments."""
    reference = _edited_with.get(parameter)
    optimizer = None if reference is None else reference()
    if optimizer is None:
        return False
    state = optimizer.state.get(parameter, {}).values()
    return any(isinstance(one, Tensor) and one.shape == parameter.shape for one in state)


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
    """Return whether two settings of parameter groups are equal; tensors, as learning rates may be, by value."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other or float(one) == float(other)
    return one == other


def _scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a scheduler of PyTorch was made for the optimiser; it marks the step it watches."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")
