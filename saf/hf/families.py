"""`FAMILIES` lists the model families of transformers that can be frozen, and how their attention layers are built.

`saf.hf.attention.edited_forward` computes an attention layer by its family's description. `random_model` returns a
model with random weights, at any shape, for benchmarks; `TRANSFORMERS` has the sizes of their presets.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from saf.heads import roles_of

SETTINGS = ("rope_parameters", "rope_theta", "rope_scaling", "head_dim", "sliding_window", "layer_types")
"""Fields of the configuration that affect the attention of most families."""
SEPARATE = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
LINEAR, CONV1D = "torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D"
"""Classes of projections: `nn.Linear` has a weight `[out, in]`, `Conv1D` one `[in, out]`."""
CAUSAL = ("ForCausalLM", "LMHeadModel")
"""Suffixes of the class names of causal language models."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the attention layers of a family of models are built; the defaults are Llama's."""

    name: str
    # Classes are known by name: importing the modeling files of all families takes 1.5 s.
    attention: str
    """Class name of its attention layers."""
    projections: Mapping[str, str] = field(default_factory=lambda: SEPARATE)
    """The layer's projections by role. A fused one has the roles of its rows in order: `query_key_value`."""
    projection_class: str = LINEAR
    """The class of the projections."""
    dropout: str = "attention_dropout"
    """The configuration's field with the dropout rate of attention weights."""
    soft_cap: str | None = None
    """The layer's attribute with the soft cap of its logits."""
    settings: tuple[str, ...] = SETTINGS
    """Fields of the configuration that affect attention; saved heads record them."""
    norms: bool = False
    """Whether `q_norm` and `k_norm` normalise queries and keys before the rotation."""
    output_dropout: str | None = None
    """The layer's dropout module behind the output projection."""
    post_norm: bool = False
    """Whether the layer's output passes a norm before it is added to the residual stream."""

    def module(self, attention: Any, role: str) -> Any:
        """Return a layer's projection with the rows of a role."""
        return next(getattr(attention, module) for name, module in self.projections.items() if role in roles_of(name))


FAMILIES = (
    Family(name="Llama", attention="LlamaAttention"),
    Family(name="Mistral", attention="MistralAttention"),
    Family(name="Qwen2", attention="Qwen2Attention"),
    Family(name="Qwen3", attention="Qwen3Attention", norms=True),
    Family(name="Arcee", attention="ArceeAttention"),
    Family(name="Helium", attention="HeliumAttention"),
    Family(
        name="GPT-2",
        attention="GPT2Attention",
        projections={"query_key_value": "c_attn", "output": "c_proj"},
        projection_class=CONV1D,
        dropout="attn_pdrop",
        settings=("scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
        output_dropout="resid_dropout",
    ),
    Family(
        name="Phi-3",
        attention="Phi3Attention",
        projections={"query_key_value": "qkv_proj", "output": "o_proj"},
        settings=(*SETTINGS, "partial_rotary_factor", "original_max_position_embeddings"),
    ),
    Family(
        name="Gemma 2",
        attention="Gemma2Attention",
        soft_cap="attn_logit_softcapping",
        settings=(*SETTINGS, "query_pre_attn_scalar", "attn_logit_softcapping"),
        post_norm=True,
    ),
    # Gemma 3's configuration has the field of the soft cap, but its attention does not read it.
    Family(
        name="Gemma 3",
        attention="Gemma3Attention",
        settings=(*SETTINGS, "query_pre_attn_scalar", "rope_local_base_freq"),
        norms=True,
        post_norm=True,
    ),
)
NO_FAMILY = Family(name="", attention="")
"""The family of all other models, which can only be evaluated: no layer has its class name."""


_SIZES = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "hidden_size", "intermediate_size",
)  # fmt: skip
# llama-124m has the layers, heads and channels of GPT-2's small model; its gated MLP has as many weights as that
# model's. llama-7b has the sizes of Llama-2-7B.
TRANSFORMERS: dict[str, tuple[str, dict[str, int]]] = {
    name: (family, dict(zip(_SIZES, sizes, strict=True)))
    for name, family, *sizes in (
        ("llama-124m", "Llama", 12, 12, 12, 64, 50_304, 768, 2_048),
        ("llama-7b", "Llama", 32, 32, 32, 128, 32_000, 4_096, 11_008),
        ("qwen3-4b", "Qwen3", 36, 32, 8, 128, 151_936, 2_560, 9_728),
    )
}
"""Family and sizes, as fields of the configuration, of each preset of transformers."""


def random_model(
    family: str, *, max_length: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator, **sizes: Any
) -> nn.Module:
    """Return a causal language model of a family (`"Qwen3"`, `"Llama"`) for up to `max_length` tokens.

    Matrices are drawn from `generator`, normal with std 0.02; norms are one. `sizes` are fields of the configuration.
    """
    import transformers

    of_config, of_model = (getattr(transformers, f"{family}{kind}") for kind in ("Config", "ForCausalLM"))
    config = of_config(**sizes, max_position_embeddings=max_length, tie_word_embeddings=True, use_cache=False)
    devices = [device] if device.type == "cuda" else []
    # transformers draws from the global generators, which callers keep; all weights are drawn again below.
    with torch.random.fork_rng(devices=devices), torch.device(device):
        model = cast(nn.Module, of_model(config))
    model.to(dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02, generator=generator)
        else:
            nn.init.ones_(parameter)
    return model
