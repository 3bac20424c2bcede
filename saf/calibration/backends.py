"""Which form of the tile loop measures a layer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from saf.errors import InputError, UnsupportedError
from saf.ops.operator import TRITON_DTYPES, has_triton

BACKENDS = ("auto", "strips", "triton")
MAX_DIM = 256


def uses_kernel(query: Tensor, key: Tensor, backend: str, *, strips_wanted: bool) -> bool:
    """Tell whether the Triton kernels measure these queries and keys; "auto" says yes wherever they can.

    Raises:
        InputError: An unknown backend.
        UnsupportedError: "triton" where the kernels cannot run.
    """
    if backend not in BACKENDS:
        raise InputError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if backend == "strips":
        return False
    reason = obstacle(query.device, (query.dtype, key.dtype), query.shape[-1], strips_wanted=strips_wanted)
    if reason and backend == "triton":
        raise UnsupportedError(f"the calibration kernels cannot measure this layer: {reason}; use backend='strips'")
    return not reason


def obstacle(device: torch.device, dtypes: Sequence[torch.dtype], dim: int, *, strips_wanted: bool) -> str:
    """Return why the kernels cannot measure queries and keys of these dtypes with `dim` channels, or nothing."""
    if device.type != "cuda" or not has_triton():
        return f"they need CUDA tensors and Triton, the queries are on {device}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "they need a GPU of compute capability 8.0 or later"
    if dtypes[0] not in TRITON_DTYPES or len(set(dtypes)) > 1:
        return f"queries and keys must be both bfloat16, float16 or float32, got {' and '.join(map(str, dtypes))}"
    if dim > MAX_DIM:
        return f"they take at most {MAX_DIM} channels a head, got {dim}"
    return "whole rows are to be collected, and they hold none" if strips_wanted else ""
