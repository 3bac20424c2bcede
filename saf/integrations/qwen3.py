"""Qwen3 of transformers with random weights, at any shape."""

from typing import Any, cast

import torch
from torch import nn


def random_qwen3(
    *, max_length: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator, **sizes: Any
) -> nn.Module:
    """Return a `Qwen3ForCausalLM` for up to `max_length` tokens; matrices are normal with std 0.02, norms are one.

    `sizes` are fields of `Qwen3Config`. Weights are drawn from `generator`, on its device's type; global generators
    are left alone.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**sizes, max_position_embeddings=max_length, tie_word_embeddings=True, use_cache=False)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        model = cast(nn.Module, Qwen3ForCausalLM(config))
    model.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02, generator=generator)
            else:
                parameter.fill_(1.0)
    return model
