"""Every family of transformers that can be frozen."""

import pytest


@pytest.fixture(params=["qwen3", "qwen2", "llama", "llama-grouped", "mistral"])
def family(request):
    """Name of a family, grouped queries or not."""
    return request.param
