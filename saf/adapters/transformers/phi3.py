"""Phi-3: queries, keys and values in one projection, rotary positions of all or some channels."""

from typing import Any

from torch import Tensor

from saf.adapters.transformers.attention import attend, state_of
from saf.adapters.transformers.family import SETTINGS, Family
from saf.adapters.transformers.llama import WINDOW
from saf.adapters.transformers.mask import Mask


def forward(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Mask = None,
    past_key_values: Any = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Compute an attention layer `[B, Tq, C]` with edited heads; its class's own takes their number from the model."""
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    state = state_of(module)
    assert state is not None
    counts = [len(state.layout.rows[role]) for role in ("query", "key", "value")]
    heads = module.qkv_proj(hidden_states).unflatten(-1, (sum(counts), module.head_dim)).transpose(1, 2)
    query, key, value = heads.split(counts, dim=1)
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, module.layer_idx)
    dropout = module.attention_dropout if module.training else 0.0
    window = getattr(module.config, "sliding_window", None)
    rest |= {"scaling": module.scaling, "sliding_window": window}
    mixed, _ = attend(module, query, key, value, attention_mask, dropout, **rest)
    return module.o_proj(mixed.flatten(2)), None


PHI3 = Family(
    name="Phi-3",
    particular=WINDOW,
    attention="Phi3Attention",
    projections={"query_key_value": "qkv_proj", "output": "o_proj"},
    settings=(*SETTINGS, "partial_rotary_factor", "original_max_position_embeddings"),
    forward=forward,
)
