"""Families of transformers that can be frozen, and a frozen model."""

import pytest
import torch

import saf
from saf.patterns import DensePattern
from saf.synthetic import synthetic_patterns
from tests.transformers_models import FAMILIES, FROZEN, LENGTH, make


@pytest.fixture(params=FAMILIES)
def family(request):
    """Name of a family, grouped queries or not."""
    return request.param


@pytest.fixture(params=["qwen3", "llama", "gpt2", "phi3", "gemma3"])
def shape(request):
    """A family of each shape: separate and fused projections, grouped queries or not, windows."""
    return request.param


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def frozen(request):
    """A frozen model, of one KV head each or grouped, with its family's name; of its patterns one is dense."""
    model = make(request.param)
    drawn = torch.Generator().manual_seed(4)
    compact = synthetic_patterns(len(FROZEN) - 1, LENGTH, drawn)
    weights = torch.rand(LENGTH, LENGTH, generator=drawn).tril()
    dense = DensePattern(weights / weights.sum(-1, keepdim=True))
    saf.install_(model, FROZEN, [dense, *(compact[number] for number in range(len(FROZEN) - 1))])
    return request.param, model
