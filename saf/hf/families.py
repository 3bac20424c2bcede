"""The families of transformers' models that can be frozen: a `Family` describes their attention layers.

A model's own forward pass stays. It reads the number of heads off the projections' sizes, so fewer query rows flow
through to the attention function, which is `saf.hf.attention.attend`. A family whose forward pass takes these numbers
from elsewhere sets them (`set_sizes`) or brings a forward pass for layers with edited heads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from saf.heads import HeadLayout, roles_of

SETTINGS = ("rope_parameters", "rope_theta", "rope_scaling", "head_dim", "sliding_window", "layer_types")
"""Fields of a configuration that, with the weights, determine the attention of most families."""
LINEAR, CONV1D = "torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D"
"""Kinds of projections: a weight `[out, in]`, and one `[in, out]`."""


# Functions have names, so that models with frozen heads can be pickled.
def attention_dropout(attention: Any) -> float:
    """Return the rate of dropout of a layer's attention weights."""
    return attention.attention_dropout


def scaling(attention: Any) -> float | None:
    """Return the factor of the products of queries and keys."""
    return attention.scaling


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the attention layers of a family of models are built; the defaults are Llama's."""

    name: str
    attention: str
    """The class of its attention layers."""
    projections: Mapping[str, str]
    """The layer's modules by the role of their rows, or the roles whose rows lie in one weight: `query_key_value`."""
    kind: str = LINEAR
    """The class of the projections."""
    dropout: Callable[[Any], float] = attention_dropout
    """Rate of dropout of a layer's attention weights."""
    dropout_setting: str = "attention_dropout"
    """The field of the configuration with that rate."""
    scale: Callable[[Any], float | None] = scaling
    """Factor of the products of queries and keys."""
    soft_cap: str | None = None
    """The layer's attribute with the cap of its logits."""
    settings: tuple[str, ...] = SETTINGS
    """Fields of the configuration that, with the weights, determine attention."""
    forward: Callable[..., Any] | None = None
    """Forward pass of a layer with edited heads, in place of its class's."""
    set_sizes: Callable[[Any, HeadLayout], None] | None = None
    """Sets how many heads each role has left, where the layer's forward pass does not read that off the weights."""
    output: Callable[[Any, Tensor], Tensor] | None = None
    """What a layer makes of its heads' outputs, if more than the output projection."""
    norm_after: bool = False
    """Whether a norm follows the layer before its output is added to the residual stream."""
    remark: str = ""
    """Its limits in a line, for `saf doctor`."""

    def module(self, attention: Any, role: str) -> Any:
        """Return the module of a layer that holds the rows of a role."""
        return next(getattr(attention, module) for name, module in self.projections.items() if role in roles_of(name))


SEPARATE = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
WINDOW = "a sliding window has to be as long as the inputs, and wants a growing cache"
WINDOWS = "layers with a sliding window stay ordinary, and want a growing cache"

LLAMA = Family(name="Llama", attention="LlamaAttention", projections=SEPARATE)
MISTRAL = Family(name="Mistral", attention="MistralAttention", projections=SEPARATE, remark=WINDOW)
QWEN2 = Family(name="Qwen2", attention="Qwen2Attention", projections=SEPARATE, remark=WINDOWS)
QWEN3 = Family(name="Qwen3", attention="Qwen3Attention", projections=SEPARATE, remark=WINDOWS)

GEMMA2 = Family(
    name="Gemma 2",
    attention="Gemma2Attention",
    projections=SEPARATE,
    soft_cap="attn_logit_softcapping",
    settings=(*SETTINGS, "query_pre_attn_scalar", "attn_logit_softcapping"),
    norm_after=True,
    remark=WINDOWS,
)
# Gemma 3 has the field of the soft cap and does not read it.
GEMMA3 = replace(
    GEMMA2,
    name="Gemma 3",
    attention="Gemma3Attention",
    soft_cap=None,
    settings=(*SETTINGS, "query_pre_attn_scalar", "rope_local_base_freq"),
)


def phi3_forward(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any = None,
    past_key_values: Any = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Compute an attention layer `[B, Tq, C]` with edited heads; its class's own reads their number off the config."""
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    from saf.hf.attention import attend

    counts = [len(module.saf.layout.rows[role]) for role in ("query", "key", "value")]
    heads = module.qkv_proj(hidden_states).unflatten(-1, (sum(counts), module.head_dim)).transpose(1, 2)
    query, key, value = heads.split(counts, dim=1)
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, module.layer_idx)
    dropout = module.attention_dropout if module.training else 0.0
    rest |= {"scaling": module.scaling, "sliding_window": getattr(module.config, "sliding_window", None)}
    mixed, _ = attend(module, query, key, value, attention_mask, dropout, **rest)
    return module.o_proj(mixed.flatten(2)), None


PHI3 = Family(
    name="Phi-3",
    attention="Phi3Attention",
    projections={"query_key_value": "qkv_proj", "output": "o_proj"},
    settings=(*SETTINGS, "partial_rotary_factor", "original_max_position_embeddings"),
    forward=phi3_forward,
    remark=WINDOW,
)


def gpt2_dropout(attention: Any) -> float:
    """Return the rate of dropout of a layer's attention weights."""
    return attention.attn_dropout.p


def gpt2_scale(attention: Any) -> float:
    """Return the factor of the products of queries and keys, which may depend on the layer."""
    factor = attention.head_dim**-0.5 if attention.scale_attn_weights else 1.0
    return factor / float(attention.layer_idx + 1) if attention.scale_attn_by_inverse_layer_idx else factor


def gpt2_sizes(attention: Any, layout: HeadLayout) -> None:
    """Let the forward pass split the projection's result by the rows that each role has left."""
    sizes = [len(layout.rows[role]) * attention.head_dim for role in ("query", "key", "value")]
    attention.split_size = attention.embed_dim if layout.ordinary else sizes


def gpt2_output(attention: Any, mixed: Tensor) -> Tensor:
    """Return the projected outputs of heads, perhaps none, with the dropout that follows in training."""
    # Conv1D itself cannot take inputs without channels.
    projected = attention.c_proj(mixed) if mixed.shape[-1] else attention.c_proj.bias.expand(*mixed.shape[:-1], -1)
    return attention.resid_dropout(projected)


GPT2 = Family(
    name="GPT-2",
    attention="GPT2Attention",
    projections={"query_key_value": "c_attn", "output": "c_proj"},
    kind=CONV1D,
    dropout=gpt2_dropout,
    dropout_setting="attn_pdrop",
    scale=gpt2_scale,
    settings=("scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
    set_sizes=gpt2_sizes,
    output=gpt2_output,
    remark="has attention dropout unless opened with attn_pdrop=0",
)

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, PHI3, GEMMA2, GEMMA3)
