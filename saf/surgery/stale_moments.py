"""Refusing the step of an optimiser whose moments were left behind by an edit; fused kernels do not check shapes."""

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
