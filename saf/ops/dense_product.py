"""The product of stored patterns and values."""

import torch
from torch import Tensor


def dense_product(weights: Tensor, value: Tensor, rows: int) -> Tensor:
    """Return `P V` of the last `rows` positions: `weights [F, >=T, >=T]`, `value [B, F, T, D]` to `[B, F, rows, D]`."""
    length = value.shape[-2]
    if not torch.compiler.is_compiling():
        return torch.einsum("fqk,bfkd->bfqd", weights[:, length - rows : length, :length], value)
    # Compiled, a copy by index: a slice may be the whole array, which the compiler would make a case of its own.
    key = torch.arange(length, device=value.device)
    query = torch.arange(length - rows, length, device=value.device)
    return torch.einsum("fqk,bfkd->bfqd", weights[:, query[:, None], key], value)
