import pytest
import torch

from saf.statistics import AttentionStatistics
from tests.uneven import LENGTH, heldout, ids, model

__all__ = ["heldout", "ids", "model"]


def plain(variance: torch.Tensor) -> AttentionStatistics:
    """Statistics of which only the variance `[L, H]` means anything."""
    eta = torch.ones(*variance.shape, LENGTH, dtype=torch.float64)
    return AttentionStatistics(
        variance=variance,
        forward_kl=variance,
        eta_abs=eta,
        eta_rel=eta,
        row_entropy=variance,
        length=LENGTH,
        num_sequences=2,
        sequences_hash="",
    )


@pytest.fixture
def statistics():
    return plain
