"""What benchmarks need to know of a model: its heads, its matrices, and how it is built."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from saf.errors import InputError
from saf.heads import HeadLayout
from saf.models import GPTConfig, preset
from saf.models.config import PRESETS


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Hold the sizes of a decoder."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    mlp_matrices: int
    """Matrices of a layer's MLP: two, or three with a gate."""
    mlp_size: int
    """Their other dimension."""
    gpt: GPTConfig | None = None
    """Of this project's decoder; None for models of transformers."""
    family: str | None = None
    """Of a model of transformers: "Qwen3", "Llama"."""

    @classmethod
    def of(cls, config: GPTConfig) -> "ModelShape":
        """Return the shape of this project's decoder."""
        return cls(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            mlp_matrices=2,
            mlp_size=config.mlp_ratio * config.hidden_size,
            gpt=config,
        )

    def layout(self, frozen: Sequence[int] = ()) -> HeadLayout:
        """Return the layout of a layer with these heads frozen."""
        return HeadLayout(self.num_heads, self.num_kv_heads, tuple(sorted(frozen)))

    def attention_entries(self, layout: HeadLayout) -> int:
        """Return the matrix entries of one attention layer: queries of live heads, keys that they read, the rest."""
        return self.hidden_size * self.head_dim * sum(map(len, layout.rows.values()))

    def layer_entries(self, layout: HeadLayout) -> int:
        """Return the matrix entries of one decoder layer: its attention's, and the MLP's."""
        return self.attention_entries(layout) + self.hidden_size * self.mlp_matrices * self.mlp_size

    def sizes(self) -> dict[str, Any]:
        """Return the sizes in the words of transformers' configurations."""
        return {
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "intermediate_size": self.mlp_size,
        }


# Llama's sizes: 124m has the layers, heads and channels of GPT-2's small model, its gated MLP as many weights as that
# model's; 7b is the second Llama's smallest.
TRANSFORMERS = {
    "llama-124m": ModelShape(
        family="Llama",
        num_layers=12,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        hidden_size=768,
        vocab_size=50_304,
        mlp_matrices=3,
        mlp_size=2_048,
    ),
    "llama-7b": ModelShape(
        family="Llama",
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        hidden_size=4_096,
        vocab_size=32_000,
        mlp_matrices=3,
        mlp_size=11_008,
    ),
    "qwen3-4b": ModelShape(
        family="Qwen3",
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        hidden_size=2_560,
        vocab_size=151_936,
        mlp_matrices=3,
        mlp_size=9_728,
    ),
}


def shape_of(name: str, length: int, num_layers: int | None = None) -> ModelShape:
    """Return the shape of a preset at a context, or with other layers; raise InputError for an unknown name."""
    if name not in TRANSFORMERS:
        if name not in PRESETS:
            raise InputError(f"unknown model {name!r}; expected one of {sorted([*PRESETS, *TRANSFORMERS])}")
        more = {} if num_layers is None else {"num_layers": num_layers}
        return ModelShape.of(preset(name, max_length=length, **more))
    return TRANSFORMERS[name] if num_layers is None else replace(TRANSFORMERS[name], num_layers=num_layers)
