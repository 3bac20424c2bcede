"""The families of transformers' models that can be frozen: a `Family` describes their attention layers.

A model's own forward pass stays, but that of attention layers with edited heads: `saf.hf.attention.edited_forward`
reads a family's description. `random_model` draws a model of a family at any shape.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from saf.heads import roles_of

SETTINGS = ("rope_parameters", "rope_theta", "rope_scaling", "head_dim", "sliding_window", "layer_types")
"""Fields of a configuration that, with the weights, determine the attention of most families."""
SEPARATE = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
LINEAR, CONV1D = "torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D"
"""Kinds of projections: a weight `[out, in]`, and one `[in, out]`."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the attention layers of a family of models are built; the defaults are Llama's."""

    name: str
    attention: str
    """The class of its attention layers."""
    projections: Mapping[str, str] = field(default_factory=lambda: SEPARATE)
    """The layer's modules by the role of their rows, or the roles whose rows lie in one weight: `query_key_value`."""
    kind: str = LINEAR
    """The class of the projections."""
    dropout: str = "attention_dropout"
    """The layer's attribute with the rate of dropout of its attention weights, or the module that applies it."""
    dropout_setting: str = "attention_dropout"
    """The field of the configuration with that rate."""
    soft_cap: str | None = None
    """The layer's attribute with the cap of its logits."""
    settings: tuple[str, ...] = SETTINGS
    """Fields of the configuration that, with the weights, determine attention."""
    norms: bool = False
    """Whether queries and keys pass `q_norm` and `k_norm` before the rotation."""
    after: str | None = None
    """The layer's module that follows the output projection."""
    norm_after: bool = False
    """Whether a norm follows the layer before its output is added to the residual stream."""

    def module(self, attention: Any, role: str) -> Any:
        """Return the module of a layer that holds the rows of a role."""
        return next(getattr(attention, module) for name, module in self.projections.items() if role in roles_of(name))

    def dropout_rate(self, attention: Any) -> float:
        """Return the rate of dropout of a layer's attention weights."""
        dropout = getattr(attention, self.dropout)
        return float(getattr(dropout, "p", dropout))


FAMILIES = (
    Family(name="Llama", attention="LlamaAttention"),
    Family(name="Mistral", attention="MistralAttention"),
    Family(name="Qwen2", attention="Qwen2Attention"),
    Family(name="Qwen3", attention="Qwen3Attention", norms=True),
    Family(
        name="GPT-2",
        attention="GPT2Attention",
        projections={"query_key_value": "c_attn", "output": "c_proj"},
        kind=CONV1D,
        dropout="attn_dropout",
        dropout_setting="attn_pdrop",
        settings=("scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
        after="resid_dropout",
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
        norm_after=True,
    ),
    # Gemma 3 has the field of the soft cap and does not read it.
    Family(
        name="Gemma 3",
        attention="Gemma3Attention",
        settings=(*SETTINGS, "query_pre_attn_scalar", "rope_local_base_freq"),
        norms=True,
        norm_after=True,
    ),
)


def random_model(
    family: str, *, max_length: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator, **sizes: Any
) -> nn.Module:
    """Return a causal language model of a family (`"Qwen3"`, `"Llama"`) for up to `max_length` tokens.

    Matrices are normal with std 0.02, norms are one, the embedding is the output's matrix too. `sizes` are fields of
    the family's configuration. Weights are drawn from `generator`; global generators are left alone.
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
