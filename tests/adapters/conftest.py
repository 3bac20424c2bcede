"""Every family of transformers that can be frozen."""

import pytest
import torch

import saf
from saf.bench.models import synthetic_patterns
from saf.patterns import DensePattern
from tests.adapters.generated import FROZEN


@pytest.fixture(params=["qwen3", "qwen2", "llama", "llama-grouped", "mistral", "gpt2", "phi3", "gemma2", "gemma3"])
def family(request):
    """Name of a family, grouped queries or not."""
    return request.param


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def frozen(request):
    """A frozen model, of one KV head each or grouped, with its family's name; of its patterns one is dense."""
    from tests.transformers_models import LENGTH, make  # which skips where transformers is not installed

    model = make(request.param)
    drawn = torch.Generator().manual_seed(4)
    compact = synthetic_patterns(len(FROZEN) - 1, LENGTH, drawn)
    weights = torch.rand(LENGTH, LENGTH, generator=drawn).tril()
    dense = DensePattern(weights / weights.sum(-1, keepdim=True))
    saf.install_(model, FROZEN, [dense, *(compact[number] for number in range(len(FROZEN) - 1))])
    return request.param, model
