"""Fixtures of analyses and scores: a small model whose heads differ, and tokens."""

import pytest
import torch

from saf.models import GPT, GPTConfig

LENGTH = 24


@pytest.fixture
def model() -> GPT:
    """Three layers of four heads, float64, with queries large enough for uneven attention."""
    network = GPT(GPTConfig(vocab_size=30, num_layers=3, num_heads=4, hidden_size=32, max_length=LENGTH)).double()
    network.reset_parameters(torch.Generator().manual_seed(0))
    for block in network.blocks:
        block.attention.q_proj.weight.data *= 40
        block.attention.o_proj.weight.data *= 10
    return network


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 30, (5, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def heldout() -> torch.Tensor:
    return torch.randint(0, 30, (3, LENGTH), generator=torch.Generator().manual_seed(2))
