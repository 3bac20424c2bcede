"""Gemma 2 and 3: a scale of their own, soft caps (2), norms of queries and keys (3), layers with sliding windows.

Heads of a layer with a sliding window stay ordinary: a pattern of all positions would say what they never see.
"""

from dataclasses import replace

from saf.adapters.transformers.family import SETTINGS, Family
from saf.adapters.transformers.llama import SEPARATE, WINDOWS

GEMMA2 = Family(
    name="Gemma 2",
    particular=WINDOWS,
    attention="Gemma2Attention",
    projections=SEPARATE,
    soft_cap="attn_logit_softcapping",
    settings=(*SETTINGS, "query_pre_attn_scalar", "attn_logit_softcapping"),
    norm_after=True,
)
# Gemma 3 has the field of the soft cap and does not read it.
GEMMA3 = replace(
    GEMMA2,
    name="Gemma 3",
    particular=WINDOWS,
    attention="Gemma3Attention",
    soft_cap=None,
    settings=(*SETTINGS, "query_pre_attn_scalar", "rope_local_base_freq"),
)
