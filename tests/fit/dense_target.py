from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class DenseTarget:
    """A dense pattern `[..., T, T]` with its marginals and row-averaged entropy, summed without any tile."""

    pattern: Tensor

    @property
    def eta_abs(self) -> Tensor:
        return self.pattern.sum(-2)

    @property
    def eta_rel(self) -> Tensor:
        length = self.pattern.shape[-1]
        return torch.stack([self.pattern.diagonal(-d, -2, -1).sum(-1) for d in range(length)], -1)

    @property
    def row_entropy(self) -> Tensor:
        return -torch.xlogy(self.pattern, self.pattern).sum(-1).mean(-1)

    def kl(self, dense: Tensor) -> Tensor:
        """Row-averaged KL(target || dense), nats, entry by entry."""
        terms = torch.xlogy(self.pattern, self.pattern) - torch.xlogy(self.pattern, dense)
        return terms.nan_to_num(0.0).sum((-2, -1)) / self.pattern.shape[-1]


def floored(weights: Tensor) -> Tensor:
    """Floor causal entries at 1e-9 and normalise the rows, as calibration does."""
    weights = weights.double().clamp(min=1e-9).tril()
    return weights / weights.sum(-1, keepdim=True)


def random_target(*heads: int, length: int, scale: float = 1.0, sequences: int = 1) -> DenseTarget:
    """The mean over sequences of softmax rows with a recency bias and normal logits of the given scale."""
    generator = torch.Generator().manual_seed(0)
    position = torch.arange(length)
    bias = -0.5 * (position[:, None] - position).clamp(min=0).double().log1p()
    logits = scale * torch.randn(sequences, *heads, length, length, dtype=torch.float64, generator=generator)
    causal = (logits + bias).masked_fill(position[:, None] < position, -torch.inf)
    return DenseTarget(floored(causal.softmax(-1).mean(0)))
