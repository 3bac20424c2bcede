"""Fixtures of analyses and scores: a small model whose heads differ, and tokens."""

import pytest
import torch

from saf.models import GPT
from tests.freezing.small_model import make

LENGTH = 24


@pytest.fixture
def model() -> GPT:
    """Three layers of four heads, float64, with queries large enough for uneven attention."""
    network = make(40, length=LENGTH, vocab_size=30).double()
    for block in network.blocks:
        block.attention.o_proj.weight.data *= 10
    return network


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 30, (5, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def heldout() -> torch.Tensor:
    return torch.randint(0, 30, (3, LENGTH), generator=torch.Generator().manual_seed(2))
