import pytest
import torch

from saf.models import GPT, GPTConfig

LENGTH = 24


@pytest.fixture
def model() -> GPT:
    """Three layers of four heads, float64, with queries large enough for uneven attention."""
    made = GPT(GPTConfig(vocab_size=30, num_layers=3, num_heads=4, hidden_size=32, max_length=LENGTH)).double()
    made.reset_parameters(torch.Generator().manual_seed(0))
    for block in made.blocks:
        block.attention.q_proj.weight.data *= 40
        block.attention.o_proj.weight.data *= 10
    return made


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 30, (5, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def heldout() -> torch.Tensor:
    return torch.randint(0, 30, (3, LENGTH), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def windows() -> torch.Tensor:
    return torch.randint(0, 30, (6, LENGTH + 1), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def run_dense():
    """Return a function that runs the model with some heads' patterns replaced, written out densely.

    It returns the patterns of every layer `[B, H, T, T]` and log-probabilities of the targets.
    """

    def run(model, windows, replaced=None):
        patterns = []
        handles = []
        for layer, block in enumerate(model.blocks):

            def forward(module, args, output, layer=layer):
                query, key, value = args[:3]
                length, dim = query.shape[-2:]
                future = torch.ones(length, length, dtype=torch.bool).triu(1)
                weights = (query @ key.mT / dim**0.5).masked_fill(future, -torch.inf).softmax(-1)
                patterns.append(weights.clone())
                for (at, head), matrix in (replaced or {}).items():
                    if at == layer:
                        weights[:, head] = matrix
                return [weights @ value]

            handles.append(block.attention.live.register_forward_hook(forward))
        try:
            with torch.no_grad():
                logits = model(windows[:, :-1])
        finally:
            for handle in handles:
                handle.remove()
        log_probs = logits.log_softmax(-1).gather(-1, windows[:, 1:, None])[..., 0]
        return patterns, log_probs

    return run
