"""The model, optimiser and sequences of a measured intervention."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import AdamW

from saf.bench.freezing.settings import CalibrationSettings
from saf.bench.harness.arms import Arm
from saf.bench.harness.settings import Point
from saf.bench.model.models import ModelPlan, ModelSettings, build_model
from saf.data import TokenData, calibration_windows
from saf.errors import InputError
from saf.models import GPT
from saf.opening import find_model
from saf.train.optimizer import build_optimizer

STRENGTH = (0.2, 1.3)
"""Range over heads of the part of queries and keys that every token has: logits that fall with distance, in ripples."""
CONTENT = (0.5, 4.0)
"""Range over heads of how much queries vary with the token."""
SYNTHETIC = "synthetic: random weights whose heads see distance and content to different degrees; not trained"


def build(settings: CalibrationSettings, point: Point, device: torch.device) -> tuple[GPT, str]:
    """Return a model on `device` that takes the point's length, and a word on its weights.

    Raises InputError for a folder without a model, or with one that takes shorter inputs only.
    """
    if settings.model_folder is None:
        plan = ModelPlan.of(ModelSettings(model=settings.model, seed=settings.seed), point.length)
        model = cast(GPT, build_model(plan, Arm("auto"), device=device))
        structure_(model, torch.Generator().manual_seed(settings.seed))
        return model, SYNTHETIC
    folder = settings.model_folder
    model = cast(GPT, find_model(folder).model(device))
    if model.config.max_length < point.length:
        raise InputError(f"{folder} holds no decoder that takes {point.length} tokens; give shorter --points")
    return model, f"trained: {folder}"


@torch.no_grad()
def structure_(model: GPT, generator: torch.Generator) -> None:
    """Give random weights what makes fits take as many sweeps as on trained models.

    Every embedding gets a direction in common, which each head's queries and keys read with a strength of its own;
    rotation turns that part into logits by distance.
    """
    config = model.config
    common = (torch.randint(2, (config.hidden_size,), generator=generator) * 2 - 1).to(model.embed.weight)
    model.embed.weight += model.embed.weight.std() * common
    for attention in model.attention_layers():
        strength, content = (
            low + (high - low) * torch.rand(config.num_heads, generator=generator) for low, high in (STRENGTH, CONTENT)
        )
        # Half of a normalised input's length lies in the common direction at first.
        read = common * (2**0.5 / config.hidden_size)
        for weight, scale in ((attention.q_proj.weight, content), (attention.k_proj.weight, torch.ones_like(content))):
            rows = weight.view(config.num_heads, config.head_dim, -1)
            rows *= scale.to(weight)[:, None, None]
            rows += strength.sqrt().to(weight)[:, None, None] * read


def with_moments(model: GPT) -> AdamW:
    """Return the trainer's optimiser with the moments of one update that changed nothing."""
    optimizer = build_optimizer(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def sequences(settings: CalibrationSettings, point: Point, model: GPT) -> tuple[list[Tensor], str]:
    """Return the calibration sequences in batches, and a word on what they are.

    Raises InputError for data with tokens that the model does not have, DataError for too little of it.
    """
    if settings.data is None:
        shape = (point.batch_size, point.length)
        generator = torch.Generator().manual_seed(settings.seed)
        ids = torch.randint(model.config.vocab_size, shape, generator=generator)
        return list(ids.split(settings.batch_size)), "random tokens"
    data = TokenData.open(settings.data)
    if data.vocab_size > model.config.vocab_size:
        raise InputError(f"{settings.data} has {data.vocab_size:,} tokens, the model {model.config.vocab_size:,}")
    ids = calibration_windows(data, length=point.length, count=point.batch_size, seed=settings.seed)
    return list(ids.split(settings.batch_size)), f"calibration text of {settings.data}"


def describe(model: GPT) -> dict[str, Any]:
    """Return the model's shape for a record."""
    return {**model.config.to_dict(), "live": [attention.layout.num_live for attention in model.attention_layers()]}
