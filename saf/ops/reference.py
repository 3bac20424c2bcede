"""The oracle of all backends: dense patterns, eager PyTorch, any floating dtype; no gradient code: autograd."""

from collections.abc import Sequence

import torch
from torch import Tensor

from saf.ops.backend import Backend, Tables, ValueHeads
from saf.ops.heads import dense_product, take_heads
from saf.ops.positions import unpadded
from saf.patterns import CompactPattern, Pattern


class Reference(Backend):
    """Execute frozen heads as one dense matrix product a head, of `weights [F, T, T]`."""

    trains = True
    in_autograd = True

    def describe(self, device: torch.device, dtype: torch.dtype) -> str:
        return "dense T x T patterns and a matrix product per head (the oracle: exact, slow, large)"

    def prepare(
        self, patterns: Sequence[Pattern], dtypes: Sequence[torch.dtype], device: torch.device,
        kv_head: ValueHeads = None,
    ) -> dict[torch.dtype, Tables]:  # fmt: skip
        exact, slots = [_weights(one) for one in patterns], {"stored": tuple(range(len(patterns))), "convolved": ()}
        stacked = {dtype: torch.stack([p.to(device=device, dtype=dtype) for p in exact]) for dtype in dtypes}
        return {dtype: {"weights": weights, **slots} for dtype, weights in stacked.items()}

    def forward(self, value: Tensor, heads: tuple[int, ...], tables: Tables, left_pad: Tensor | None = None) -> Tensor:
        return unpadded(lambda x: dense_product(tables["weights"], x), take_heads(value, heads), left_pad)

    def forward_trainable(self, value: Tensor, alpha: Tensor, rho: Tensor) -> Tensor:
        """P is computed in float64, the product in float32 at least, and autograd does the rest."""
        length = value.shape[-2]
        position = torch.arange(length, device=value.device)
        lag = position[:, None] - position
        scores = alpha.double()[:, None, :length] + rho.double()[:, lag.clamp(min=0)]
        weights = scores.masked_fill(lag < 0, -torch.inf).softmax(-1)
        wide = torch.promote_types(value.dtype, torch.float32)
        return (weights.to(wide) @ value.to(wide)).to(value.dtype)


def _weights(pattern: Pattern) -> Tensor:
    """Return P, `[T, T]`, of Eq. (3); a compact one is normalised anew in float64."""
    compact = pattern.compact()
    if compact is None:
        return pattern.dense()
    return CompactPattern.from_parameters(compact.alpha.double(), compact.rho.double()).dense()
