"""The product of stored patterns and values."""

import torch
from torch import Tensor


def dense_product(weights: Tensor, value: Tensor, rows: int) -> Tensor:
    """Return `P V` of the last `rows` positions: `weights [F, >=T, >=T]`, `value [B, F, T, D]` to `[B, F, rows, D]`."""
    length = value.shape[-2]
    key = torch.arange(length, device=value.device)
    query = torch.arange(length - rows, length, device=value.device)
    # Indices, not a slice: a slice of the whole array is contiguous, which torch.compile would make a case of its own.
    return torch.einsum("fqk,bfkd->bfqd", weights[:, query[:, None], key], value)
