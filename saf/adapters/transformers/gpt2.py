"""GPT-2: queries, keys and values in one projection whose weight is stored transposed, learned positions."""

from typing import Any

from torch import Tensor

from saf.adapters.transformers.family import CONV1D, Family
from saf.heads import HeadLayout


def attention_dropout(attention: Any) -> float:
    """Return the rate of dropout of attention weights."""
    return attention.attn_dropout.p


def scale(attention: Any) -> float:
    """Return what products of queries and keys are multiplied by, which may depend on the layer."""
    factor = attention.head_dim**-0.5 if attention.scale_attn_weights else 1.0
    return factor / float(attention.layer_idx + 1) if attention.scale_attn_by_inverse_layer_idx else factor


def tell_sizes(attention: Any, layout: HeadLayout) -> None:
    """Let the forward pass split the projection's result by the rows that each role has left."""
    sizes = [len(layout.rows[role]) * attention.head_dim for role in ("query", "key", "value")]
    attention.split_size = attention.embed_dim if layout.ordinary else sizes


def output(attention: Any, mixed: Tensor) -> Tensor:
    """Return the projected outputs of heads, perhaps none, with the dropout that follows in training."""
    # Conv1D itself cannot take inputs without channels.
    projected = attention.c_proj(mixed) if mixed.shape[-1] else attention.c_proj.bias.expand(*mixed.shape[:-1], -1)
    return attention.resid_dropout(projected)


GPT2 = Family(
    name="GPT-2",
    particular="has attention dropout unless opened with attn_pdrop=0",
    attention="GPT2Attention",
    projections={"query_key_value": "c_attn", "output": "c_proj"},
    kind=CONV1D,
    dropout=attention_dropout,
    no_dropout="set attn_dropout.p of its attention layers to 0 (block.attn.attn_dropout.p = 0.0)",
    dropout_setting="attn_pdrop",
    scale=scale,
    settings=("scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
    tell_sizes=tell_sizes,
    output=output,
)
