"""The models of a benchmark: what is asked of them, random weights, made-up patterns, a pinned attention kernel."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from saf.adapters import adapter_for
from saf.bench.harness.arms import FLEX, PRUNED, Arm
from saf.bench.harness.baselines import FlexAttention, causal_blocks
from saf.bench.harness.settings import SpeedSettings
from saf.bench.harness.shape import ModelShape, shape_of
from saf.bench.harness.synthetic import synthetic_patterns
from saf.bench.model.placement import choose_heads, heads_per_layer
from saf.errors import InputError, UnsupportedError
from saf.heads import HeadLayout, HeadSet
from saf.models import GPT, GPTConfig
from saf.surgery import finalize_, install_, prune_

Placement = Literal["early", "even", "groups"]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def dtype_of(asked: str, device: torch.device) -> torch.dtype:
    """Return the dtype of weights by its name, "auto" for what is usual on a device: bfloat16 on CUDA."""
    usual = "bf16" if device.type == "cuda" else "fp32"
    return DTYPES[usual if asked == "auto" else asked]


@dataclass(kw_only=True)
class ModelSettings(SpeedSettings):
    """Hold what benchmarks of whole models take."""

    model: str = "124m"
    """Preset of the model's shape; qwen3-4b and llamas, of transformers, for prefill, attention and decode alone."""
    num_layers: int | None = None
    """Layers, instead of the preset's: compiling all of a large model takes minutes."""
    placement: Placement = "early"
    """Which layers have frozen heads: mostly early ones, as measured on trained models, or all alike; groups are early
    too, of whole groups of heads that share keys."""
    per_layer: tuple[int, ...] = ()
    """Frozen heads of each layer, instead of --rates and --placement."""
    pruned: bool = False
    """Also measure each rate with the same heads pruned: their values and output columns are gone too."""
    fresh: bool = False
    """Take every timed block in a process of its own."""
    memory: bool = False
    """Also measure peak memory, one arm a process."""
    precompile: bool = False
    """First compile all arms in processes of their own, for the compiler's cache on disk; not with --fresh."""
    workers: int = 1
    """Processes of --memory and --precompile at a time, faster where the device holds as many models; one that fails
    beside others runs again alone."""

    def __post_init__(self):
        """Check the settings of models too."""
        super().__post_init__()
        self._require("num_layers", self.num_layers is None or self.num_layers >= 1, "at least 1")
        self._require("workers", self.workers >= 1, "at least 1")
        self._require("per_layer", not (self.per_layer and self.rates), "left out when rates are given")
        self._require("per_layer", all(count >= 0 for count in self.per_layer), "counts from 0")
        self._require("per_layer", not self.per_layer or sum(self.per_layer) > 0, "at least one head in all")
        self._require("pairs", self.pairs > 0 or self.memory, "at least 1 unless memory is measured")
        self._refuse("placement", bool(self.per_layer), "beside per_layer; leave one of them out")
        self._refuse("fresh", self.pairs == 0, "with pairs=0, which times nothing; leave it out")
        self._refuse("precompile", self.pairs == 0, "with pairs=0, which times nothing; leave it out")
        self._refuse("precompile", self.fresh, "with fresh, where every arm's processes compile; leave one of them out")
        self._refuse("precompile", self.compile == "off", "with compile='off'; leave one of them out")
        self._refuse("workers", not (self.memory or self.precompile), "without memory or precompile; add one of them")


@dataclass(kw_only=True)
class PassSettings(ModelSettings):
    """Hold what benchmarks of forward passes take beside: how long a timed block is, and what comes before it."""

    repeats: int = 40
    """Timed passes in a timed block; the block's time is their median."""
    block_ms: float = 200.0
    """Fewer repeats where a timed block would take longer than this, milliseconds."""
    settle_ms: float | None = None
    """Untimed passes before every timed block for about this long; left out: 400 ms on CUDA, none on CPU."""

    def __post_init__(self):
        """Check the settings of passes too."""
        super().__post_init__()
        self._require("block_ms", self.block_ms > 0, "above 0")
        self._require("settle_ms", self.settle_ms is None or self.settle_ms >= 0, "at least 0")


