"""The models of a benchmark: random weights, frozen heads with made-up patterns, a pinned attention kernel."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from saf.bench.arms import Arm
from saf.bench.flex import FLEX, FlexAttention, causal_blocks
from saf.bench.placement import choose_heads, heads_per_layer
from saf.bench.settings import ModelSettings
from saf.bench.synthetic import synthetic_patterns
from saf.errors import InputError
from saf.models import GPT, GPTConfig, preset
from saf.models.rotary import Rotary
from saf.surgery import install_


@dataclass(frozen=True)
class ModelPlan:
    """The shape of a point's models, and which heads each rate freezes."""

    config: GPTConfig
    settings: ModelSettings

    @classmethod
    def of(cls, settings: ModelSettings, length: int) -> "ModelPlan":
        """Resolve a preset at a context; raise InputError when `per_layer` does not fit it."""
        config = preset(settings.model, max_length=length)
        if settings.per_layer and len(settings.per_layer) != config.num_layers:
            raise InputError(f"per_layer needs {config.num_layers} numbers; got {len(settings.per_layer)}")
        return cls(config, settings)

    @property
    def own_rate(self) -> tuple[float, ...]:
        """The rate that `per_layer` makes, if it is given."""
        counts = self.settings.per_layer
        return (sum(counts) / (self.config.num_layers * self.config.num_heads),) if counts else ()

    def per_layer(self, arm: Arm) -> list[int]:
        """Return the frozen heads of each layer."""
        if arm.backend is None:
            return [0] * self.config.num_layers
        if self.settings.per_layer:
            return list(self.settings.per_layer)
        return heads_per_layer(
            num_layers=self.config.num_layers,
            num_heads=self.config.num_heads,
            rate=arm.rate,
            placement=self.settings.placement,
        )

    def describe(self, arm: Arm) -> Mapping[str, Any]:
        """Return what a row tells of the arm's heads."""
        counts = self.per_layer(arm)
        return {"heads": sum(counts), "per_layer": counts}


def build_model(plan: ModelPlan, arm: Arm, *, device: torch.device, dtype: torch.dtype = torch.float32) -> GPT:
    """Return an arm's model on `device`; every arm draws the same weights.

    Raises:
        InputError: Heads that do not exist, an unknown kernel or backend.
        UnsupportedError: A backend that cannot run here.
    """
    seed, config = plan.settings.seed, plan.config
    model = _blank(config, device)
    model.reset_parameters(torch.Generator(device).manual_seed(seed))
    model.to(dtype)
    if arm.kernel == FLEX:
        blocks = causal_blocks(config.max_length, device)
        for attention in model.attention_layers():
            attention.live = FlexAttention(blocks)  # type: ignore[assignment]
    counts = plan.per_layer(arm)
    if arm.backend is not None and sum(counts):
        heads = choose_heads(counts, config.num_heads, torch.Generator().manual_seed(seed))
        patterns = synthetic_patterns(len(heads), config.max_length, torch.Generator().manual_seed(seed), device)
        install_(model, heads, patterns, backend=arm.backend)
    for attention in model.attention_layers():
        attention.live.kernel = arm.kernel if attention.frozen is None else arm.live_kernel
    return model


def _blank(config: GPTConfig, device: torch.device) -> GPT:
    """Return a model with unset weights on `device`; nothing is drawn on the way, which takes long for large ones."""
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=device)
    if model.rotary is not None:
        model.rotary = Rotary(config.head_dim, config.max_length).to(device)
    return model
