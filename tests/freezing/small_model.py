"""A small model whose heads differ, and tokens, for tests of freezing events."""

from typing import Any

import torch

from saf.freeze_config import unfitted_reason
from saf.models import GPT, GPTConfig
from saf.targets import Storage

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


def accepting(pattern: str = "mean", storage: Storage = "compact") -> dict[str, Any]:
    """Settings of FreezeConfig that accept any fit, where patterns are fitted."""
    return {} if unfitted_reason(storage, pattern) else {"max_fit_kl": 100}
