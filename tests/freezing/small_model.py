"""A small model whose heads differ, and tokens, for tests of freezing events."""

import torch

from saf.models import GPT, GPTConfig

LENGTH = 48
SHAPE = GPTConfig(vocab_size=60, num_layers=3, num_heads=4, hidden_size=32, max_length=LENGTH)


def make(gain: float = 30.0) -> GPT:
    torch.manual_seed(0)
    model = GPT(SHAPE)
    for block in model.blocks:
        block.attention.q_proj.weight.data *= gain
    return model


def tokens(count: int = 6) -> torch.Tensor:
    return torch.randint(0, SHAPE.vocab_size, (count, LENGTH), generator=torch.Generator().manual_seed(2))