@dataclass(frozen=True)
class ModelPlan:
    """Hold the shape of a point's models, and which heads each rate freezes."""

    shape: ModelShape
    settings: ModelSettings
    max_length: int

    @classmethod
    def of(cls, settings: ModelSettings, length: int) -> "ModelPlan":
        """Resolve a preset at a context; raise InputError when `per_layer` does not fit it."""
        shape = shape_of(settings.model, length, settings.num_layers)
        if settings.per_layer and len(settings.per_layer) != shape.num_layers:
            raise InputError(f"per_layer needs {shape.num_layers} numbers; got {len(settings.per_layer)}")
        return cls(shape, settings, length)

    @property
    def config(self) -> GPTConfig:
        """Return the configuration of this project's decoder; raise InputError for another family."""
        if self.shape.gpt is None:
            raise InputError(
                f"{self.settings.model} can be measured by prefill, attention and decode alone; take another --model"
            )
        return self.shape.gpt

    @property
    def name(self) -> str:
        """Name the model, and how many layers of it where not all."""
        layers = self.settings.num_layers
        return self.settings.model + ("" if layers is None else f", {layers} layers")

    @property
    def own_rate(self) -> tuple[float, ...]:
        """Return the rate that `per_layer` makes, if it is given."""
        counts = self.settings.per_layer
        return (sum(counts) / (self.shape.num_layers * self.shape.num_heads),) if counts else ()

    def per_layer(self, arm: Arm) -> list[int]:
        """Return the frozen heads of each layer."""
        if arm.backend is None:
            return [0] * self.shape.num_layers
        if self.settings.per_layer:
            return list(self.settings.per_layer)
        counts = heads_per_layer(
            num_layers=self.shape.num_layers,
            num_heads=self.shape.num_heads // self._chosen_at_once,
            rate=arm.rate,
            placement="early" if self.settings.placement == "groups" else self.settings.placement,
        )
        return [count * self._chosen_at_once for count in counts]

    @property
    def _chosen_at_once(self) -> int:
        """Return how many heads are frozen together: one, or a whole group."""
        return self.shape.num_heads // self.shape.num_kv_heads if self.settings.placement == "groups" else 1

    def heads(self, arm: Arm) -> HeadSet:
        """Return the frozen heads."""
        size, drawn = self._chosen_at_once, torch.Generator().manual_seed(self.settings.seed)
        chosen = choose_heads([count // size for count in self.per_layer(arm)], self.shape.num_heads // size, drawn)
        return HeadSet((layer, size * one + each) for layer, one in chosen for each in range(size))

    def layouts(self, arm: Arm) -> list[HeadLayout]:
        """Return each layer's layout."""
        heads = self.heads(arm)
        found = [self.shape.layout(heads.in_layer(layer)) for layer in range(self.shape.num_layers)]
        return [layout.changed(layout.frozen, "pruned") for layout in found] if arm.backend == PRUNED else found

    def describe(self, arm: Arm) -> Mapping[str, Any]:
        """Return what a row tells of the arm's heads."""
        counts = self.per_layer(arm)
        return {"heads": sum(counts), "per_layer": counts}


def build_model(plan: ModelPlan, arm: Arm, *, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return an arm's model on `device`; every arm draws the same weights.

    Raises:
        InputError: Heads that do not exist, an unknown kernel or backend.
        UnsupportedError: A backend that cannot run here.
    """
    generator = torch.Generator(device).manual_seed(plan.settings.seed)
    if plan.shape.gpt is None:
        model = _of_transformers(plan, arm, device, dtype, generator)
    else:
        model = _gpt(plan.shape.gpt, arm, device, dtype, generator)
    heads = plan.heads(arm)
    if arm.backend == PRUNED:
        prune_(model, heads)
        finalize_(model)
    elif arm.backend is not None and len(heads):
        drawn = torch.Generator().manual_seed(plan.settings.seed)
        install_(model, heads, synthetic_patterns(len(heads), plan.max_length, drawn, device), backend=arm.backend)
    adapter = adapter_for(model)
    # Ordinary arms too: the same function, without frozen heads.
    adapter.attend_through_seam()
    for site in adapter.sites():
        site.pin(arm.kernel if site.frozen is None else arm.live_kernel)
    return model


def _of_transformers(
    plan: ModelPlan, arm: Arm, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> nn.Module:
    """Return a random model of the plan's shape, as transformers runs it."""
    from saf.integrations.random_model import random_model

    if arm.kernel == FLEX:
        raise UnsupportedError("flex is measured in this project's decoder only")
    made = {"max_length": plan.max_length, "device": device, "dtype": dtype, "generator": generator}
    return random_model(str(plan.shape.family), **made, **plan.shape.sizes())


def _gpt(config: GPTConfig, arm: Arm, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> GPT:
    """Return this project's decoder with drawn weights, its live heads on the arm's kernel."""
    model = GPT.undrawn(config, device)
    model.reset_parameters(generator)
    model.to(dtype)
    if arm.kernel == FLEX:
        blocks = causal_blocks(config.max_length, device)
        for attention in model.attention_layers():
            attention.live = FlexAttention(blocks)  # type: ignore[assignment]
    return model
