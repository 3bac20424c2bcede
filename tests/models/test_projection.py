"""Live and frozen heads projected together and apart: the same outputs and gradients."""

import pytest
import torch
from torch import nn

from saf.errors import UnsupportedError
from saf.heads import HeadSet
from saf.models import GPT, GPTConfig
from saf.ops import attention as projected
from saf.surgery import install_
from tests.ops.hard_patterns import hard_patterns

LENGTH = 40


def frozen_model() -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, num_layers=2, num_heads=4, hidden_size=32, max_length=LENGTH))
    install_(model, HeadSet([(0, 1), (0, 3), (1, 0)]), hard_patterns(["decay", "ripple", "local"], LENGTH))
    return model.double()


def products(model: GPT, joined: int, monkeypatch) -> tuple[int, list[torch.Tensor]]:
    """Return how often heads were joined before one product, and the loss with its gradients."""
    together = []
    original = projected.join_heads
    monkeypatch.setattr(projected, "JOINED", joined)
    monkeypatch.setattr(projected, "join_heads", lambda *parts: together.append(1) or original(*parts))
    tokens = torch.randint(0, 64, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    monkeypatch.undo()
    return len(together), [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def test_training_projects_few_tokens_together_and_many_apart(monkeypatch):
    model = frozen_model()
    size = 2 * LENGTH * 32
    (always, joined), (never, apart) = (products(model, most, monkeypatch) for most in (size, size - 1))
    assert (always, never) == (2, 0)
    for one, other in zip(joined, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("grad", [True, False])
def test_a_wrapped_projection_is_refused_at_every_size(grad):
    model = frozen_model()
    layer = model.attention_layers()[0]
    layer.o_proj = nn.Sequential(layer.o_proj)
    with torch.set_grad_enabled(grad), pytest.raises(UnsupportedError, match="merge adapters"):
        model(torch.randint(0, 64, (1, 4)))
