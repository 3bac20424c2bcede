"""The oracle: dense patterns, eager PyTorch, any floating dtype; every other backend is compared with it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from saf.ops.backend import Backend, Slots, Tables
from saf.ops.heads import dense_product, dense_rows, row_product, take_heads
from saf.ops.positions import QueryRows
from saf.patterns import CompactPattern, Pattern


class Reference(Backend):
    """Execute frozen heads as one dense matrix product a head."""

    decodes = True
    in_autograd = True
    trains = True

    def supports(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why values of `dtype` cannot be mixed; None for every floating dtype."""
        return None if dtype.is_floating_point else f"values must be floating point, got {dtype}"

    def describe(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return in words how it runs."""
        return "dense T x T patterns and a matrix product per head (the oracle: exact, slow, large)"

    def prepare(
        self, patterns: Sequence[Pattern], dtype: torch.dtype, device: torch.device, kv_head: Slots = None
    ) -> Tables:
        """Return `weights [F, T, T]`: Eq. (3) computed in float64, then rounded to `dtype`."""
        return {"weights": torch.stack([_weights(one).to(device=device, dtype=dtype) for one in patterns])}

    def forward(self, value: Tensor, heads: tuple[int, ...], tables: Tables) -> Tensor:
        """Return `P V`."""
        return dense_product(tables["weights"], take_heads(value, heads))

    def rows(self, value: Tensor, heads: tuple[int, ...], tables: Tables, rows: QueryRows) -> Tensor:
        """Return rows of `P V`."""
        return row_product(dense_rows(tables), value, heads, rows)

    def untrainable(self, alpha: Tensor, rho: Tensor, dtype: torch.dtype) -> str | None:
        """Return None: any logits can be trained here."""
        return None

    def forward_trainable(self, value: Tensor, alpha: Tensor, rho: Tensor) -> Tensor:
        """Return `P V`; P is computed in float64, the product in float32 at least, and autograd does the rest."""
        length = value.shape[-2]
        position = torch.arange(length, device=value.device)
        lag = position[:, None] - position
        scores = alpha.double()[:, None, :length] + rho.double()[:, lag.clamp(min=0)]
        weights = scores.masked_fill(lag < 0, -torch.inf).softmax(-1)
        wide = torch.promote_types(value.dtype, torch.float32)
        return (weights.to(wide) @ value.to(wide)).to(value.dtype)


def _weights(pattern: Pattern) -> Tensor:
    """Return P, `[T, T]`, a compact one normalised anew in float64."""
    compact = pattern.compact()
    if compact is None:
        return pattern.dense()
    return CompactPattern.from_parameters(compact.alpha.double(), compact.rho.double()).dense()
