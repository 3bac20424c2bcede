import pytest
import torch

from tests.freezing.small_model import LENGTH, SHAPE, fluent


@pytest.fixture(scope="module")
def text():
    """Sequences that the model itself says, so that any other model predicts them worse."""
    model, generator = fluent(), torch.Generator().manual_seed(3)
    ids = torch.randint(0, SHAPE.vocab_size, (4, 1), generator=generator)
    while ids.shape[1] < LENGTH:
        with torch.no_grad():
            ids = torch.cat([ids, torch.multinomial(model(ids)[:, -1].softmax(-1), 1, generator=generator)], 1)
    return ids
