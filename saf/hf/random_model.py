"""Models of transformers with random weights, at any shape, and filled caches of theirs."""

from typing import Any, cast

import torch
from torch import Tensor, nn


def random_model(
    family: str, *, max_length: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator, **sizes: Any
) -> nn.Module:
    """Return a causal language model of a family (`"Qwen3"`, `"Llama"`) for up to `max_length` tokens.

    Matrices are normal with std 0.02, norms are one, the embedding is the output's matrix too. `sizes` are fields of
    the family's configuration. Weights are drawn from `generator`, on its device's type; global generators are left
    alone.
    """
    import transformers

    of_config, of_model = (getattr(transformers, f"{family}{kind}") for kind in ("Config", "ForCausalLM"))
    config = of_config(**sizes, max_position_embeddings=max_length, tie_word_embeddings=True, use_cache=False)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        model = cast(nn.Module, of_model(config))
    model.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02, generator=generator)
            else:
                parameter.fill_(1.0)
    return model


def random_cache(model: Any, token: Tensor, places: int) -> tuple[Any, Tensor]:
    """Return a cache of fixed size full of drawn keys and values, and how far its layers are filled, `[layers]`.

    A pass of `token [B, 1]` allocates the cache. Each layer's count is a view of the tensor returned, so that one
    kernel resets all of them.
    """
    from transformers import StaticCache

    cache: Any = StaticCache(config=model.config, max_cache_len=places)
    with torch.no_grad():
        model(input_ids=token, past_key_values=cache)
    filled = torch.zeros(len(cache.layers), dtype=torch.long, device=token.device)
    generator = torch.Generator(token.device).manual_seed(0)
    for layer, own in zip(cache.layers, filled.unbind(), strict=True):
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
        layer.cumulative_length = own
    return cache, filled
