"""The backends by name, and the rule by which `"auto"` picks one."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from saf.errors import InputError, UnsupportedError
from saf.ops import reference
from saf.ops.fused import backend as fused
from saf.ops.toeplitz import backend as toeplitz
from saf.patterns import TrainablePattern


class Backend(Protocol):
    """What a backend module provides; tables are whatever its `prepare` made.

    A backend may have more. `mixed(query, key, value, tables, scale)` computes live heads too, in the same launch, and
    is then its only way. `infer(query, key, value, live_heads, frozen_heads, tables, scale, kernel, projection)` does
    so without gradients, over whole sequences, given the value head of each slot, where `infers(device, dtype, tables)`
    says so; `settle`, given the same but the projection, may return what does so again and its tables (`settled`).
    `forward_trainable(value, alpha, rho, rows)`, logits `[F, >=T]`, gives gradients to key and distance logits, unless
    `untrainable(alpha, rho, dtype)` says why it cannot.
    """

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why this backend cannot run on `device` with values of `dtype`; None when it can."""
        ...

    def describe(self, device: torch.device, dtype: torch.dtype) -> str:
        """Say in words how it runs on `device` with values of `dtype`, where it can."""
        ...

    def prepare(
        self, patterns: Sequence[Any], dtype: torch.dtype, device: torch.device, kv_head: tuple[int, ...] | None
    ) -> dict[str, Any]:
        """Return the tables (tensors, or tuples of ints) that execute one pattern per frozen head.

        `kv_head`, when known, names the value head of every slot of the layer.
        """
        ...

    def forward(self, value: Tensor, tables: dict[str, Any], rows: int) -> Tensor:
        """Mix `value [B, F, T, D]` and return the last `rows` positions."""
        ...


BACKENDS: dict[str, Any] = {"toeplitz": toeplitz, "fused": fused, "reference": reference}
AUTO_ORDER = ("toeplitz", "reference")


def choose_backend(name: str, *, device: torch.device, dtypes: Sequence[torch.dtype], trainable: bool = False) -> str:
    """Resolve a backend name: `"auto"` is the first of `AUTO_ORDER` that supports device and every dtype.

    With `trainable` it must give gradients to key and distance logits too.
    Raises InputError for an unknown name and UnsupportedError when a named backend cannot run: it is never
    replaced by another one.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("device='cuda', but torch sees no CUDA device; use device='cpu'")
    if name == "auto":
        reasons = {}
        for candidate in AUTO_ORDER:
            reason = _obstacle(candidate, device, dtypes, trainable)
            if reason is None:
                return candidate
            reasons[candidate] = reason
        raise UnsupportedError(f"no backend runs on {device} with {list(dtypes)}: {reasons}")
    if name not in BACKENDS:
        raise InputError(f"unknown backend {name!r}; expected 'auto' or one of {sorted(BACKENDS)}")
    if reason := _obstacle(name, device, dtypes, trainable):
        raise UnsupportedError(f"backend {name!r} cannot run: {reason}; use backend='auto' or another one")
    return name


def always_mixes_live(name: str) -> bool:
    """Whether a backend computes live heads in the launch of frozen ones, and has no other way."""
    return hasattr(BACKENDS.get(name), "mixed")


def _obstacle(name: str, device: torch.device, dtypes: Sequence[torch.dtype], trainable: bool) -> str | None:
    if trainable and not hasattr(BACKENDS[name], "forward_trainable"):
        return "it has no gradients for key and distance logits (trainable=True)"
    return next(filter(None, (BACKENDS[name].supports(device, dtype) for dtype in dtypes)), None)


def check_trainable(name: str, patterns: Sequence[TrainablePattern], dtypes: Sequence[torch.dtype]) -> None:
    """Raise UnsupportedError when a backend cannot train one of the patterns with values of one of the dtypes."""
    if not patterns:
        return
    logits = [torch.stack([getattr(one, logit).detach() for one in patterns]) for logit in ("alpha", "rho")]
    for dtype in dtypes:
        if reason := BACKENDS[name].untrainable(*logits, dtype):
            raise UnsupportedError(f"backend {name!r} cannot train these patterns: {reason}")


def explain(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> list[str]:
    """Say in lines which backend `"auto"` takes for this device and dtype, and why not the others."""
    device = torch.device(device)
    lines = [f"rule: the first of {', '.join(AUTO_ORDER)} that supports the device and the dtype"]
    for name in BACKENDS:
        reason = BACKENDS[name].supports(device, dtype)
        how = BACKENDS[name].describe(device, dtype) if reason is None else f"no: {reason}"
        lines.append(f"{name} on {device.type}, {str(dtype).removeprefix('torch.')}: {how}")
    lines.append(f"auto: {choose_backend('auto', device=device, dtypes=[dtype])}")
    return lines
