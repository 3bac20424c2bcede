"""Refusing to leave an optimiser's moments behind: undoing an edit without them, or a step with those of old shapes.

Fused kernels do not check shapes.
"""

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from saf.errors import InputError


class StaleMoments:
    """Parameters edited without their optimiser, held weakly, until the first step that is in order.

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
    reference = _edited_with.get(parameter)
    optimizer = None if reference is None else reference()
    if optimizer is None:
        return False
    state = optimizer.state.get(parameter, {}).values()
    return any(isinstance(one, Tensor) and one.shape == parameter.shape for one in state)
