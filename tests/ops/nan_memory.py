"""Products inside memory of NaN: a kernel that reads or writes past its operands shows."""

from collections.abc import Callable

import torch
from torch import Tensor


def inside_nan(
    batch: int, heads: int, length: int, dim: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return a `[B, heads, T, D]` view inside NaN-filled memory, and a function that returns the memory around it."""
    buffer = torch.full((batch, length + 5, heads + 2, dim + 4), float("nan"), dtype=dtype).to(device)
    inside = torch.zeros(buffer.shape, dtype=torch.bool, device=device)
    inside[:, :length, 1:-1, :dim] = True
    return buffer[:, :length, 1:-1, :dim].transpose(1, 2), lambda: buffer[~inside]


def wrong_product(product: Callable[..., Tensor], x: Tensor, want: Tensor, limit: float, *, reverse: bool) -> list[str]:
    """Return which limits `product(out=None)` of the heads `x [B, ., T, D]` breaks, causal or with `reverse` adjoint.

    They are its error against `want`, memory around the output, causality, order and repetition. It overwrites x.
    """
    length = x.shape[2]
    out, around = inside_nan(*want.shape, x.dtype, str(x.device))
    first = product()
    # On a device, later calls of the same layout take another way to the same kernel.
    repeated = product() if x.is_cuda else first
    earlier, later = slice(0, length // 2 + 1), slice(length // 2 + 1, None)
    same, other = (later, earlier) if reverse else (earlier, later)
    error = ((first.double() - want).norm() / want.norm()).item()
    if x.is_cuda:
        product(out=out)
    x[:, :, other] = 7.0
    product(out=out)
    checks = {
        f"error {error:.2e}": error <= limit,
        "memory around the output": bool(around().isnan().all()),
        "a repetition differs": torch.equal(repeated, first),
        "not causal": torch.equal(out[:, :, same], first[:, :, same]),
        "inputs do not matter": length == 1 or not torch.equal(out, first),
        "not stored as [B, T, F, D]": first.transpose(1, 2).is_contiguous(),
    }
    return [name for name, holds in checks.items() if not holds]
