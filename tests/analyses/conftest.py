import pytest
import torch

from tests.cli.conftest import arms
from tests.uneven import LENGTH, ids, model

__all__ = ["arms", "ids", "model"]


@pytest.fixture
def windows() -> torch.Tensor:
    return torch.randint(0, 30, (6, LENGTH + 1), generator=torch.Generator().manual_seed(3))
