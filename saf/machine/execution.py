"""Where and how a model computes: device, precision, compilation; resolved once, for runs and benchmarks alike."""

import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from types import FunctionType
from typing import Any, Literal

import torch
from torch import nn

from saf.errors import InputError, UnsupportedError

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "fp32", "bf16"]
Compile = Literal["auto", "on", "off", "layers"]
PRECISIONS = ("auto", "fp32", "bf16")


@dataclass(frozen=True)
class Execution:
    """Hold a resolved device, precision ("fp32" or "bf16"), whether models are compiled, and what updates keep."""

    device: torch.device
    precision: str
    compile: bool
    by_layer: bool = False
    """Whether each decoder layer compiles by itself, one program a layout of heads, in place of the whole model."""
    activation_checkpointing: bool = False
    """Whether updates keep only what enters each decoder layer, and compute the rest again in the backward pass."""

    @classmethod
    def of(
        cls,
        device: str = "auto",
        *,
        precision: str = "auto",
        compile: str = "auto",
        activation_checkpointing: bool = False,
        several_events: bool = False,
    ) -> "Execution":
        """Resolve every "auto": CUDA where there is one, bf16 autocast and compiled there, fp32 and eager on a CPU.

        `compile` is "auto", "on" (the whole model), "layers" (see `by_layer`) or "off". Where heads may change at
        `several_events`, "auto" is "layers" on CUDA: compiled whole, a model stands still after each of them.

        Raises InputError for an unknown precision and UnsupportedError when CUDA is asked for and absent.
        """
        chosen = pick_device(device)
        switch = {"on": True, "layers": True, "off": False, "auto": chosen.type == "cuda"}
        resolved = resolve_precision(chosen, precision)
        by_layer = compile == "layers" or (compile == "auto" and several_events and switch["auto"])
        return cls(chosen, resolved, switch[compile], by_layer, activation_checkpointing)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for the forward pass."""
        return autocast(self.device, self.precision)

    def callable(self, model: nn.Module, *, fullgraph: bool = False) -> Callable[..., Any]:
        """Return what an update calls: the model, or a compiled wrapper that leaves the model itself alone.

        Call it again whenever heads were frozen: graphs compiled for the old shapes are dropped. With `fullgraph` the
        model compiles as one graph or raises: a broken graph runs, but slower than what is measured.
        """
        if not self.compile:
            return model
        torch._dynamo.reset()
        return torch.compile(model, fullgraph=fullgraph)

    @property
    def device_name(self) -> str:
        """Return the accelerator's name, or the processor's architecture."""
        return device_name(self.device)


_copies = count()


def own_program(function: Callable[..., Any]) -> FunctionType:
    """Return a copy of a function without a closure to compile a program of its own from.

    The compiler keeps programs by code object: in every call it tries all that it has of one, it makes the second more
    general in the sizes that differ, and beyond a limit (`recompile_limit`, 8) it raises. So programs that are to know
    nothing of one another have a code object each, and a name each, by which sizes are remembered.
    """
    name = f"{function.__name__}_{next(_copies)}"
    return FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)


def pick_device(name: str) -> torch.device:
    """Return the device that "auto", "cpu" or "cuda" means; raise UnsupportedError for CUDA where there is none."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UnsupportedError('device="cuda", but torch sees no CUDA device; use "cpu" or "auto"')
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def resolve_precision(device: torch.device, precision: str) -> str:
    """Return "fp32" or "bf16"; "auto" is bf16 on CUDA and fp32 elsewhere."""
    if precision not in PRECISIONS:
        raise InputError(f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}")
    if precision == "auto":
        return "bf16" if device.type == "cuda" else "fp32"
    return precision


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return the context in which a model of float32 weights runs in `precision`."""
    if resolve_precision(device, precision) == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def device_name(device: torch.device) -> str:
    """Return the accelerator's name, or the processor's architecture with the threads that PyTorch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"


def visible_devices() -> tuple[str, ...]:
    """Return the CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES names them; none on a CPU."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(name for name in named.split(",") if name)
    return tuple(map(str, range(torch.cuda.device_count())))
