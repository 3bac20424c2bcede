import pytest
import torch

from saf.heads import HeadSet
from saf.statistics import AttentionStatistics
from saf.targets import target_of

HEADS = HeadSet([(0, 1), (2, 1), (2, 3)])


@pytest.fixture
def heads() -> HeadSet:
    return HEADS


@pytest.fixture
def make_logits():
    """Return a maker of logits `[3, N, T, T]` that share a part over sequences, -inf above the diagonal."""

    def make(count: int = 6, length: int = 20, *, spread: float = 1.5, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        shared = torch.randn(len(HEADS), 1, length, length, generator=generator, dtype=torch.float64)
        own = torch.randn(len(HEADS), count, length, length, generator=generator, dtype=torch.float64)
        return (shared + spread * own).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)

    return make


@pytest.fixture
def make_statistics():
    """Return a maker of statistics of the three heads, with all that a pattern may read, from logits."""

    def variance(values: torch.Tensor) -> torch.Tensor:
        return values.var(1) if values.shape[1] > 1 else torch.zeros_like(values[:, 0])

    def make(logits: torch.Tensor) -> AttentionStatistics:
        pattern = logits.softmax(-1)
        finite = logits.masked_fill(logits == -torch.inf, 0)
        count, length = logits.shape[1], logits.shape[-1]
        mean, sharp = pattern.mean(1), target_of(logits.mean(1).softmax(-1))
        whole = {name: torch.full((3, 4, length), torch.nan).double() for name in ("eta_abs", "eta_rel")}
        whole["row_entropy"] = torch.full((3, 4), torch.nan, dtype=torch.float64)
        for name, values in target_of(mean)._asdict().items():
            whole[name][[layer for layer, _ in HEADS], [head for _, head in HEADS]] = values
        return AttentionStatistics(
            variance=whole["row_entropy"],
            forward_kl=whole["row_entropy"],
            **whole,
            length=length,
            num_sequences=count,
            sequences_hash="",
            collected={
                "mean": mean,
                "row_variance": variance(pattern).sum(-1),
                "logit_mean": finite.mean(1),
                "logit_variance": variance(finite),
                "sharp_eta_abs": sharp.eta_abs,
                "sharp_eta_rel": sharp.eta_rel,
                "sharp_row_entropy": sharp.row_entropy,
            },
            collected_heads=HEADS,
        )

    return make
