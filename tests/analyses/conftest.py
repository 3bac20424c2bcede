import pytest
import torch

from tests.cli.conftest import arms
from tests.uneven import LENGTH, ids, model

__all__ = ["arms", "ids", "model"]


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
                return (weights @ value,)

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
