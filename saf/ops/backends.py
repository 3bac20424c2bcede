"""The backends by name, and the rule by which `"auto"` picks one."""

from collections.abc import Sequence

import torch

from saf.errors import UnsupportedError, check_name
from saf.ops.backend import Backend
from saf.ops.fused.op import Fused
from saf.ops.linear.op import Linear
from saf.ops.reference import Reference
from saf.ops.toeplitz.op import Toeplitz

BACKENDS: dict[str, Backend] = {
    "toeplitz": Toeplitz(), "linear": Linear(), "fused": Fused(), "reference": Reference(),
}  # fmt: skip
AUTO_ORDER = ("toeplitz", "reference")
"""What `"auto"` tries in turn. `fused` is the paper's execution, there to be measured: `toeplitz` is faster."""


def choose_backend(
    name: str,
    *,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    trainable: bool = False,
    exponential: bool = False,
) -> str:
    """Return a backend's name: `"auto"` is the first of `AUTO_ORDER` that supports device and every dtype.

    With `exponential` patterns in a layer it tries `linear` before these. With `trainable` it must give gradients to
    key and distance logits. Raises InputError for an unknown name and UnsupportedError when a named backend cannot
    run: it is never replaced by another one.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("device='cuda', but torch sees no CUDA device; use device='cpu'")
    check_name("backend", name, ("auto", *BACKENDS))
    reasons = {}
    for candidate in ("linear",) * exponential + AUTO_ORDER if name == "auto" else (name,):
        backend = BACKENDS[candidate]
        found = [reason for dtype in dtypes if (reason := backend.unsupported_reason(device, dtype))]
        if trainable and not backend.trains:
            found.insert(0, "it has no gradients for key and distance logits (trainable=True)")
        if not found:
            return candidate
        reasons[candidate] = found[0]
    if name == "auto":
        raise UnsupportedError(f"no backend runs on {device} with values of dtype {list(dtypes)}: {reasons}")
    raise UnsupportedError(f"backend {name!r} cannot run: {reasons[name]}; use backend='auto' or another one")


def explain(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> list[str]:
    """Return lines that say which backend `"auto"` takes for this device and dtype, and why not the others."""
    device, order = torch.device(device), ", ".join(AUTO_ORDER)
    rule = f"linear for layers with exponential patterns, else the first of {order}, that supports device and dtype"
    lines = [f"rule: {rule}"]
    for name, backend in BACKENDS.items():
        reason = backend.unsupported_reason(device, dtype)
        how = backend.describe(device, dtype) if reason is None else f"no: {reason}"
        lines.append(f"{name} on {device.type}, {str(dtype).removeprefix('torch.')}: {how}")
    return [*lines, f"auto: {choose_backend('auto', device=device, dtypes=[dtype])}"]
