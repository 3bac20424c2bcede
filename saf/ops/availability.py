"""What is installed here, asked without importing it, and where kernels run."""

from importlib.util import find_spec

import torch

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TRITON = find_spec("triton") is not None


def has_triton() -> bool:
    """Whether Triton is installed; it is imported only when a kernel runs.

    Asked once, at import: compiled code calls this while it is traced, where a search for a module breaks the graph.
    """
    return _TRITON


def uses_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether operators on operands of `dtype` run as Triton kernels on this device."""
    return device.type == "cuda" and dtype in TRITON_DTYPES and has_triton()
