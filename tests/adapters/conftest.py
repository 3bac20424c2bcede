"""Every family of transformers that can be frozen."""

import pytest


@pytest.fixture(params=["qwen3", "qwen2", "llama", "llama-grouped", "mistral", "gpt2", "phi3", "gemma2", "gemma3"])
def family(request):
    """Name of a family, grouped queries or not."""
    return request.param
