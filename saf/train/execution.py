"""Where and how a run computes: device, precision, compilation."""

import platform
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from saf.errors import UnsupportedError
from saf.evaluate.perplexity import autocast, resolve_precision
from saf.models import GPT
from saf.train.config import TrainConfig


@dataclass(frozen=True)
class Execution:
    """A resolved device, precision ("fp32" or "bf16") and whether the model is compiled."""

    device: torch.device
    precision: str
    compile: bool

    @classmethod
    def of(cls, config: TrainConfig) -> "Execution":
        """Resolve every "auto"; raise UnsupportedError when CUDA is asked for and absent."""
        available = torch.cuda.is_available()
        if config.device == "cuda" and not available:
            raise UnsupportedError('device="cuda", but torch sees no CUDA device; use "cpu" or "auto"')
        device = torch.device("cuda" if available and config.device != "cpu" else "cpu")
        switch = {"on": True, "off": False, "auto": device.type == "cuda"}
        return cls(device, resolve_precision(device, config.precision), switch[config.compile])

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for the forward pass."""
        return autocast(self.device, self.precision)

    def callable(self, model: nn.Module) -> Callable[..., Any]:
        """Return what an update calls: the model, or a compiled wrapper that leaves the model itself alone.

        Call it again whenever heads were frozen: graphs compiled for the old shapes are dropped. The project's own
        decoder compiles as one graph or raises: a broken graph runs, but slower than what is measured.
        """
        if not self.compile:
            return model
        torch._dynamo.reset()
        return torch.compile(model, fullgraph=any(isinstance(module, GPT) for module in model.modules()))

    @property
    def device_name(self) -> str:
        """The accelerator's name, or the processor's architecture."""
        return device_name(self.device)


def device_name(device: torch.device) -> str:
    """Return the accelerator's name, or the processor's architecture with the threads that PyTorch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"
