"""A small model whose heads differ, and tokens, for tests of freezing events."""

from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from saf.freeze_config import unfitted_reason
from saf.models import GPT, GPTConfig
from saf.targets import Storage

LENGTH = 48
SHAPE = GPTConfig(vocab_size=60, num_layers=3, num_heads=4, hidden_size=32, max_length=LENGTH)


def make(gain: float = 30.0, *, length: int = LENGTH, **changes: int) -> GPT:
    torch.manual_seed(0)
    model = GPT(replace(SHAPE, max_length=length, **changes))
    for block in model.blocks:
        block.attention.q_proj.weight.data *= gain
    return model


def tokens(count: int = 6, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, SHAPE.vocab_size, (count, length), generator=torch.Generator().manual_seed(2))


def accepting(pattern: str = "mean", storage: Storage = "compact") -> dict[str, Any]:
    """Settings of FreezeConfig that accept any fit, where patterns are fitted."""
    return {} if unfitted_reason(storage, pattern) else {"max_fit_kl": 100}


def fluent():
    """A model whose predictions are sharp and hang on its attention."""
    model = make()
    for block in model.blocks:
        block.attention.k_proj.weight.data *= 5
        block.attention.o_proj.weight.data *= 30
    model.norm.weight.data *= 20
    return model


def loss(model, text):
    with torch.no_grad():
        logits = model(text)[:, :-1].double()
    return float(cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()))
