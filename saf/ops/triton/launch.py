"""Launch a Triton kernel on the device of its tensors, at little cost to the host."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT = 16
MOST = 4096
"""Compiled kernels remembered by argument; more than this means lengths that keep changing."""
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, device: torch.device, **constants: Any) -> None:
    """Run a kernel; Triton launches on the current device, so make that the tensors' one.

    Triton looks at every argument of every call to find the compiled kernel. What it found is remembered here by all
    that it may look at, and launched directly.
    """
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        key = (kernel, device, *map(_looked_at, args), *constants, *constants.values())
        compiled = _compiled.get(key)
        if compiled is None:
            _remember(key, kernel[grid](*args, **constants))
        else:
            rest = [constants[name] for name in kernel.arg_names[len(args) :]]
            compiled[(*grid, 1, 1)[:3]](*args, *rest)


def _remember(key: tuple[Any, ...], compiled: Any) -> None:
    """Keep a compiled kernel; the interpreter has none."""
    if compiled is None:
        return
    if len(_compiled) >= MOST:
        _compiled.clear()
    _compiled[key] = compiled


def _looked_at(argument: Any) -> Any:
    """Return what a kernel may be compiled for: dtype and alignment of memory, blocks of a descriptor, any number."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNMENT == 0
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, argument.padding, *argument.block_shape
    return argument


def cdiv(count: int, size: int) -> int:
    """Return how many blocks of `size` cover `count`, as a plain int."""
    return -(-count // size)
